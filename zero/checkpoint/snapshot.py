"""Lists every tensor of a rank's model and its optimizer, with the elements of the flats that it holds.

    flats     0 .. k     the flat buffers of the layout
              k+1 ..     separate tensors: frozen parameters below stage 3, buffers of modules, and optimizer
                         states that are neither per element nor a single number

The numbers are those of this pipeline stage and slice: a checkpoint has the flats of all of them. Nothing is
copied: a block is the tensor that is trained, in full or this rank's part.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from ...offload.interfaces import Blocks, StateStorage
from ...ops.boxes import Box
from ...ops.coded import ROW_BYTES, decoded, has_elements, is_coded, rows_of
from ...ops.flat import CHUNK_NUMEL, flattened, overlap
from ...ops.mesh import Mesh
from ...ops.optim.shard_optimizer import PartNumbers, PartTensors
from ...utils.errors import UsageError
from ..core.master import Master
from ..layout.groups import FlatGroup
from ..layout.layout import FlatLayout, Slot
from ..model.sharded_model import ShardedModel
from ..model.update import Updater
from .ranges import COPY, ERROR, SERVER, ConstantRange, SavedFlat, share, share_of_replica

COMPILED = "_orig_mod."  # torch.compile adds it to names; a checkpoint omits it
STEP = "step"  # for a parameter of one element its shape does not show that it is a constant
SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class StateBlock:
    """`tensor` holds elements [start, start + numel) of `key` of flat number `flat`.

    blocks: reads its values, if they are on a disk, have 8 bits or are halves; then the tensor has none.
    reads_memory: `blocks` needs no disk.
    is_own: no other rank has these elements of `key`, so this rank saves all of them.
    is_shard: they are this rank's shard of the flat, or in it; other ranks have others.
    """

    flat: int
    key: str
    start: int
    tensor: Tensor
    blocks: Blocks | None = None
    reads_memory: bool = False
    is_own: bool = False
    is_shard: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that the optimizer holds: elements [start, start + numel) of flat number `flat`.

    name: of the parameter if the tensor is a full parameter with its own shape; else None.
    group: the index of its group in the optimizer.
    state_storage: where its states are between updates.
    is_shard: as in `StateBlock`.
    channels_last: it is a full parameter with this order in memory.
    state_dtype: of its floating-point states; None: the dtype that the optimizer gives them.
    """

    tensor: Tensor
    flat: int
    start: int
    name: str | None
    group: int
    state_storage: StateStorage
    is_shard: bool = False
    channels_last: bool = False
    state_dtype: torch.dtype | None = None


def plain(name: str) -> str:
    """The name of a parameter without the prefix of torch.compile."""
    return name.replace(COMPILED, "")


def name_of(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def _saved(layout: FlatLayout, *, trains: bool, dtype: torch.dtype) -> SavedFlat:
    slots = layout.slots
    if any(COMPILED in slot.name for slot in slots):
        slots = tuple(replace(slot, name=plain(slot.name)) for slot in slots)
    return SavedFlat("param", trains, name_of(dtype), layout.numel, slots)


def _state(name: str, shape: tuple[int, ...], dtype: str) -> SavedFlat:
    slot = Slot(name, shape, 0, 0)
    return SavedFlat("state", False, dtype, slot.numel, (slot,))


def _alone(kind: str, name: str, tensor: Tensor, box: Box | None = None) -> SavedFlat:
    slot = Slot(name, tuple(tensor.shape), 0, 0, box)
    return SavedFlat(kind, False, name_of(tensor.dtype), tensor.numel(), (slot,))


@final
class Snapshot:
    """All tensors to save at this moment. `flats`: the same on all ranks with this part of the model."""

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModel,
        updater: Updater,
        *,
        is_alone: bool = False,
    ) -> None:
        """is_alone: this rank saves all that it holds, as the only one.

        Raises:
            UsageError: the optimizer has a state that is neither a number nor a tensor of a known kind.
        """
        self._is_alone = is_alone
        self.rank = 0 if is_alone else sharded.collectives.rank
        self._data = sharded.flat_groups.data
        self.mesh = Mesh(pipe=1, data=1) if is_alone else sharded.flat_groups.mesh
        self.place = self.mesh.coordinates(self.rank)
        self._updater = updater
        updater.wait()
        sharded.gather_deferred()
        self.masters = updater.masters
        self.sharded = sharded
        self.optimizer = optimizer = updater.optimizer
        self.state = {} if optimizer is None else optimizer.state  # by the optimizer's tensors
        self.flats: list[SavedFlat] = []
        self.values: list[StateBlock] = []
        self.states: list[StateBlock] = []
        self.constants: list[ConstantRange] = []
        self._layouts: list[FlatLayout] = []
        self._groups: list[FlatGroup] = []  # of each flat
        self._slots: list[dict[int, Slot]] = []  # of a flat buffer, by offset
        self._numbers: dict[int, int] = {}  # id(ParamBucket) -> number
        # of the parameters in a flat buffer: name in the layout, key and what is saved
        self.part_states: dict[int, list[tuple[str, str, SavedFlat]]] = {}
        self._add_flats()
        self._add_alone(module)
        if not is_alone:  # nobody reads such values under other names
            self._add_tied(module)
        self.held = list(self._find_held())
        self._add_states()
        self._add_part_tensors()

    def share(self, flat: int) -> tuple[int, int]:
        """[start, stop) of a flat that this rank writes. The shares of all its ranks cover it.

        Buffers of modules that several stages have: each stage has a share.
        """
        group = self._groups[flat]
        if self._is_alone:
            return 0, self.flats[flat].numel
        if flat < len(self._layouts):
            shard = self._layouts[flat].shard_range(group.collectives.rank)
            return share_of_replica(shard, group.replica, flat)
        everyone = group.everyone
        # stages number a flat that they share differently
        is_data = everyone is self._data.everyone
        turn = flat if is_data else zlib.crc32(self.flats[flat].slots[0].name.encode())
        return share(self.flats[flat], everyone.rank, everyone.world_size, turn)

    def leave_out_frozen(self) -> None:
        """The values of frozen parameters are not saved; their names stay."""
        for number, flat in enumerate(self.flats):
            if flat.kind == "param" and not flat.trains:
                self.flats[number] = replace(flat, has_values=False)
        self.values = [block for block in self.values if self.flats[block.flat].has_values]

    def number_of(self, master: Master) -> int:
        """The number of the flat of `master`."""
        return self._numbers[id(master.params)]

    # -- parameters and buffers -------------------------------------------------------------------------

    def _add_flats(self) -> None:
        masters = {id(master.params): master for master in self.masters}
        for unit in self.sharded.units:
            for flat in unit.params:
                number = self._numbers[id(flat)] = len(self.flats)
                master = masters.get(id(flat))
                self._layouts.append(flat.layout)
                self._groups.append(flat.group)
                self.flats.append(_saved(flat.layout, trains=master is not None, dtype=flat.dtype))
                self._slots.append({slot.offset: slot for slot in self.flats[-1].slots})
                is_part = flat.shards_params if master is None else master.is_sharded
                start = flat.layout.shard_range(flat.collectives.rank)[0] if is_part else 0
                tensor = flat.stored_shard.tensor if master is None else master.raw
                blocks = flat.stored_shard.blocks()
                is_split = master is not None and master.split is not None
                if master is not None:
                    blocks = master.state_storage.blocks_of(tensor)
                block = StateBlock(number, "value", start, tensor, blocks, is_shard=is_part)
                self.values.append(replace(block, reads_memory=is_split))

    def _add_alone(self, module: nn.Module) -> None:
        inside = {id(p) for unit in self.sharded.units for flat in unit.params for p in flat.params}
        groups = self.sharded.flat_groups
        params, buffers = _params_and_buffers(module, inside)
        for name, param in params:
            box = groups.box_of(param)
            flat = _alone("param", plain(groups.name_of(param, name)), param.data, box)
            self._append(flat, param.data, "value", self.values, groups.of(param))
        for name, buffer in buffers:
            flat = _alone("buffer", plain(name), buffer)
            self._append(flat, buffer, "value", self.values, self._data)

    def _add_tied(self, module: nn.Module) -> None:
        name_of = self.sharded.flat_groups.name_of
        names = {id(p): plain(name_of(p, name)) for name, p in module.named_parameters()}
        names.update((id(tensor), plain(name)) for name, tensor in _params_and_buffers(module)[1])
        others: dict[str, list[tuple[str, str]]] = {}
        for full, tensor in module.state_dict(keep_vars=True).items():
            other, name = plain(full), names.get(id(tensor))
            if name is not None and name != other:
                others.setdefault(name, []).append((other, name))
        if not others:
            return
        for number, flat in enumerate(self.flats):
            tied = tuple(pair for slot in flat.slots for pair in others.get(slot.name, ()))
            self.flats[number] = replace(flat, tied=tied)

    def _append(
        self, flat: SavedFlat, tensor: Tensor, key: str, blocks: list[StateBlock], group: FlatGroup
    ) -> None:
        blocks.append(StateBlock(len(self.flats), key, 0, tensor))
        self.flats.append(flat)
        self._groups.append(group)

    # -- the optimizer ----------------------------------------------------------------------------------

    def _find_held(self) -> Iterator[Held]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for number, group in enumerate(groups):
            for tensor in group["params"]:
                place = self._updater.optimizer_tensors.of(tensor)
                if place is not None:
                    yield self._held(tensor, *place, number)

    def _held(self, tensor: Tensor, master: Master, offset: int, group: int) -> Held:
        layout = master.params.layout
        start = offset + (layout.shard_range(master.rank)[0] if master.is_sharded else 0)
        number = self.number_of(master)
        slot = None if master.is_sharded else self._slots[number].get(start)
        is_tensor = slot is not None and slot.shape == tensor.shape and slot.box is None
        name = slot.name if slot is not None and is_tensor else None
        chooses = self.optimizer is not None and self.optimizer.rounds_masters
        return Held(
            tensor,
            number,
            start,
            name,
            group,
            master.state_storage,
            is_shard=master.is_sharded,
            channels_last=slot is not None and is_tensor and slot.channels_last,
            state_dtype=master.items[0].state_dtype if chooses else None,
        )

    def _add_states(self) -> None:
        known = {id(held.tensor) for held in self.held}
        for tensor in self.state:
            if id(tensor) not in known:
                self._refuse("state", "that belongs to no parameter")
        single = {STEP}  # keys with one number for all elements of a tensor
        for held in self.held:
            for key, value in self.state.get(held.tensor, {}).items():
                if isinstance(value, Tensor) and value.numel() == 1 < held.tensor.numel():
                    single.add(key)
        for held in self.held:
            for key, value in self.state.get(held.tensor, {}).items():
                self._add_state(held, key, value, is_single=key in single)

    def _add_state(self, held: Held, key: str, value: Any, *, is_single: bool) -> None:
        name = f"state/{key}"
        if isinstance(value, Tensor):
            if value.numel() == 1 and is_single and not value.is_complex():
                self._add_constant(held, name, value.item(), value)
            elif is_coded(value) and has_elements(value, held.tensor.numel()):
                reader = _decoded_blocks(value, held.state_storage.blocks_of(value))
                values = torch.zeros(()).expand(held.tensor.numel())
                self.states.append(
                    StateBlock(held.flat, name, held.start, values, reader, is_shard=held.is_shard)
                )
            elif value.shape == held.tensor.shape:
                blocks = held.state_storage.blocks_of(value)
                if held.channels_last and blocks is None:
                    value = flattened(value, channels_last=True)
                self.states.append(
                    StateBlock(held.flat, name, held.start, value, blocks, is_shard=held.is_shard)
                )
            elif held.name is not None:
                flat = _alone("state", f"{held.name}/{key}", value)
                self._append(flat, value, name, self.states, self._groups[held.flat])
            else:
                self._refuse(key, f"of shape {list(value.shape)} for a range of elements")
        elif isinstance(value, PartNumbers):
            self._add_numbers(held, name, value)
        elif isinstance(value, PartTensors):
            pass  # `_add_part_tensors`
        elif isinstance(value, SCALARS):
            self._add_constant(held, name, value, None)
        else:
            self._refuse(key, f"of type {type(value).__name__}")

    def _add_constant(self, held: Held, key: str, value: Any, tensor: Tensor | None) -> None:
        here = (held.start, held.start + held.tensor.numel())
        start, stop = overlap(self.share(held.flat), here)
        if start < stop:
            dtype = None if tensor is None else name_of(tensor.dtype)
            beside = tensor is not None and tensor.device.type != "cpu"
            shape = () if tensor is None else tuple(tensor.shape)
            self.constants.append(
                ConstantRange(held.flat, key, start, stop, value, dtype, beside, shape)
            )

    def _add_numbers(self, held: Held, key: str, numbers: PartNumbers) -> None:
        """A number for each parameter in `held`."""
        share = self.share(held.flat)
        stop = held.start + held.tensor.numel()
        for slot in self.flats[held.flat].slots:
            here = overlap((slot.offset, slot.stop), (held.start, stop))
            low, high = overlap(share, here)
            if low < high and slot.name in numbers:
                number = numbers[slot.name]
                self.constants.append(ConstantRange(held.flat, key, low, high, number))

    def _add_part_tensors(self) -> None:
        """The states of whole parameters, which the holder of the first element saves.

        They are made where no step was taken: all ranks number the same flats, also one without a part.
        """
        for master in self.masters:
            assert self.optimizer is not None
            number = self.number_of(master)
            group = self._groups[number]
            dtype = name_of(group.policy.state_dtype(master.params.dtype))
            found = self.part_states[number] = [
                (slot.name, key, _state(f"{plain(slot.name)}/{key}", shape, dtype))
                for slot in master.params.layout.slots
                for key, shape in self.optimizer.part_shapes(
                    slot.shape, slot.name, slot.group
                ).items()
                if slot.numel
            ]
            tensors = self._part_tensors(master, group) if found else {}
            for name, key, flat in found:
                if name in tensors:
                    tensor = tensors[name][key][name]
                    block = StateBlock(len(self.flats), f"state/{key}", 0, tensor, is_own=True)
                    self.states.append(block)
                self.flats.append(flat)
                self._groups.append(group)

    def _part_tensors(self, master: Master, group: FlatGroup) -> dict[str, dict[str, PartTensors]]:
        """The states with those that this rank saves, by the parameter's name in the layout."""
        assert self.optimizer is not None
        for item in master.items:
            self.optimizer.make_states(item)
        is_saver = group.is_first_replica and (master.is_sharded or master.rank == 0)
        if not (is_saver or self._is_alone):
            return {}
        return {
            part.name: self.state[item.master]
            for item in master.items
            for part in item.parts
            if self._is_alone or not part.param_start
        }

    def _refuse(self, key: str, what: str) -> None:
        assert self.optimizer is not None
        name = type(self.optimizer.of_script).__name__
        raise UsageError(
            f"the optimizer {name} has a state {key!r} {what}: a checkpoint holds "
            "numbers, tensors of a parameter's shape, and other tensors of full parameters (stage 0); save its "
            "state yourself, or use another optimizer"
        )

    def replace_state(self, held: Held, values: dict[str, Any]) -> None:
        """Replace the optimizer's states of `held`; empty `values` are those of a new optimizer."""
        self.state.pop(held.tensor, None)
        assert self.optimizer is not None
        values = values or self.optimizer.initial_states(held.tensor)
        if values:
            self.state[held.tensor] = values

    def states_changed(self) -> None:
        """States were replaced. For all ranks."""
        if self.optimizer is not None:
            self.optimizer.states_changed()

    # -- what lossy messages have not sent ----------------------------------------------------------------

    def pending_errors(self) -> list[StateBlock]:
        """The errors of this rank, and the values of forward where these are only close to the masters."""
        blocks = []
        for master in self.masters:
            number, pending = self.number_of(master), master.grads.reducer.pending_error
            rank = master.grads.group.everyone.rank
            start = master.params.layout.shard_range(master.rank)[0]
            if pending is not None:
                blocks.append(StateBlock(number, f"{ERROR}{rank}", 0, pending.error, is_own=True))
                if pending.server is not None:
                    blocks.append(StateBlock(number, SERVER, start, pending.server, is_shard=True))
            if master.has_sent_delta:
                blocks.append(StateBlock(number, COPY, start, master.compute, is_shard=True))
        return blocks

    def pending_error_state(self) -> dict[str, Any]:
        """What the errors are, for the manifest: the numbers of `PendingError`, the same for all buffers."""
        errors = (master.grads.reducer.pending_error for master in self.masters)
        pending = next((pending for pending in errors if pending is not None), None)
        return {
            "owed_unit": None if pending is None else pending.unit,
            "owed_steps": 0 if pending is None else pending.steps,
            "owed_holds_momentum": pending is not None and pending.holds_momentum,
        }

    # -- gradients in the middle of an accumulation -----------------------------------------------------

    def grad_totals(self) -> list[StateBlock]:
        """This rank's shards of the sums over ranks that no update has used yet."""
        blocks = []
        for master in self.masters:
            total = master.grads.sums().reduced
            if total is not None:
                start = master.params.layout.shard_range(master.rank)[0]
                number = self.number_of(master)
                blocks.append(StateBlock(number, "grad", start, total, is_shard=True))
        return blocks

    @property
    def has_kept_grads(self) -> bool:
        """What lossy messages have not sent has gradients of an unfinished step."""
        return any(master.grads.has_kept for master in self.masters)

    def grad_locals(self) -> dict[int, tuple[Tensor, list[bool]]]:
        """By flat: this rank's sums that are not reduced yet, and the slots that have values."""
        sums = {}
        for master in self.masters:
            held = master.grads.sums()
            if held.local is not None:
                sums[self.number_of(master)] = (held.local, held.filled)
        return sums


def _decoded_blocks(codes: Tensor, stored: Blocks | None) -> Blocks:
    """Reads a state of 8 bits as fp32. stored: reads its bytes, if they are on a disk."""

    def blocks(start: int, stop: int) -> Iterator[Tensor]:
        for low in range(start - start % CHUNK_NUMEL, stop, CHUNK_NUMEL):
            rows = rows_of(low, min(low + CHUNK_NUMEL, stop))
            here = codes[rows]
            if stored is not None:
                begin, end = rows.start * ROW_BYTES, rows.stop * ROW_BYTES
                parts = [part.clone() for part in stored(begin, end)]
                here = torch.cat(parts).view(here.shape)
            values = decoded(here.cpu())
            yield values[max(start - low, 0) : stop - low]

    return blocks


def _params_and_buffers(
    module: nn.Module, inside: Collection[int] = ()
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, Tensor]]]:
    """The parameters whose ids are not `inside`, and the persistent buffers, by name, each once.

    In one walk, because with recovery each step has a snapshot.
    """
    seen = set(inside)
    params: list[tuple[str, nn.Parameter]] = []
    buffers: list[tuple[str, Tensor]] = []
    for prefix, owner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, param in owner._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                params.append((start + name, param))
        for name, buffer in owner._buffers.items():
            is_saved = name not in owner._non_persistent_buffers_set
            if buffer is not None and is_saved and id(buffer) not in seen:
                seen.add(id(buffer))
                buffers.append((start + name, buffer))
    return params, buffers
