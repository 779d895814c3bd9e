"""The outer optimizer: SGD with Nesterov's momentum, or plain, on the mean of the outer gradients.

    outer gradient   g = mean over groups of (outer parameters - parameters of the group)
    Nesterov         m = momentum m + g        outer -= lr (g + momentum m)
    SGD              m = momentum m + g        outer -= lr m

Source: Douillard et al., DiLoCo, 2023, algorithm 1, https://arxiv.org/abs/2311.08105; the formulas are those
of torch.optim.SGD.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .config import OuterOptimizer


@final
class OuterSgd:
    """Updates flat outer parameters, fp32 [n]."""

    def __init__(self, section: OuterOptimizer) -> None:
        self._lr, self._momentum = section.params.lr, section.params.momentum
        self._is_nesterov = section.type == "Nesterov"

    @property
    def has_momentum(self) -> bool:
        """It keeps a momentum of the size of the parameters."""
        return self._momentum > 0

    @torch.no_grad()
    def step(self, outer: Tensor, momentum: Tensor | None, grad: Tensor) -> None:
        """Update `outer` and `momentum`; `grad` is overwritten."""
        if momentum is not None:
            momentum.mul_(self._momentum).add_(grad)
            if self._is_nesterov:
                grad.add_(momentum, alpha=self._momentum)
            else:
                grad = momentum
        outer.sub_(grad, alpha=self._lr)


__all__ = ["OuterSgd"]
