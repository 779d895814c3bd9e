"""Chooses how gradients and parameters are sent, and shows one-bit messages what they need of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...compression.legs import BuildLegs, ExactLegs
from ...compression.one_bit.legs import OneBitLegs
from ...compression.one_bit.phase import MomentumRange, OneBitState, Phase
from ...compression.unit import GradientUnit
from ...compression.zeropp.legs import ZeroppChoice, ZeroppLegs
from ...ops.comm.collectives import Collectives
from ...ops.comm.hosts import host_numbers
from ...ops.optim.one_bit import OneBitOptimizer
from ...ops.optim.shard_optimizer import states_of
from ...utils.errors import UsageError
from ...zero.core.master import Master
from ...zero.core.update import Updater
from ..config.config import Config


@final
class Messages:
    """How the engine sends gradients and parameters.

    legs: makes what a group sends. One-bit messages need `bind` before training.
    """

    def __init__(
        self, config: Config, world: Collectives, hosts: Sequence[int] | None = None
    ) -> None:
        """world: all ranks. hosts: the number of each one's; None: those of ZeRO++ tell each other."""
        self._phase: Phase | None = None
        self._unit = GradientUnit()
        self.legs: BuildLegs = ExactLegs
        choice = _zeropp(config)
        if choice is not None:
            self.legs = partial(ZeroppLegs, choice, self._unit, hosts or host_numbers(world))
        if config.optimizer is not None and config.optimizer.type in ONE_BIT_OPTIMIZERS:
            self._phase = Phase()
            self.legs = partial(OneBitLegs, self._phase)

    def bind(
        self,
        optimizer: torch.optim.Optimizer | None,
        updater: Updater,
        unit: Callable[[], float],
    ) -> None:
        """Let one-bit messages follow `optimizer`. unit: the factor of sums over the ranks, now.

        Raises:
            UsageError: groups have momenta of different decay, and one message has all of them.
        """
        self._unit.bind(unit)
        if self._phase is None or not isinstance(optimizer, OneBitOptimizer):
            return
        betas = {group["betas"][0] for group in optimizer.param_groups}
        if len(betas) > 1 and not updater.world.is_alone:
            shown = ", ".join(map(str, sorted(betas)))
            name = type(optimizer).__name__
            raise UsageError(
                f"{name} on several ranks with several first betas ({shown}): one message has the momenta of "
                "all groups; give all groups the same betas"
            )
        self._phase.bind(EngineState(optimizer, updater, unit))


def _zeropp(config: Config) -> ZeroppChoice | None:
    """What the config asks of ZeRO++; None: nothing."""
    zero = config.zero_optimization
    found = ZeroppChoice(
        weights=zero.zero_quantized_weights,
        frozen_weights=zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights,
        gradients=zero.zero_quantized_gradients,
        partition_size=max(zero.zero_hpz_partition_size, 1),
        loco=zero.zeropp_loco_param,
    )
    return found if zero.compresses else None


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
        states = states_of(self._optimizer)
        # after a load an item of padding alone has no states yet
        return [
            (item.start, states[item.master][key])
            for item in master.items
            if key in states[item.master]
        ]


__all__ = ["EngineState", "Messages"]
