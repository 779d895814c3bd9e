"""GaLore and APOLLO on flat shards, exact: Adam's moments of gradients of matrices, projected to a low rank.

Sources: Zhao et al., GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, 2024, algorithm 2,
https://arxiv.org/abs/2403.03507; Zhu et al., APOLLO: SGD-like Memory, AdamW-level Performance, 2024,
algorithm 1, https://arxiv.org/abs/2412.05270. As in the authors' packages the smaller side of a matrix is
projected, moments stay when the projection changes, and weight decay comes after the step. Differs: APOLLO's
projections are drawn for a parameter's name and a period, so they do not depend on ranks or a resume.

Groups with low_rank = False are updated by AdamW. A step additionally sends the gradients of the others once,
in the dtype of the masters. Each rank with a part of a matrix has its moments.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .shard_optimizer import ParamPart, Update
from .whole_params import MatrixOptimizer, own_elements, whole_grad

TINY = 1e-8  # of norms, as in the authors' package
GROWTH = 1.01  # the largest factor of the norm of APOLLO's steps from one to the next


class LowRank(MatrixOptimizer, ABC):
    """What the two have in common. A projector [smaller side, rank] has the columns to project to."""

    flag = "low_rank"

    def part_shapes(
        self, shape: tuple[int, ...], name: str, group: int
    ) -> dict[str, tuple[int, ...]]:
        values = self.param_groups[group]
        if not self.uses_whole(values):
            return {}
        rank = min(values["rank"], *shape)
        low = (shape[0], rank) if _is_tall(shape) else (rank, shape[1])
        return {"exp_avg": low, "exp_avg_sq": low}

    def _part_states(self, update: Update, part: ParamPart) -> dict[str, Tensor]:
        state = self.state_of(update.item)
        return {
            key: state[key][part.name]
            for key in self.part_shapes(part.shape, part.name, update.item.group)
        }

    def _subtract(self, update: Update, part: ParamPart, direction: Tensor) -> None:
        """One step against `direction`, of the parameter's shape, without corrections of Adam's bias."""
        group, step = update.group, int(self.state_of(update.item)["step"])
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        own = update.item.master[part.start : part.stop]
        corrections = math.sqrt(1 - beta2**step) / (1 - beta1**step)
        own.sub_(own_elements(direction, part), alpha=lr * corrections)
        own.mul_(1 - lr * group["weight_decay"])


@final
class GaLore(LowRank):
    """The projector has the first singular vectors of the gradient of every `update_proj_gap`th step."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        low = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        super().__init__(params, {**defaults, **low})

    def part_shapes(
        self, shape: tuple[int, ...], name: str, group: int
    ) -> dict[str, tuple[int, ...]]:
        shapes = super().part_shapes(shape, name, group)
        if shapes:
            shapes["projector"] = (min(shape), min(self.param_groups[group]["rank"], *shape))
        return shapes

    def apply(self, update: Update, part: ParamPart, whole: Tensor) -> None:
        group, states = update.group, self._part_states(update, part)
        grad, projector = whole_grad(update, part, whole), states["projector"]
        if (int(self.state_of(update.item)["step"]) - 1) % group["update_proj_gap"] == 0:
            left, _, right = torch.linalg.svd(grad, full_matrices=False)
            vectors = right.mT if _is_tall(part.shape) else left
            projector.copy_(vectors[:, : projector.shape[1]])
        direction = _direction(_project(grad, projector), states, group)
        if _is_tall(part.shape):
            result = direction @ projector.mT
        else:
            result = projector @ direction
        self._subtract(update, part, result * group["scale"])


@final
class Apollo(LowRank):
    """The gradient is scaled as a random projection of it is by Adam: each channel of it, or as a whole.

    Args:
        scale_type: "channel", or "tensor" as in APOLLO-Mini, which has rank 1 and scale 128.
    """

    def __init__(  # noqa: PLR0913 (the config's keys)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        rank: int = 256,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: str = "channel",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        low = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        super().__init__(params, {**defaults, **low, "scale_type": scale_type, "seed": seed})
        self._drawn: dict[str, tuple[int, Tensor]] = {}  # by parameter: period and projector

    def part_shapes(
        self, shape: tuple[int, ...], name: str, group: int
    ) -> dict[str, tuple[int, ...]]:
        shapes = super().part_shapes(shape, name, group)
        if shapes:
            shapes["last_norm"] = (1,)
        return shapes

    def apply(self, update: Update, part: ParamPart, whole: Tensor) -> None:
        group, states = update.group, self._part_states(update, part)
        grad = whole_grad(update, part, whole)
        low = _project(grad, self._projector(update, part, grad))
        direction = _direction(low, states, group)
        dim = int(_is_tall(part.shape)) if group["scale_type"] == "channel" else (0, 1)
        grown = direction.norm(dim=dim, keepdim=True)
        result = grad * (grown / (low.norm(dim=dim, keepdim=True) + TINY))
        last, norm = states["last_norm"], result.norm()
        excess = (norm / (last + TINY)).clamp(min=GROWTH) / GROWTH
        result = torch.where(last > 0, result / excess, result)
        last.copy_(result.norm())
        self._subtract(update, part, result * math.sqrt(group["scale"]))

    def _projector(self, update: Update, part: ParamPart, grad: Tensor) -> Tensor:
        group, step = update.group, int(self.state_of(update.item)["step"])
        period = (step - 1) // group["update_proj_gap"]
        drawn, projector = self._drawn.get(part.name, (-1, grad))
        if drawn != period or projector.device != grad.device:
            seed = zlib.crc32(f"{group['seed']} {period} {part.name}".encode())
            generator = torch.Generator().manual_seed(seed)
            rank = min(group["rank"], *part.shape)
            normal = torch.randn(min(part.shape), rank, generator=generator, dtype=grad.dtype)
            projector = normal.div_(math.sqrt(rank)).to(grad.device)
            self._drawn[part.name] = period, projector
        return projector


def _is_tall(shape: Sequence[int]) -> bool:
    return shape[0] >= shape[1]


def _project(grad: Tensor, projector: Tensor) -> Tensor:
    return grad @ projector if _is_tall(grad.shape) else projector.mT @ grad


def _direction(low: Tensor, states: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """Adam's direction of a projected gradient, after it has entered the moments."""
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    beta1, beta2 = group["betas"]
    mean.mul_(beta1).add_(low, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(low, low, value=1 - beta2)
    return mean / square.sqrt().add_(group["eps"])


__all__ = ["Apollo", "GaLore"]
