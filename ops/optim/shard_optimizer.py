"""What an optimizer of flat shards is: it updates contiguous 1-D tensors, and knows whose they are.

A torch optimizer whose arithmetic is per element (Adam, SGD, ...) gives the same result on a shard as on
whole parameters. One that looks at a whole tensor (LAMB's trust ratio, Muon's orthogonalisation) needs to
know where in which parameter its elements lie, and to speak with the other ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ..comm.collectives import Collectives


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a range that belong to one parameter of hyperparameter group `group`.

    param_start: where in the flattened parameter they begin; `shape` is the whole parameter's.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    start: int
    stop: int
    param_start: int


@dataclass(frozen=True)
class Flat:
    """One flat buffer as every rank knows it: its number, its length, all parameters in it."""

    index: int
    numel: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class World:
    """What an optimizer that looks at whole parameters needs beside its own items.

    flats: every flat buffer of the model, the same list on every rank.
    is_sharded: items are this rank's shards; else every rank holds, and updates, everything.
    """

    collectives: Collectives
    flats: tuple[Flat, ...]
    is_sharded: bool


@dataclass(frozen=True, eq=False)
class Item:
    """One contiguous range to update: one hyperparameter group's share of one flat buffer.

    master: [n] what the optimizer updates, and the key of its state.
    group: index into the optimizer's param_groups. parts: the parameters in it, in order.
    flat: number of its flat buffer; start: where in this rank's part of that buffer it begins.
    """

    master: Tensor
    group: int
    parts: tuple[Part, ...]
    flat: int
    start: int


@dataclass(frozen=True, eq=False)
class Update:
    """What one step brings to an item: `grad` [n] (may be overwritten), `out` [n] or None.

    `out` is where the new values go in the compute dtype; None: the master is what computes. It holds
    the old ones, and what a script wrote over them.
    """

    item: Item
    grad: Tensor
    out: Tensor | None


def factor(scale: float, device: torch.device) -> Tensor | None:
    """`scale` as the ops of kernels/ take it: fp32 [], or None for 1."""
    return None if scale == 1.0 else torch.full((), scale, dtype=torch.float32, device=device)


def written(update: Update) -> None:
    """Tell autograd that an op wrote the new values: who kept the old ones for a backward must not use them."""
    torch.autograd.graph.increment_version(update.item.master)
    if update.out is not None:
        torch.autograd.graph.increment_version(update.out)


class ShardOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer (param_groups, state, LR schedulers work) that is stepped by `update`."""

    is_elementwise = True  # False: `update` must see all items of the model in one call
    takes_edits = (
        False  # True: `update` itself compares `out` with the masters, see ops/optim/edits.py
    )

    def gains_from_kernels(self, *, casts: bool) -> bool:
        """Whether native kernels would be used; `casts`: parameters are narrower than their masters."""
        return True

    @abstractmethod
    def update(self, updates: Sequence[Update], scale: float, world: World) -> None:
        """Update every item's master with gradient `scale * grad`, and write `out`."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing but count, for torch's LR schedulers: the engine updates through `update`.

        Raises:
            UsageError: the tensors have gradients, so this is no engine's optimizer, and nothing would train.
        """
        if any(
            tensor.grad is not None for group in self.param_groups for tensor in group["params"]
        ):
            raise UsageError(
                f"{type(self).__name__}.step(): this optimizer updates the shards of an engine and cannot be "
                "stepped alone; pass it to initialize(optimizer=...) and call engine.step(), or use torch.optim"
            )


class OnePassOptimizer(ShardOptimizer, ABC):
    """One whose step on an item is one op: it unscales, updates and casts in one pass over memory."""

    takes_edits = True

    @abstractmethod
    def one_pass(
        self, update: Update, state: dict[str, Any], group: dict[str, Any], scale: Tensor | None
    ) -> None:
        """Call the op for one item. `state` is empty at the item's first step; `group`: hyperparameters."""

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: float, world: World) -> None:
        for update in updates:
            master = update.item.master
            group = self.param_groups[update.item.group]
            self.one_pass(update, self.state[master], group, factor(scale, master.device))
            written(update)
