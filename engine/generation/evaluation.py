"""Keeps units gathered between the forwards of an evaluation, at stage 3."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from ...zero.model.sharded_model import ShardedModel
from ..parts import KeptUnits


@final
class EvaluationUnits(KeptUnits):
    """Units that forwards without gradients use in evaluation mode, while memory allows."""

    def __init__(self, sharded: ShardedModel, module: nn.Module) -> None:
        self._sharded, self._module = sharded, module
        self._is_asked = False

    def keep(self, *, is_asked: bool) -> None:
        self._is_asked = is_asked
        if not is_asked:
            self._sharded.end_keeping()

    def before_forward(self) -> None:
        if not self._is_asked:
            return
        if torch.is_grad_enabled() or self._module.training:
            self._sharded.end_keeping()
        elif not self._sharded.keeps:
            from .rollout import spare_bytes

            self._sharded.keep_used(spare_bytes(self._sharded))


__all__ = ["EvaluationUnits"]
