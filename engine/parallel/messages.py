"""Chooses how gradients and parameters are sent, and shows one-bit messages what they need of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

import torch

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...compression.scheme import BuildScheme, ExactScheme
from ...compression.unit import GradientUnit
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import host_numbers
from ...utils.errors import UsageError
from ...zero.model.update import Updater
from ..config.config import Config

if TYPE_CHECKING:
    from ...compression.one_bit.phase import Phase


@final
class Messages:
    """How the engine sends gradients and parameters.

    scheme: makes what a group sends. One-bit messages need `bind` before training.
    """

    def __init__(
        self, config: Config, world: Collectives, hosts: Sequence[int] | None = None
    ) -> None:
        """world: all ranks. hosts: the number of each one's; None: those of ZeRO++ tell each other."""
        self._phase: Phase | None = None
        self._unit = GradientUnit()
        self.scheme: BuildScheme = ExactScheme
        if config.zero_optimization.compresses:
            self.scheme = _zeropp(config, self._unit, hosts or host_numbers(world))
        if config.optimizer is not None and config.optimizer.type in ONE_BIT_OPTIMIZERS:
            from ...compression.one_bit.phase import Phase
            from ...compression.one_bit.scheme import OneBitScheme

            self._phase = Phase()
            self.scheme = partial(OneBitScheme, self._phase)

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
        if self._phase is None:
            return
        from ...ops.optim.one_bit import OneBitOptimizer
        from .one_bit_state import EngineState

        if not isinstance(optimizer, OneBitOptimizer):
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


def _zeropp(config: Config, unit: GradientUnit, hosts: Sequence[int]) -> BuildScheme:
    """What ZeRO++ sends. hosts: the number of each rank's host."""
    from ...compression.zeropp.scheme import ZeroppChoice, ZeroppScheme

    zero = config.zero_optimization
    choice = ZeroppChoice(
        weights=zero.zero_quantized_weights,
        frozen_weights=zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights,
        gradients=zero.zero_quantized_gradients,
        partition_size=max(zero.zero_hpz_partition_size, 1),
        loco=zero.zeropp_loco_param,
    )
    return partial(ZeroppScheme, choice, unit, hosts)


__all__ = ["Messages"]
