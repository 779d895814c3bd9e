"""Optimizers that compute with whole parameters: each rank computes those that it holds a part of.

    values of the shard --all_gather--> whole parameters, one flat buffer after the other --formula--> own part

A formula is in a subclass. It may have states of a whole parameter, such as factors of rows and columns: each
rank with a part has the same ones. What has the parameter's size lies in shards. At stage 0 nothing is sent. A
parameter that is divided between ranks is computed on each of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flat import flattened, numel_of, shaped
from .adam import Adam, new_moments
from .scale import Scale
from .shard_optimizer import Flat, Item, ParamPart, PartTensors, ShardOptimizer, Update, World

KIND = "optimizer"  # of its messages


class WholeParamOptimizer(ShardOptimizer, ABC):
    """Gathers a value of each element, by default the gradient, and gives whole parameters to `apply`."""

    is_elementwise = False
    sent_dtype: torch.dtype | None = None  # of the gathered values; None: the masters'

    def gains_from_kernels(self, *, casts: bool) -> bool:
        return False

    def uses_whole(self, group: Mapping[str, Any]) -> bool:
        """`apply` is for the parameters of `group`."""
        return True

    def states_before(self, item: Item) -> dict[str, Any]:
        states: dict[str, Any] = {"step": 0}
        for part in item.parts:
            for key, shape in self.part_shapes(part.shape, part.name, item.group).items():
                zeros = item.master.new_zeros(shape, dtype=item.state_dtype)
                states.setdefault(key, PartTensors())[part.name] = zeros
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which makes plain dicts of the tensors by parameter."""
        super().load_state_dict(state_dict)
        for state in self._states.values():
            tensors = {key: value for key, value in state.items() if isinstance(value, dict)}
            state.update({key: PartTensors(value) for key, value in tensors.items()})

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        mine: dict[int, list[Update]] = {}
        for update in updates:
            if self.uses_whole(update.group):
                mine.setdefault(update.item.flat, []).append(update)
        for flat in world.flats:
            if any(self.uses_whole(self.param_groups[part.group]) for part in flat.parts):
                self._update_flat(flat, mine.get(flat.index, []), scale)

    def _update_flat(self, flat: Flat, updates: Sequence[Update], scale: Scale) -> None:
        """Update one flat buffer. Every rank of its group calls this, also one without a part of it."""
        collectives, dtype = flat.collectives, self.sent_dtype or flat.dtype
        whole = torch.zeros(flat.numel, dtype=dtype, device=collectives.device)
        here = collectives.shard_of(whole) if flat.is_sharded else whole
        for update in updates:
            start, numel = update.item.start, update.item.master.numel()
            here[start : start + numel].copy_(self.sent(update, scale))
        if flat.is_sharded:
            collectives.all_gather(whole, here, buffer=flat.index, kind=KIND).wait()
        starts = {part.name: part.start for part in flat.parts}
        for update in updates:
            for part in update.item.parts:
                start = starts[part.name]
                self.apply(update, part, whole[start : start + numel_of(part.shape)])
            if update.out is not None:
                update.out.copy_(update.item.master)

    def sent(self, update: Update, scale: Scale) -> Tensor:
        """[n] for the elements of an item, once in a step; may be in the gradient's memory."""
        self.state_of(update.item)["step"] += 1
        return update.grad.to(update.item.master.dtype).mul_(scale.value)

    @abstractmethod
    def apply(self, update: Update, part: ParamPart, whole: Tensor) -> None:
        """Update `part` of the item's master.

        whole: what was sent of the parameter, [its elements] in the order of memory.
        """


class MatrixOptimizer(WholeParamOptimizer, ABC):
    """Has a formula for matrices: groups whose `flag` is true. AdamW updates all other parameters."""

    flag: str

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, self.flag: True, "bias_correction": True})
        self._adam = Adam([dict(group) for group in self.param_groups])
        self._share_with_adam()

    def _share_with_adam(self) -> None:
        """One list of groups and one state, so that LR schedules and checkpoints use a single optimizer."""
        self._adam.param_groups = self.param_groups
        self._adam.state = self._states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_with_adam()

    def uses_whole(self, group: Mapping[str, Any]) -> bool:
        return bool(group[self.flag])

    def gains_from_kernels(self, *, casts: bool) -> bool:
        return self._adam.gains_from_kernels(casts=casts)

    def states_before(self, item: Item) -> dict[str, Any]:
        is_matrix = self.uses_whole(self.param_groups[item.group])
        return super().states_before(item) if is_matrix else new_moments(item)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        return () if self.uses_whole(group) else ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        self._adam.update([u for u in updates if not self.uses_whole(u.group)], scale, world)
        super().update(updates, scale, world)


def whole_grad(update: Update, part: ParamPart, whole: Tensor) -> Tensor:
    """The gradient in the parameter's shape, beside the master."""
    return shaped(whole.to(update.item.master), part.shape, part.channels_last)


def own_elements(whole: Tensor, part: ParamPart) -> Tensor:
    """The elements [n] of `part`, of a tensor of the parameter's shape."""
    first = part.param_start
    return flattened(whole, part.channels_last)[first : first + part.stop - part.start]


__all__ = ["MatrixOptimizer", "WholeParamOptimizer", "own_elements", "whole_grad"]
