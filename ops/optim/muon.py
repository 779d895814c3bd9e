"""Muon on flat shards, exact: each rank orthogonalises the whole of every matrix that it owns a part of.

Source: Jordan et al., Muon: An optimizer for hidden layers, 2024, https://kellerjordan.github.io/posts/muon/;
the iteration and the learning-rate adjustment are torch.optim.Muon's. Groups with use_muon = False are
updated by AdamW with `adam_lr`, `betas` and `eps`. The defaults of both halves are DeepSpeed's.

    momentum on the shard -> direction (bf16) --all_gather--> whole matrices -> orthogonalise -> own part

A parameter in `stacks` is a matrix for each place of dimension 0, such as the experts of a mixture.

In addition to stages 0-3, a step sends the flat buffer once in bf16: 2 (world_size - 1) / world_size bytes per
element. A matrix that is divided between ranks is orthogonalised on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .scale import Scale
from .shard_optimizer import Item, ParamPart, Update
from .whole_params import MatrixOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
MUON_LR, ADAM_LR = 0.02, 3e-4


@final
class Muon(MatrixOptimizer):
    """Momentum, orthogonalised by Newton-Schulz, for hidden matrices; AdamW for everything else."""

    flag = "use_muon"
    sent_dtype = torch.bfloat16

    def __init__(  # noqa: PLR0913 (the config's keys)
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-10,
        stacks: Collection[str] = (),
    ) -> None:
        """A group's own `lr` comes first, then `muon_lr` or `adam_lr`, then `lr`, then 0.02 or 3e-4.

        stacks: the names of parameters of three dimensions that are matrices, one after the other.
        """
        defaults = {
            "lr": _first_given(muon_lr, lr, MUON_LR),
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "betas": tuple(betas),
            "eps": eps,
        }
        entries = list(params)
        for number, entry in enumerate(entries):
            if isinstance(entry, dict) and not entry.get("use_muon", True):
                entries[number] = {"lr": _first_given(adam_lr, lr, ADAM_LR), **entry}
        super().__init__(entries, defaults)
        self._stacks = frozenset(stacks)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        return ("momentum_buffer",) if self.uses_whole(group) else super().state_keys(group)

    def states_before(self, item: Item) -> dict[str, Any]:
        if self.uses_whole(self.param_groups[item.group]):
            return {"momentum_buffer": item.new_state()}
        return super().states_before(item)

    def sent(self, update: Update, scale: Scale) -> Tensor:
        group = update.group
        grad = update.grad.to(update.item.master.dtype).mul_(scale.value)
        buffer: Tensor = self.state_of(update.item)["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def apply(self, update: Update, part: ParamPart, whole: Tensor) -> None:
        group = update.group
        lr = float(group["lr"])
        # channels_last permutes the columns, and so those of the result
        matrix = whole.view(part.shape[0], -1)
        first, stop = part.param_start, part.param_start + part.stop - part.start
        if part.name in self._stacks:
            matrix = whole.view(part.shape)
            each = math.prod(part.shape[1:])
            own_matrices = slice(first // each, -(-stop // each))
            matrix = matrix[own_matrices]
            first, stop = first - own_matrices.start * each, stop - own_matrices.start * each
        step = orthogonalize(matrix, group["ns_steps"]).reshape(-1)
        adjusted = lr * math.sqrt(max(1.0, matrix.shape[-2] / matrix.shape[-1]))
        own = update.item.master[part.start : part.stop]
        own.mul_(1 - lr * group["weight_decay"])
        own.add_(step[first:stop].to(own), alpha=-adjusted)


def _first_given(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def orthogonalize(matrix: Tensor, num_steps: int) -> Tensor:
    """Nearly the orthogonal factor of `matrix` [..., m, n] (singular values in about [0.7, 1.2]), in bf16.

    The quintic Newton-Schulz iteration X <- a X + (b A + c A^2) X with A = X X^T.
    """
    a, b, c = COEFFICIENTS
    add = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    x = matrix.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        poly = add(gram, gram, gram, beta=b, alpha=c)
        x = add(x, poly, x, beta=a)
    return x.mT if is_tall else x
