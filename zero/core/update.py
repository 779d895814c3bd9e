"""The update: master weights, the optimizer over flat ranges, and publishing the new values.

    grad shard --(scale)--> optimizer --> master --cast--> parameters' shard --gather--> full (stages 1, 2)

If the stage shards the optimizer state, an item is a range of this rank's shard, else of the full buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ...ops.optim.edits import take_edits
from ...ops.optim.shard_optimizer import Flat, Item, Part, ShardOptimizer, Update, World
from ...utils.errors import UsageError
from .flat_grads import FlatGrads
from .flat_params import FlatParams
from .frozen import FrozenValues, clip, frozen_ranges
from .layout import FlatLayout, Piece, Slot
from .policy import master_dtype
from .sharded_model import ShardedModel


@final
class Master:
    """The master weights of one flat buffer, or of this rank's shard of it, and their items."""

    def __init__(
        self, params: FlatParams, grads: FlatGrads, rank: int, *, is_sharded: bool
    ) -> None:
        layout = params.layout
        self.params = params
        self.grads = grads
        self.is_sharded = is_sharded
        self.compute = params.shard if is_sharded else params.raw
        wide = master_dtype(params.dtype)
        self.casts = params.dtype != wide
        # without a cast the parameters themselves are the master: no copy is made
        self.tensor = self.compute.to(wide) if self.casts else self.compute.detach()
        start, stop = layout.shard_range(rank) if is_sharded else (0, layout.numel)
        pieces = layout.pieces_in(start, stop)
        self.items = [
            Item(
                master=self.tensor[segment.start : segment.stop],
                group=segment.group,
                parts=_parts(pieces, segment.start, segment.stop),
                flat=params.index,
                start=segment.start,
            )
            for segment in layout.segments_in(start, stop)
        ]

    @torch.no_grad()
    def take_edits(self, start: int = 0, stop: int | None = None) -> None:
        """Copy computed values [start, stop) that a script wrote: those that differ from the rounded master."""
        if not self.casts:
            return
        stop = self.tensor.numel() if stop is None else stop
        take_edits(self.tensor[start:stop], self.compute[start:stop])

    def updates(self) -> list[Update]:
        """The updates of this step: for each item its gradient and the place of its new values."""
        grad = self.grads.for_update()
        found = []
        for item in self.items:
            here = slice(item.start, item.start + item.master.numel())
            found.append(Update(item, grad[here], self.compute[here] if self.casts else None))
        return found


def _parts(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Part, ...]:
    return tuple(
        Part(p.slot.name, p.slot.shape, p.slot.group, p.start - start, p.stop - start, p.slot_start)
        for p in pieces
        if start <= p.start < stop
    )


def _flat(layout: FlatLayout, index: int) -> Flat:
    return Flat(index, layout.numel, _parts(layout.pieces_in(0, layout.numel), 0, layout.numel))


@final
class Updater:
    """Owns the masters. `bind` sets the optimizer, whose param_groups hold the masters' items."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        is_sharded = model.policy.shards_optimizer
        rank = model.collectives.rank
        self.masters = [
            Master(params, grads, rank, is_sharded=is_sharded)
            for _, params, grads in model.trainable
        ]
        flats = tuple(_flat(m.params.layout, m.params.index) for m in self.masters)
        self.world = World(model.collectives, flats, is_sharded)
        self._optimizer: torch.optim.Optimizer | None = None
        # id of an optimizer's tensor -> the tensor, its master, its first element in the master
        self._places: dict[int, tuple[Tensor, Master, int]] = {}

    @property
    def casts(self) -> bool:
        """Some parameters have fewer bits than their masters."""
        return any(master.casts for master in self.masters)

    def tensors_of(self, group: int) -> list[Tensor]:
        """The tensors of the optimizer's group `group`: one 1-D tensor for each flat buffer."""
        return [
            self._add_tensor(item.master, master, item.start)
            for master in self.masters
            for item in master.items
            if item.group == group
        ]

    def whole_params(self, group: int) -> list[Tensor]:
        """The same as tensors of the parameters' own shapes, for optimizers that use shapes.

        Raises:
            UsageError: the optimizer state is sharded, so no rank has full parameters.
        """
        if self.world.is_sharded:
            raise UsageError("a shard does not keep the shapes of its parameters")
        return [
            self._add_tensor(
                item.master[part.start : part.stop].view(part.shape),
                master,
                item.start + part.start,
            )
            for master in self.masters
            for item in master.items
            if item.group == group
            for part in item.parts
        ]

    def _add_tensor(self, tensor: Tensor, master: Master, start: int) -> Tensor:
        self._places[id(tensor)] = (tensor, master, start)
        return tensor

    def place_of(self, tensor: Tensor) -> tuple[Master, int] | None:
        """The master that contains an optimizer's `tensor`, and the tensor's first element in it; or None."""
        _, master, start = self._places.get(id(tensor), (None, None, 0))
        return None if master is None or not tensor.numel() else (master, start)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Use `optimizer`, whose param_groups hold `tensors_of` or `whole_params` of each group."""
        self._optimizer = optimizer

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update all masters with gradient `scale` times the sums, and publish the new values.

        Stages 1 and 2 send (world_size - 1) shards per rank, in the parameters' dtype.
        """
        assert self._optimizer is not None
        self._model.before_update()
        if isinstance(self._optimizer, ShardOptimizer):
            if not self._optimizer.takes_edits:
                self._take_edits_into_masters()
            self._step_shards(self._optimizer, scale)
            self._optimizer.step()
        else:
            self._take_edits_into_masters()
            self._step_torch(self._optimizer, scale)
        self._model.wait_published()

    def take_edits(self) -> None:
        """Make the script's writes to parameters since the last update their values and the masters'."""
        self._model.take_edits()
        self._take_edits_into_masters()

    def _take_edits_into_masters(self) -> None:
        for master in self.masters:
            master.take_edits()

    def _step_shards(self, optimizer: ShardOptimizer, scale: float) -> None:
        if optimizer.is_elementwise:
            for master in self.masters:
                kept = self._keep_frozen([master])
                optimizer.update(master.updates(), scale, self.world)
                kept.restore()
                self._publish(master)
            return
        updates = [update for master in self.masters for update in master.updates()]
        kept = self._keep_frozen(self.masters)
        optimizer.update(updates, scale, self.world)
        kept.restore()
        for master in self.masters:
            self._publish(master)

    def _keep_frozen(self, masters: Sequence[Master]) -> FrozenValues:
        """Save the values and states of parameters that were frozen after `initialize`."""
        assert self._optimizer is not None
        kept = FrozenValues()
        for master in masters:
            layout = master.params.layout
            whole = (0, layout.numel)
            bounds = layout.shard_range(self.world.collectives.rank) if master.is_sharded else whole
            ranges = frozen_ranges(master.params, *bounds)
            if not ranges:
                continue
            kept.keep(master.tensor, ranges)
            if master.casts:
                kept.keep(master.compute, ranges)
            for tensor, at in self._tensors_in(master):
                inside = clip(ranges, at, tensor.numel())
                if inside:
                    state = self._optimizer.state.get(tensor, {})
                    kept.keep_state(state, tensor.numel(), inside)
        return kept

    def _step_torch(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Step any torch optimizer, with `.grad` set on its tensors in the master's dtype."""
        for master in self.masters:
            grad = master.grads.for_update()
            wide = grad.to(master.tensor.dtype)
            if scale != 1.0:
                wide.mul_(scale)
            self._set_grads(master, wide)
        kept = self._keep_frozen(self.masters)
        optimizer.step()
        kept.restore()
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
        for master in self.masters:
            if master.casts:
                master.compute.copy_(master.tensor)
            self._publish(master)

    def _set_grads(self, master: Master, grad: Tensor) -> None:
        for tensor, at in self._tensors_in(master):
            tensor.grad = grad[at : at + tensor.numel()].view(tensor.shape)

    def state_of(
        self, master: Master, slot: Slot
    ) -> tuple[dict[str, Any] | None, tuple[int, int] | None]:
        """The optimizer's states of this rank's part of `slot`, and the range that they cover.

        Returns:
            the states by key, None before the first step; and [start, stop) in this rank's part of the flat
            buffer that the state tensors cover, or None if they have the parameter's own shape.
        """
        assert self._optimizer is not None
        start = master.params.layout.shard_range(self.world.collectives.rank)[0]
        first = slot.offset - (start if master.is_sharded else 0)
        for tensor, at in self._tensors_in(master):
            state = self._optimizer.state.get(tensor)
            if at == first and tensor.shape == slot.shape and not master.is_sharded:
                return state or None, None
            if at < first + slot.numel and first < at + tensor.numel():
                return state or None, (at, at + tensor.numel())
        return self._states_elsewhere(master), (0, 0)

    def _states_elsewhere(self, master: Master) -> dict[str, Any] | None:
        """States of other parameters: they show the keys and dtypes if this rank has no part of a slot."""
        assert self._optimizer is not None
        found = [self._optimizer.state.get(tensor) for tensor, _ in self._tensors_in(master)]
        own: dict[str, Any] | None = next((state for state in found if state), None)
        if own is not None:
            return own
        other: dict[str, Any] | None
        other = next((state for state in self._optimizer.state.values() if state), None)
        if other is None:
            return None
        return {
            key: master.tensor.new_empty(0) if isinstance(value, Tensor) and value.dim() else value
            for key, value in other.items()
        }

    def _tensors_in(self, master: Master) -> Iterator[tuple[Tensor, int]]:
        """The optimizer's tensors that are ranges of `master`, and their first elements in it."""
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                place = self.place_of(tensor)
                if place is not None and place[0] is master:
                    yield tensor, place[1]

    def _publish(self, master: Master) -> None:
        if self.world.is_sharded:
            master.params.start_publish()

    def master_tensors(self) -> list[Tensor]:
        """The masters that are separate copies of the parameters."""
        return [master.tensor for master in self.masters if master.casts]

    def state_tensors(self) -> list[Tensor]:
        """The optimizer's state tensors, without scalars."""
        states = [] if self._optimizer is None else self._optimizer.state.values()
        return [
            value
            for state in states
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the masters that are separate copies, and of the optimizer's state tensors."""
        masters = sum(m.tensor.numel() * m.tensor.element_size() for m in self.masters if m.casts)
        state = 0
        if self._optimizer is not None:
            for values in self._optimizer.state.values():
                state += sum(
                    v.numel() * v.element_size() for v in values.values() if isinstance(v, Tensor)
                )
        return {"master": masters, "optimizer": state}
