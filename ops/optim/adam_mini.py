"""Adam-mini on flat shards: AdamW with one second moment for each block of a parameter.

Source: Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More, 2024, algorithm 2,
https://arxiv.org/abs/2406.16793. The blocks, by the names and shapes of parameters:

    queries and keys     a head, where `dim` and `n_heads` are given
    other matrices       a row: what a token or an output has
    one dimension        the whole parameter

Differs: queries and keys without a number of heads are divided by rows, as a projection that holds queries,
keys and values is. A step additionally sends the gradients once, in the dtype of the masters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import Tensor

from ..flat import numel_of
from .shard_optimizer import Item, ParamPart, Update
from .whole_params import WholeParamOptimizer, own_elements, whole_grad

QUERIES_AND_KEYS = ("q_proj", "k_proj", "wq", "wk", "query", "key")  # in names, of modules


@final
class AdamMini(WholeParamOptimizer):
    """m is Adam's; v is the mean of the squares in a block.

    Args:
        dim, n_heads: the width of all query heads, and their number, which divides it. Keys have heads of the
            same width.
    """

    num_states = 1

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        dim: int | None = None,
        n_heads: int | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._head_rows = dim // n_heads if dim and n_heads else 1

    def part_shapes(
        self, shape: tuple[int, ...], name: str, group: int
    ) -> dict[str, tuple[int, ...]]:
        if len(shape) < 2:
            return {"vmean": (1,)}
        is_cut = any(word in QUERIES_AND_KEYS for word in name.split("."))
        rows = self._head_rows if is_cut and shape[0] % self._head_rows == 0 else 1
        return {"vmean": (shape[0] // rows,)}

    def states_before(self, item: Item) -> dict[str, Any]:
        return {**super().states_before(item), "m": item.new_state()}

    def apply(self, update: Update, part: ParamPart, whole: Tensor) -> None:
        group, state = update.group, self.state_of(update.item)
        grad, own = whole_grad(update, part, whole), slice(part.start, part.stop)
        beta1, beta2 = group["betas"]
        lr, step = float(group["lr"]), int(state["step"])
        blocks: Tensor = state["vmean"][part.name]
        squares = grad.reshape(blocks.numel(), -1).square().mean(1)
        blocks.mul_(beta2).add_(squares, alpha=1 - beta2)
        root = (blocks.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        of_each = root.view(-1, 1).expand(-1, numel_of(part.shape) // blocks.numel())
        mean: Tensor = state["m"][own]
        mean.lerp_(own_elements(grad, part), 1 - beta1)
        master = update.item.master[own]
        master.mul_(1 - lr * group["weight_decay"])
        direction = mean / own_elements(of_each.reshape(part.shape), part)
        master.sub_(direction, alpha=lr / (1 - beta1**step))


__all__ = ["AdamMini"]
