"""Restores this rank's part of a model from a checkpoint.

plan (nothing changes)  ->  the reader fills every target  ->  finish: casts, states, publishing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from ...ops.coded import encode, new_codes, rows_of
from ...ops.flat import chunks, is_channels_last, numel_of, shaped
from ...ops.optim.shard_optimizer import PartNumbers, PartTensors
from ..core.grad_bucket import GradBucket, GradSums
from ..core.master import Master
from .pending_errors import ErrorRestore
from .ranges import Catalogue, ConstantRange, Copy, TargetPiece, pieces
from .snapshot import STEP, Held, Snapshot, StateBlock, plain
from .targets import Target, target_for


@dataclass(frozen=True, eq=False)
class _NewState:
    held: Held
    values: dict[str, Any]
    is_padding: bool


@final
class Restore:
    """One load into the tensors of `snapshot`. Before `finish` only receivers change.

    missing: names of optimizer states that the checkpoint has only for some elements of a range.
    problems: messages about everything that cannot be loaded.
    """

    def __init__(self, snapshot: Snapshot, catalogue: Catalogue) -> None:
        self._snapshot = snapshot
        self._catalogue = catalogue
        self._states: list[_NewState] = []
        self._grads: list[tuple[GradBucket, Tensor]] = []
        self._locals: list[tuple[GradBucket, Tensor, list[bool]]] = []
        self._any_held = False
        self._is_within_step = False
        self._errors: ErrorRestore | None = None
        self.missing: list[str] = []
        self.problems: list[str] = []

    # -- plans ------------------------------------------------------------------------------------------

    def plan_values(self) -> list[Target]:
        """Targets for parameters, masters and buffers."""
        flats = self._snapshot.flats
        return [
            target_for(block.tensor, self._copies(block), name=flats[block.flat].slots[0].name)
            for block in self._snapshot.values
        ]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers by name."""
        for block in self._snapshot.values:
            flat = self._snapshot.flats[block.flat]
            if flat.kind == "buffer":
                yield flat.slots[0].name, block.tensor

    def _copies(self, block: StateBlock) -> list[Copy]:
        return [
            copy
            for piece in self._pieces(block.flat, block.start, block.stop)
            for copy in self._catalogue.copies(piece, block.key)
        ]

    def _pieces(self, flat: int, start: int, stop: int) -> list[TargetPiece]:
        return pieces(self._snapshot.flats[flat], start, stop)

    def plan_states(self) -> list[Target]:
        """Targets for the optimizer's states, in new tensors if the optimizer has none that fit."""
        targets: list[Target] = []
        for held in self._snapshot.held:
            stop = held.start + held.tensor.numel()
            here = self._pieces(held.flat, held.start, stop)
            if held.channels_last:  # a target is filled in row-major order
                here = [replace(piece, channels_last=False) for piece in here]
            values = self._constants(here, held)
            for key, dtype in self._keys(here, self._part_keys(held, here)):
                copies = [c for p in here for c in self._catalogue.copies(p, f"state/{key}")]
                is_whole = sum(c.total_numel for c in copies) == sum(p.stop - p.start for p in here)
                shape = tuple(held.tensor.shape)
                tensor, is_fresh = self._tensor_for(held, key, shape, dtype, keeps=is_whole)
                values[key] = tensor
                targets.append(target_for(tensor, copies, is_fresh=is_fresh))
            targets += self._plan_parts(held, here, values)
            targets += self._plan_whole(held, here, values)
            self._states.append(_NewState(held, values, is_padding=not here))
        self._fill_padding()
        return targets

    def _fill_padding(self) -> None:
        """Add states for ranges without a parameter: torch steps a group only if all or none have them."""
        for new in self._states:
            others = (
                o for o in self._states if o.held.group == new.held.group and not o.is_padding
            )
            other = next(others, None) if new.is_padding else None
            for key, value in {} if other is None else other.values.items():
                assert other is not None
                new.values[key] = _like(value, other.held.tensor, new.held.tensor)

    def _keys(self, here: list[TargetPiece], by_part: set[str]) -> list[tuple[str, str]]:
        """Key and dtype of every per-element state of a range. by_part: keys of states of whole parameters."""
        dtypes: dict[str, str] = {}
        each = [self._catalogue.keys_of(piece) for piece in here]
        for keys in each:
            states = {k: v for k, v in keys.items() if k.startswith("state/")}
            dtypes.update(
                {k: v for k, v in states.items() if k.removeprefix("state/") not in by_part}
            )
        for piece, keys in zip(here, each, strict=True):
            for key in dtypes:
                copies = self._catalogue.copies(piece, key) if key in keys else []
                if sum(copy.total_numel for copy in copies) != piece.stop - piece.start:
                    self.missing.append(f"{piece.name}/{key.removeprefix('state/')}")
        return [(key.removeprefix("state/"), dtype) for key, dtype in dtypes.items()]

    def _constants(self, here: list[TargetPiece], held: Held) -> dict[str, Any]:
        """The values that all elements of a range share; their sources in the checkpoint must agree."""
        shared: dict[str, ConstantRange] = {}
        numbers: dict[str, Any] = {}
        optimizer = self._snapshot.optimizer
        by_part = () if optimizer is None else optimizer.part_states
        for piece in here:
            for constant in self._catalogue.constants_of(piece):
                key = constant.key.removeprefix("state/")
                if key in by_part:
                    numbers.setdefault(key, PartNumbers())[piece.name] = constant.value
                    continue
                first = shared.setdefault(constant.key, constant)
                if not _same(first.value, constant.value):
                    self.problems.append(
                        f"{constant.key.removeprefix('state/')} is {constant.value} for {piece.name}, "
                        f"{first.value} for a parameter that shares one number with it in this layout"
                    )
        constants = {
            key.removeprefix("state/"): self._constant(constant, held.tensor)
            for key, constant in shared.items()
        }
        if constants or numbers:
            numbers = {key: PartNumbers() for key in by_part} | numbers
        return constants | numbers

    def _constant(self, constant: ConstantRange, tensor: Tensor) -> Any:
        dtype = constant.dtype
        is_count = constant.key == f"state/{STEP}" and isinstance(constant.value, int | float)
        optimizer = self._snapshot.optimizer
        assert optimizer is not None
        if dtype is None and is_count and optimizer.counts_in_tensors:
            dtype = "float32"
        if dtype is None:
            return constant.value
        beside = constant.on_device or optimizer.has_scalars_beside(tensor)
        where = tensor.device if beside else torch.device("cpu")
        return torch.full(constant.shape, constant.value, dtype=getattr(torch, dtype), device=where)

    def _tensor_for(
        self, held: Held, key: str, shape: tuple[int, ...], dtype: str, *, keeps: bool = True
    ) -> tuple[Tensor, bool]:
        """The existing state tensor if it fits and `keeps`, else a new one; and whether it is new.

        dtype: in the checkpoint. Floating-point states of another one become the optimizer's.
        """
        wanted: torch.dtype = getattr(torch, dtype)
        if held.state_dtype == torch.int8 and wanted.is_floating_point:
            return torch.empty(shape), True  # on the host: `finish` encodes it
        if held.state_dtype is not None and wanted.is_floating_point:
            wanted = held.state_dtype
        old = self._snapshot.state.get(held.tensor, {}).get(key)
        fits = isinstance(old, Tensor) and tuple(old.shape) == shape and old.dtype == wanted
        if keeps and fits and (old.is_contiguous() or is_channels_last(old)):
            return old, False
        flat = torch.empty(numel_of(shape), dtype=wanted, device=held.tensor.device)
        last = held.channels_last and shape == tuple(held.tensor.shape)
        return shaped(flat, shape, last), True

    def _part_keys(self, held: Held, here: list[TargetPiece]) -> set[str]:
        """The keys of states that are `PartTensors` of the parameters in `here`."""
        inside = {piece.name for piece in here}
        states = self._snapshot.part_states.get(held.flat, ())
        return {key for name, key, _ in states if plain(name) in inside}

    def _plan_parts(
        self, held: Held, here: list[TargetPiece], values: dict[str, Any]
    ) -> list[Target]:
        """Targets for the states of whole parameters that each rank with a part has."""
        targets: list[Target] = []
        lacking: list[str] = []
        inside = {piece.name for piece in here}
        for name, key, flat in self._snapshot.part_states.get(held.flat, ()):
            if plain(name) not in inside:
                continue
            piece = TargetPiece("state", flat.slots[0].name, 0, flat.numel, 0)
            copies = self._catalogue.copies(piece, f"state/{key}")
            if not copies:  # where an optimizer had whole parameters, a state of their shape
                piece = TargetPiece("param", plain(name), 0, flat.numel, 0)
                copies = self._catalogue.copies(piece, f"state/{key}")
            tensor = torch.empty(
                flat.slots[0].shape, dtype=getattr(torch, flat.dtype), device=held.tensor.device
            )
            values.setdefault(key, PartTensors())[name] = tensor
            targets.append(target_for(tensor, copies, is_fresh=True))
            if sum(copy.total_numel for copy in copies) != flat.numel:
                lacking.append(flat.slots[0].name)
        if len(lacking) == len(targets):  # the checkpoint has none
            for key in self._part_keys(held, here):
                values.pop(key, None)
            return []
        self.missing += lacking
        return targets

    def _plan_whole(
        self, held: Held, here: list[TargetPiece], values: dict[str, Any]
    ) -> list[Target]:
        """Targets for states that belong to whole parameters, such as a factored second moment."""
        targets = []
        for name in {piece.name for piece in here}:
            for full in self._catalogue.states_of(name):
                key = full.removeprefix(f"{name}/")
                if key in self._part_keys(held, here):
                    continue
                if held.name != name:
                    self.problems.append(
                        f"the optimizer state {key} of {name} is not per element: it loads only where the "
                        "optimizer gets full parameters (one rank, or stage 0), as it did when it was saved"
                    )
                    continue
                saved = self._catalogue.flat_of("state", full)
                shape = saved.slots[0].shape
                tensor, is_fresh = self._tensor_for(held, key, shape, saved.dtype)
                piece = TargetPiece("state", full, 0, saved.numel, 0)
                values[key] = tensor
                copies = self._catalogue.copies(piece, f"state/{key}")
                targets.append(target_for(tensor, copies, is_fresh=is_fresh))
        return targets

    def number_of(self, master: Master) -> int:
        """The number of the flat of `master`."""
        return self._snapshot.number_of(master)

    def plan_range(self, flat: int, key: str, start: int, tensor: Tensor) -> Target:
        """The target for elements of `key` of a flat, from `start`, in a tensor that is in use."""
        block = StateBlock(flat, key, start, tensor)
        return target_for(tensor, self._copies(block))

    def plan_grads(self) -> list[Target]:
        """Targets for gradient sums over ranks, in fresh tensors."""
        targets = []
        for master in self._snapshot.masters:
            layout = master.params.layout
            start, stop = layout.shard_range(master.rank)
            here = self._pieces(self._snapshot.number_of(master), start, stop)
            copies = [copy for piece in here for copy in self._catalogue.copies(piece, "grad")]
            dtypes = {copy.dtype for copy in copies}
            if copies:
                total = torch.empty(
                    layout.shard_numel,
                    dtype=getattr(torch, dtypes.pop()),
                    device=master.raw.device,
                )
                self._grads.append((master.grads, total))
                targets.append(target_for(total, copies, is_fresh=True))
        return targets

    def plan_locals(self, saved: Mapping[str, Any], *, any_held: bool) -> None:
        """This rank's sums that are not reduced yet, by flat: a tensor `local` and the slots that are `filled`.

        any_held: some rank has such sums; then all ranks continue as if they had some.
        """
        self._any_held, self._is_within_step = any_held, True
        for master in self._snapshot.masters:
            flat = self._snapshot.flats[self._snapshot.number_of(master)]
            number = self._catalogue.number_of(flat)
            sums = saved.get(str(number))
            if number is None or sums is None:
                continue
            layout = master.params.layout
            is_same = tuple(sums["local"].shape) == (layout.numel,)
            orders = [slot.channels_last for slot in layout.slots]
            is_same = is_same and orders == self._catalogue.orders_of(number)
            if not is_same or len(sums["filled"]) != len(layout.slots):
                self.problems.append("its unfinished step was saved with other flat buffers")
                continue
            self._locals.append((master.grads, sums["local"], sums["filled"]))

    def plan_pending_errors(self, unit: float, steps: int, *, holds_momentum: bool) -> list[Target]:
        """Targets for the pending errors. The arguments: see `PendingError`, of the checkpoint."""
        self._errors = ErrorRestore(self._snapshot, self._catalogue, unit, steps, holds_momentum)
        return self._errors.plan()

    # -- taking effect ----------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """Drop gathered copies and gradients: values are about to be written. For all ranks."""
        sharded = self._snapshot.sharded
        sharded.reduction.settle()
        sharded.reduction.reset()
        sharded.backward_pass.clear_seen()
        sharded.before_update()

    @torch.no_grad()
    def finish(self, targets: list[Target]) -> None:
        """Every target is filled: cast the masters, set the states, publish. For all ranks.

        Sends as many bytes as the publishing of an update.
        """
        for target in targets:
            target.finish()
        for master in self._snapshot.masters:
            master.write_compute()
        for new in self._states:
            if new.held.state_dtype == torch.int8:
                self._encode(new)
            self._snapshot.replace_state(new.held, new.values)
        self._snapshot.states_changed()
        if self._errors is not None:
            self._errors.finish_values()
        self._finish_gradients()
        self._snapshot.sharded.publish_all()
        for master in self._snapshot.masters:
            master.remember()

    def _encode(self, new: _NewState) -> None:
        """States of 8 bits, to nearest: those of the same codes have their bits again."""
        optimizer, master = self._snapshot.optimizer, new.held.tensor
        assert optimizer is not None
        for key, value in new.values.items():
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                of_squares = key in optimizer.square_states
                codes = new_codes(master.numel(), master.device, of_squares=of_squares)
                for piece in chunks(value.numel(), on_cpu=True):
                    rows = rows_of(piece.start, piece.stop)
                    encode(codes[rows], value[piece].to(master.device))
                new.values[key] = codes

    def _finish_gradients(self) -> None:
        """Set what no update has used yet: sums of an unfinished step, and what was not sent."""
        for master in self._snapshot.masters if self._any_held else ():
            master.grads.mark_held()
        for grads, local, filled in self._locals:
            grads.restore(GradSums(local, filled, None))
        for grads, total in self._grads:
            grads.restore(GradSums(None, [], total))
        if self._errors is not None:
            self._errors.finish()
        for master in self._snapshot.masters if self._is_within_step else ():
            if master.grads.is_lossy:
                master.grads.mark_kept()


def _same(first: Any, second: Any) -> bool:
    # nan counts as equal to nan
    return bool(first == second) or (first != first and second != second)


def _like(state: Any, theirs: Tensor, ours: Tensor) -> Any:
    """The `state` of range `theirs` for range `ours`: zeros if it is per element."""
    if not isinstance(state, Tensor):
        return state
    if state.shape != theirs.shape:
        return state.clone()
    return torch.zeros_like(ours, dtype=ours.dtype if state.dtype == theirs.dtype else state.dtype)
