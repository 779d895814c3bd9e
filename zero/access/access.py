"""Reads and writes single parameters of an engine, their gradients and optimizer states, at every stage.

All states lie in flat buffers. A rank's part of a parameter is the intersection of the parameter's slot with
the rank's range. A read sends only the elements of that parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from torch import Tensor, nn

from ...ops.coded import decoded, is_coded, rows_of
from ...ops.comm.collectives import ACCESS_BUFFER, Collectives
from ...ops.flat import flattened, is_channels_last, overlap, shaped
from ...ops.rounding import upper_half
from ...utils.errors import UsageError
from ...utils.views import write
from ..core.master import Master
from ..core.owners import IN_SHARDS, IN_SLICES, ParamOwner, ShardView, clear_owner, set_owner
from ..core.param_bucket import ParamBucket
from ..layout.groups import LOW_PRECISION
from ..layout.layout import Slot
from ..layout.slices import Reader, Slices
from ..model.sharded_model import ShardedModel
from ..model.update import Updater


class Factor(Protocol):
    """What gradients are multiplied with: sums over ranks, and one rank's own."""

    def __call__(self) -> float: ...

    def of_own(self) -> float: ...


class StepState(Protocol):
    """What an access needs to know of the engine.

    gradient_factor: the step uses this factor times the sum of gradients, before clipping.
    """

    @property
    def gradient_factor(self) -> Factor: ...

    def reduces_when_asked(self) -> bool:
        """Gradients that are not reduced yet may be: the step will get no others."""

    def check_usable(self) -> None:
        """Raises UsageError: the states are elsewhere, or the engine was destroyed."""


@dataclass(frozen=True, eq=False)
class _Place:
    """The place of a parameter: slot `position` of `flat`. `master` updates it; None if it is frozen."""

    number: int
    flat: ParamBucket
    position: int
    master: Master | None

    @property
    def slot(self) -> Slot:
        return self.flat.layout.slots[self.position]


@final
class Access(ParamOwner):
    """Owns the parameters of one engine. All ranks call every method but `name_of` together."""

    def __init__(self, model: ShardedModel, updater: Updater, step: StepState) -> None:
        self.collectives = model.collectives
        self.flat_groups = model.flat_groups
        self._data = model.flat_groups.data.everyone
        self._model = model
        self._updater = updater
        self._step = step
        self._held = ExitStack()  # of `hold_all`
        masters = {id(master.params): master for master in updater.masters}
        self._places: dict[int, _Place] = {}
        self._params: list[nn.Parameter] = []
        for unit in model.units:
            for flat in unit.params:
                for position, param in enumerate(flat.params):
                    place = _Place(len(self._params), flat, position, masters.get(id(flat)))
                    self._places[id(param)] = place
                    self._params.append(param)
                    set_owner(param, self)
        # frozen parameters of stages 0 to 2 are in no flat buffer: every rank holds them in full
        self._loose: dict[int, tuple[int, str]] = {}
        self._slices: dict[int, Tensor] = {}  # of those of them that `override` made whole
        for name, param in model.units[-1].modules[0].named_parameters():
            if id(param) not in self._places:
                name = model.flat_groups.name_of(param, name)
                self._loose[id(param)] = (len(self._params), name)
                self._params.append(param)
                set_owner(param, self)

    def release(self) -> None:
        """Stop owning the parameters."""
        for param in self._params:
            clear_owner(param)
        self._params = []
        self._places, self._loose, self._slices = {}, {}, {}

    # -- values -----------------------------------------------------------------------------------------

    def name_of(self, param: nn.Parameter) -> str:
        if id(param) in self._loose:
            return self._loose[id(param)][1]
        return self._places[id(param)].slot.name

    def number_of(self, param: nn.Parameter) -> int:
        if self.together(param) is not self._data:  # other stages and slices count in another order
            return zlib.crc32(self.name_of(param).encode())
        if id(param) in self._loose:
            return self._loose[id(param)][0]
        return self._places[id(param)].number

    def group_of(self, param: nn.Parameter) -> Collectives:
        return self._model.flat_groups.of(param).collectives

    def together(self, param: nn.Parameter) -> Collectives:
        slices = self._slices_of(param)
        return self._model.flat_groups.of(param).everyone if slices is None else slices.together

    def is_first_replica(self, param: nn.Parameter) -> bool:
        return self._model.flat_groups.of(param).is_first_replica

    def full_shape(self, param: nn.Parameter) -> tuple[int, ...]:
        slices = self._slices_of(param)
        return tuple(param.shape) if slices is None else slices.whole_shape

    def _slices_of(self, param: nn.Parameter) -> Slices | None:
        return self._model.flat_groups.slices.get(id(param))

    def _settle(self, param: nn.Parameter | None = None) -> None:
        """End what is in flight: its collectives come before those of the access.

        param: other pipeline stages do not take part in an access of what they do not hold.
        """
        self._model.backward_pass.end_script_backward()
        self._model.gather_deferred(None if param is None else self._model.flat_groups.of(param))

    def settle_alone(self) -> None:
        if self._model.needs_others_to_gather:
            raise UsageError(
                "state_dict() or load_state_dict() of the module after step(), with overlap_step: its values "
                "are still being updated, and they arrive on all ranks together; call engine.state_dict() or "
                "engine.load_state_dict(...) on every rank, or set offload_optimizer.overlap_step to false"
            )
        self._settle()

    def agree(self, doing: str, param: nn.Parameter, value: Tensor | None = None) -> None:
        self._step.check_usable()
        self._settle(param)
        super().agree(doing, param, value)

    def value(self, param: nn.Parameter) -> ShardView:
        self._step.check_usable()  # also before `agree`: a check of shapes looks at the value
        self._settle(param)
        place = self._places.get(id(param))
        if place is None or place.master is None:
            return self.compute(param)
        master, is_whole = place.master, not place.master.is_sharded
        place.flat.take_edits(place.position)
        first = self._first(place, is_whole=is_whole)
        halves = None if master.split is None else master.split.halves
        held = master.tensor if halves is None else halves.low
        stored = self._cut(place, held, first=first, is_whole=is_whole)
        begin = int(stored.local.storage_offset()) - int(held.storage_offset())
        end = begin + stored.local.numel()
        master.take_edits(begin, end)
        if halves is None:
            return stored
        part = halves.part(begin, end)
        return replace(stored, local=part.joined(), halves=part)

    def compute(self, param: nn.Parameter) -> ShardView:
        self._settle(param)
        place = self._places.get(id(param))
        if place is None:
            held, slices = self._slices.get(id(param), param.data), self._slices_of(param)
            return ShardView(tuple(held.shape), held.reshape(-1), (), is_whole=True, slices=slices)
        flat = place.flat
        flat.take_edits(place.position)
        is_whole = not flat.shards_params
        first = self._first(place, is_whole=is_whole)
        return self._cut(
            place, flat.raw if is_whole else flat.shard, first=first, is_whole=is_whole
        )

    def _cut(self, place: _Place, held: Tensor, *, first: int, is_whole: bool) -> ShardView:
        """The slot's part of `held`, which begins at element `first` of the flat buffer."""
        slot, layout = place.slot, place.flat.layout
        bounds = [_overlap(slot, *layout.shard_range(rank)) for rank in range(layout.world_size)]
        start, stop = (0, slot.numel) if is_whole else bounds[place.flat.collectives.rank]
        begin = slot.offset - first
        local = held[begin + start : begin + stop] if stop > start else held[:0]
        slices = self._slices_of(place.flat.params[place.position])
        return ShardView(slot.shape, local, bounds, is_whole, slices, slot.channels_last)

    def _first(self, place: _Place, *, is_whole: bool) -> int:
        """The first element of the flat buffer that this rank holds."""
        return 0 if is_whole else place.flat.layout.shard_range(place.flat.collectives.rank)[0]

    def write(self, param: nn.Parameter, reader: Reader) -> None:
        self.num_writes += 1
        place = self._places.get(id(param))
        if place is None:
            own_reader = self.compute(param).own(reader)
            held = self._slices.get(id(param), param.data)
            write(held, own_reader(0, held.numel()).view(held.shape))
            if id(param) in self._slices:  # it is whole for now
                write(param.data, reader(0, param.numel()).view(param.shape))
            return
        flat = place.flat
        flat.wait()  # a forward that failed has left a gather of the old values
        flat.sender.forget()
        rank = flat.collectives.rank
        with torch.no_grad():
            stored = self.value(param)
            flat.memory.wait_for_readers()
            stored.write(reader, rank)
            own_reader = stored.own(reader)
            if place.master is not None and place.master.rounds_away:
                reader, own_reader = _upper_halves(reader), _upper_halves(own_reader)
            has_copy = place.master is not None and place.master.has_compute_copy
            if flat.memory.is_shared or has_copy or self._has_own_values(place):
                self._write_compute(param, place, reader)
            self._write_whole(param, place, reader, own_reader)
            if place.master is not None and place.master.has_sent_delta:
                place.master.remember()

    def _write_compute(self, param: nn.Parameter, place: _Place, reader: Reader) -> None:
        """Set the values that forwards compute with."""
        if place.flat.memory.is_shared:
            self._write_shared(place, reader)
        else:
            self.compute(param).write(reader, place.flat.collectives.rank)

    @staticmethod
    def _write_whole(
        param: nn.Parameter, place: _Place, reader: Reader, own_reader: Reader
    ) -> None:
        """Set the values that are gathered now. own_reader: a reader of this rank's slice."""
        flat = place.flat
        if flat.is_overridden(place.position):  # inside GatheredParameters
            write(param.data, reader(0, param.data.numel()).view(param.data.shape))
        if flat.shards_params and flat.is_unsharded:
            flat.raw[place.slot.offset : place.slot.stop].copy_(own_reader(0, place.slot.numel))

    def _write_shared(self, place: _Place, reader: Reader) -> None:
        """Set the values that forwards compute with: one rank of each machine writes all of them."""
        memory = place.flat.memory
        if memory.writable is not None:
            whole = self._cut(place, memory.writable, first=0, is_whole=True)
            whole.write(reader, place.flat.collectives.rank)
        memory.wait_for_readers()

    def why_in_parts(self, param: nn.Parameter) -> str:
        if self._slices_of(param) is not None:
            return IN_SLICES
        place = self._places.get(id(param))
        return IN_SHARDS if place is not None and place.flat.shards_params else ""

    def is_read_only(self, param: nn.Parameter) -> bool:
        place = self._places.get(id(param))
        return place is not None and place.flat.memory.is_shared

    def edit(self, param: nn.Parameter, reader: Reader) -> None:
        place = self._places.get(id(param))
        if place is None or place.master is None or not place.master.casts:
            return self.write(param, reader)
        if not place.master.has_sent_delta:
            return self._edit_compute(param, place, reader)
        with torch.no_grad():
            master = self.value(param)
            kept = master.local.clone()
            own_reader = master.own(reader)
            new = own_reader(*master.range_of(place.flat.collectives.rank)).to(kept.device)
            changed = new != kept.to(place.flat.dtype)
            self.write(param, reader)
            master.local.copy_(torch.where(changed, master.local, kept))

    def _edit_compute(self, param: nn.Parameter, place: _Place, reader: Reader) -> None:
        """Set the computed values alone. The master takes them later, where they still differ from it.

        So a script may swap values for an evaluation and put the old ones back.
        """
        self.num_writes += 1
        flat, master = place.flat, place.master
        assert master is not None
        flat.wait()
        flat.sender.forget()
        master.wait()
        self.begin_edit(param)
        with torch.no_grad():
            own_reader = self.compute(param).own(reader)
            flat.memory.wait_for_readers()
            self._write_compute(param, place, reader)
            self._write_whole(param, place, reader, own_reader)
        flat.is_written = True

    def begin_edit(self, param: nn.Parameter) -> None:
        place = self._places.get(id(param))
        if place is not None and place.master is not None and place.master.split is not None:
            place.master.split.begin_edit()

    @staticmethod
    def _has_own_values(place: _Place) -> bool:
        """The computed values are full, and the master covers only this rank's shard of them."""
        return place.master is not None and place.master.is_sharded and not place.flat.shards_params

    def is_overridden(self, param: nn.Parameter) -> bool:
        place = self._places.get(id(param))
        if place is None:
            return id(param) in self._slices
        return place.flat.is_held or place.flat.is_overridden(place.position)

    def hold_all(self, params: Sequence[nn.Parameter]) -> bool:
        gatherer, groups = self._model.gatherer, self._model.flat_groups
        if gatherer is None or groups.slices or groups.mesh.pipe > 1:
            return False
        if self._model.defers or gatherer.holds_all or gatherer.is_uneven or gatherer.in_backward:
            return False
        given = {id(param) for param in params}
        if not 0 < self._model.num_dropped <= len(given):
            return False
        flats = [flat for unit in self._model.units for flat in unit.params]
        held = [flat for flat in flats if flat.may_be_resharded]
        is_exact = not any(flat.sender.rounds or flat.overridden for flat in flats)
        if not (is_exact and given.issuperset(id(p) for flat in held for p in flat.params)):
            return False
        self.agree("GatheredParameters of all parameters", held[0].params[0])
        self._model.take_edits()
        gatherer.end_keeping()
        self._held.enter_context(gatherer.keeping_order())
        self._held.enter_context(gatherer.holding_all())
        return True

    def release_all(self, *, checks: bool) -> list[str]:
        held = [flat for unit in self._model.units for flat in unit.params if flat.is_held]
        names = [name for flat in held if (name := flat.discard())]
        self._held.close()
        if not checks:
            return []
        row = torch.tensor([bool(names)], dtype=torch.uint8, device=self._data.device)
        is_edited = bool(self._data.gather_small(row, ACCESS_BUFFER).any())
        return names or ["a parameter"] if is_edited else []

    def holds_full(self, param: nn.Parameter) -> bool:
        place = self._places.get(id(param))
        return place is None or place.flat.is_unsharded or self.is_overridden(param)

    def stays_full(self, param: nn.Parameter) -> bool:
        place = self._places.get(id(param))
        return place is None or not place.flat.may_be_resharded

    def register_use(self, param: nn.Parameter, module: nn.Module) -> bool:
        return self._model.register_use(param, module)

    def trains(self, param: nn.Parameter) -> bool:
        place = self._places.get(id(param))
        return place is not None and place.master is not None

    def override(self, param: nn.Parameter, full: Tensor) -> None:
        place = self._places.get(id(param))
        if place is None:
            self._slices[id(param)] = param.data
            param.data = full
        else:
            place.flat.override(place.position, full)

    def clear_override(self, param: nn.Parameter) -> None:
        place = self._places.get(id(param))
        if place is not None:
            if place.flat.is_overridden(place.position):  # else it is held
                place.flat.clear_override(place.position)
        elif id(param) in self._slices:  # else the engine has ended inside of the context
            param.data = self._slices.pop(id(param))

    def move_into(self, param: nn.Parameter, target: Tensor) -> None:
        raise UsageError(
            f"{self.name_of(param)} already belongs to another engine: call destroy() on that engine first, or "
            "give this one a model of its own"
        )

    # -- gradients --------------------------------------------------------------------------------------

    def grad(self, param: nn.Parameter) -> ShardView | None:
        """The sum over ranks as it lies in memory, without any scaling; None: there is none now.

        Raises:
            UsageError: the parameter is frozen, or its gradient is not reduced yet, or not in this step.
        """
        master = self._trained(param, "its gradient")
        grads = master.grads
        is_reduced = self._model.reduce_rest(also_held=self._step.reduces_when_asked())
        if not is_reduced and grads.has_local and not grads.is_single_rank:
            raise UsageError(
                f"the gradient of {self.name_of(param)} is not reduced over the ranks yet: read it after the "
                "last backward of the accumulation, outside of no_sync(), and before step()"
            )
        held = grads.reduced()
        if held is None:
            return None
        place, is_whole = self._places[id(param)], not master.is_sharded
        first = self._first(place, is_whole=is_whole)
        return self._cut(place, held, first=first, is_whole=is_whole)

    def holds_grads(self, param: nn.Parameter) -> bool:
        """Each rank has its own gradient of `param`, because the sum over ranks is put off. For all ranks."""
        master = self._trained(param, "its gradient")
        grads = master.grads
        if grads.is_single_rank or grads.is_lossy:
            return False
        return not self._model.reduce_rest(also_held=self._step.reduces_when_asked())

    def own_grad(self, param: nn.Parameter) -> Tensor | None:
        """Where `holds_grads`: a new tensor with the gradient of this rank's losses alone; None: it has none.

        Shapes:  this rank's slice. Nothing is sent.
        """
        place, sums = self._places[id(param)], self._trained(param, "its gradient").grads.sums()
        if sums.local is None or not sums.filled[place.position]:
            return None
        slot = place.slot
        grad = sums.local.narrow(0, slot.offset, slot.numel)
        grad = shaped(grad, slot.shape, slot.channels_last)
        wide = torch.float32 if grad.dtype in LOW_PRECISION else grad.dtype
        return grad.to(wide, copy=True).mul_(self._step.gradient_factor.of_own())

    def gradient_factor(self) -> float:
        """The factor on a sum of gradients before clipping, usually 1 / (ranks x loss scale)."""
        return self._step.gradient_factor()

    # -- optimizer states -------------------------------------------------------------------------------

    def optimizer_state(self, param: nn.Parameter, key: str) -> ShardView | Tensor | None:
        """The optimizer's state `key`; a scalar tensor for step counts; None where there is none yet.

        Raises:
            UsageError: the parameter is frozen, or the optimizer has no such state.
        """
        master = self._trained(param, f'optimizer state "{key}"')
        place = self._places[id(param)]
        state, held = self._updater.state_of(master, place.slot)
        if state is None:
            return None
        if key not in state:
            raise UsageError(
                f'optimizer state "{key}" of {self.name_of(param)}: the optimizer has '
                f"{', '.join(sorted(state)) or 'none'}; use one of these keys"
            )
        value = state[key]
        if isinstance(value, dict):
            raise UsageError(
                f'optimizer state "{key}" of {self.name_of(param)} belongs to the whole parameter, on ranks '
                "that have a part of it: read engine.optimizer.state, which has it by the parameter's name"
            )
        if not isinstance(value, Tensor) or value.dim() == 0:
            return torch.as_tensor(value)
        if held is None:  # the state has the parameter's shape: it is not a range of a flat buffer
            last = is_channels_last(value)
            flat = flattened(value, last)
            bounds, slices = [(0, flat.numel())], self._slices_of(param)
            return ShardView(place.slot.shape, flat, bounds, True, slices, last)
        codes, value = value, decoded(value) if is_coded(value) else value
        if held != (0, 0) and value.shape != (held[1] - held[0],):
            raise UsageError(
                f"this optimizer state of {place.slot.name} has shape {tuple(value.shape)}: it is not per "
                "element, so it has no full value; read engine.optimizer.state"
            )
        is_whole = not master.is_sharded
        first = self._first(place, is_whole=is_whole) + held[0]
        view = self._cut(place, value, first=first, is_whole=is_whole)
        if not is_coded(codes):
            return view
        begin = int(view.local.storage_offset())
        return replace(view, codes=codes[rows_of(begin, begin + view.local.numel())])

    def _trained(self, param: nn.Parameter, what: str) -> Master:
        place = self._places.get(id(param))
        master = None if place is None else place.master
        if master is None:
            why = "is empty" if param.requires_grad and not param.numel() else "is frozen"
            raise UsageError(
                f"{what}: {self.name_of(param)} {why}, so the engine keeps no gradient and no optimizer "
                "state for it"
            )
        return master


def _upper_halves(reader: Reader) -> Reader:
    """A reader of the upper halves of the fp32 values."""
    return lambda start, stop: upper_half(reader(start, stop).float())


def _overlap(slot: Slot, start: int, stop: int) -> tuple[int, int]:
    """[start, stop) of the flat buffer as elements of the slot; empty if they do not overlap."""
    low, high = overlap((start, stop), (slot.offset, slot.stop))
    return low - slot.offset, high - slot.offset
