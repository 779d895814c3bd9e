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

from .adam import Adam
from .scale import Scale
from .shard_optimizer import Flat, ParamPart, ShardOptimizer, Update, World

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
MUON_LR, ADAM_LR = 0.02, 3e-4


@final
class Muon(ShardOptimizer):
    """Momentum, orthogonalised by Newton-Schulz, for hidden matrices; AdamW for everything else."""

    is_elementwise = False

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
            "use_muon": True,
            "bias_correction": True,
        }
        entries = list(params)
        for number, entry in enumerate(entries):
            if isinstance(entry, dict) and not entry.get("use_muon", True):
                entries[number] = {"lr": _first_given(adam_lr, lr, ADAM_LR), **entry}
        super().__init__(entries, defaults)
        self._stacks = frozenset(stacks)
        self._adam = Adam([dict(group) for group in self.param_groups])
        # one shared list of groups and one state, so that LR schedules and checkpoints use a single optimizer
        self._adam.param_groups = self.param_groups
        self._adam.state = self._states

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        return ("momentum_buffer",) if group.get("use_muon", True) else ("exp_avg", "exp_avg_sq")

    def gains_from_kernels(self, *, casts: bool) -> bool:
        return self._adam.gains_from_kernels(casts=casts)

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        plain = [u for u in updates if not u.group["use_muon"]]
        self._adam.update(plain, scale, world)
        mine: dict[int, list[Update]] = {}
        for update in updates:
            if update.group["use_muon"]:
                mine.setdefault(update.item.flat, []).append(update)
        for flat in world.flats:
            if any(self.param_groups[part.group]["use_muon"] for part in flat.parts):
                self._update_flat(flat, mine.get(flat.index, []), scale)

    def _update_flat(self, flat: Flat, updates: Sequence[Update], scale: Scale) -> None:
        """Update one flat buffer. Every rank of its group calls this, also without matrices of its own."""
        collectives = flat.collectives
        whole = torch.zeros(flat.numel, dtype=torch.bfloat16, device=collectives.device)
        here = collectives.shard_of(whole) if flat.is_sharded else whole
        for update in updates:
            start, numel = update.item.start, update.item.master.numel()
            here[start : start + numel].copy_(self._momentum(update, scale))
        if flat.is_sharded:
            collectives.all_gather(whole, here, buffer=flat.index, kind="muon").wait()
        places = {part.name: part for part in flat.parts}
        for update in updates:
            for part in update.item.parts:
                self._apply(update, part, whole[places[part.name].start :])
            if update.out is not None:
                update.out.copy_(update.item.master)

    def _momentum(self, update: Update, scale: Scale) -> Tensor:
        group = update.group
        state = self._states[update.item.master]
        if not state:
            state["momentum_buffer"] = update.item.new_state()
        grad = update.grad.to(update.item.master.dtype).mul_(scale.value)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _apply(self, update: Update, part: ParamPart, direction: Tensor) -> None:
        """`direction` begins with the whole matrix of `part`, flattened."""
        group = update.group
        lr = float(group["lr"])
        numel = math.prod(part.shape)
        # channels_last permutes the columns, and so those of the result
        matrix = direction[:numel].view(part.shape[0], -1)
        first, stop = part.param_start, part.param_start + part.stop - part.start
        if part.name in self._stacks:
            matrix = direction[:numel].view(part.shape)
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
