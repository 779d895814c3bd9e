"""A torch optimizer, stepped as those of xds: see `ops/optim/shard_optimizer.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from ...ops.flat import is_channels_last, shaped
from ...ops.optim.scale import Scale
from ...ops.optim.shard_optimizer import Item, ShardOptimizer, Update, World
from .optimizer_tensors import OptimizerTensors


@final
class TorchShardOptimizer(ShardOptimizer):
    """Steps a torch optimizer, whose tensors get `.grad` in the masters' dtype. Groups and states stay its own.

    It takes all items in one call, as its `step` does.
    """

    is_elementwise = False

    def __init__(self, given: torch.optim.Optimizer, tensors: OptimizerTensors) -> None:
        """given: over tensors of `tensors`."""
        # not that of torch's class: `given` has groups and states
        self._given = given
        # id of an item's master -> the tensors of `given` in it, and the first element of each
        self._places: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for group in given.param_groups:
            for tensor in group["params"]:
                place = tensors.of(tensor)
                if place is None:
                    continue
                master, offset = place
                item = next(
                    item
                    for item in master.items
                    if item.start <= offset < item.start + item.master.numel()
                )
                self._places[id(item.master)].append((tensor, offset - item.start))

    @property
    def of_script(self) -> torch.optim.Optimizer:
        return self._given

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of now: a load replaces them."""
        return self._given.param_groups

    def hyperparameters(self) -> Any:
        return defaultdict(dict)  # its step reads its own

    @property
    def states(self) -> defaultdict[Tensor, Any]:
        return self._given.state

    def make_states(self, item: Item) -> None:
        """Its first step makes them."""

    def initial_states(self, tensor: Tensor) -> dict[str, Any]:
        if type(self._given) is not torch.optim.Adagrad:
            return {}
        # it makes its states when it is made; before torch 2.13 its step needs them
        start = self._given.defaults["initial_accumulator_value"]
        return {"step": torch.tensor(0.0), "sum": torch.full_like(tensor, start)}

    def has_scalars_beside(self, tensor: Tensor) -> bool:
        """torch's read them on the device only if a group is fused or capturable."""
        for group in self.param_groups:
            if any(member is tensor for member in group["params"]):
                return bool(group.get("fused") or group.get("capturable"))
        return False

    @property
    def counts_in_tensors(self) -> bool:
        return type(self._given).__module__.startswith("torch.optim")

    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        for update in updates:
            wide = update.grad.to(update.item.master.dtype)
            if not scale.is_one:
                wide.mul_(scale.value)
            for tensor, offset in self._places[id(update.item.master)]:
                grad = wide[offset : offset + tensor.numel()]
                tensor.grad = shaped(grad, tensor.shape, is_channels_last(tensor))
        self._given.step()
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
        for update in updates:
            if update.out is not None:
                update.out.copy_(update.item.master)

    def count_update(self) -> None:
        """torch's schedules have seen its step."""


__all__ = ["TorchShardOptimizer"]
