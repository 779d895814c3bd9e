"""What one-bit messages read of an engine: the optimizer's phase, and its states in the masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from ...compression.one_bit.phase import MomentumRange, OneBitState
from ...ops.optim.one_bit import OneBitOptimizer
from ...zero.core.master import Master
from ...zero.model.update import Updater


@final
class EngineState(OneBitState):
    """Reads `optimizer` and its tensors in the masters of `updater`."""

    def __init__(
        self, optimizer: OneBitOptimizer, updater: Updater, unit: Callable[[], float]
    ) -> None:
        """unit: what sums over the ranks are multiplied with now."""
        self._optimizer = optimizer
        self._masters = {master.params.index: master for master in updater.masters}
        self._unit = unit

    @property
    def is_frozen(self) -> bool:
        return self._optimizer.is_frozen

    @property
    def variance_steps(self) -> int:
        return self._optimizer.variance_steps

    @property
    def beta(self) -> float:
        return float(self._optimizer.param_groups[0]["betas"][0])

    @property
    def unit(self) -> float:
        return self._unit()

    def momentum_of(self, buffer: int) -> Sequence[MomentumRange]:
        return [
            MomentumRange(start, tensor)
            for start, tensor in self._states(self._masters[buffer], "exp_avg")
        ]

    def still(self, buffer: int, numel: int) -> Tensor:
        master = self._masters[buffer]
        found = torch.zeros(numel, dtype=torch.bool, device=master.raw.device)
        for start, variance in self._states(master, "exp_avg_sq"):
            found[start : start + variance.numel()] = variance == 0
        return found

    def _states(self, master: Master, key: str) -> list[tuple[int, Tensor]]:
        states = self._optimizer.states
        # after a load an item of padding alone has no states yet
        return [
            (item.start, states[item.master][key])
            for item in master.items
            if key in states[item.master]
        ]


__all__ = ["EngineState"]
