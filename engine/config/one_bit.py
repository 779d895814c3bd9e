"""Checks of one-bit optimizers that need other sections of the config."""

from __future__ import annotations

from typing import Any

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig

WARMUP_STEPS = 1000  # the default of the schedules
CYCLE_STEPS = 2000


def warmup_steps(scheduler: Any) -> int:
    """The steps in which the schedule raises the learning rate. scheduler: its section, or None."""
    if scheduler is None:
        return 0
    if scheduler.type.startswith("Warmup"):
        return int(scheduler.params.get("warmup_num_steps", WARMUP_STEPS))
    if scheduler.type == "OneCycle":
        return int(scheduler.params.get("cycle_first_step_size", CYCLE_STEPS))
    return 0


def check_one_bit(optimizer: Any, scheduler: Any, zero: ZeroConfig, report: Report) -> None:
    """Report where a one-bit optimizer cannot follow the other sections."""
    if optimizer is None or optimizer.type not in ONE_BIT_OPTIMIZERS:
        return
    name = optimizer.type
    if zero.stage == 3:
        report.complain(
            "zero_optimization.stage",
            3,
            f"{name} sends gradients of one bit; two thirds of what stage 3 sends are parameters, which stay "
            "exact: set stage to 0, 1 or 2, or choose AdamW",
        )
    if zero.mics_shard_size > 0 and zero.stage > 0:
        report.complain(
            "zero_optimization.mics_shard_size",
            zero.mics_shard_size,
            f"{name} keeps for each rank what its messages have lost, and sums over replicas are exact fp32 "
            "numbers, so nothing would be saved there: remove the key, or choose AdamW",
        )
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(zero, key).device
        if device != "none":
            report.complain(
                f"zero_optimization.{key}.device",
                device,
                f"{name} computes its messages from moments and masters on the device of the parameters: "
                'set it to "none", or choose AdamW',
            )
    _check_freeze(optimizer.params, warmup_steps(scheduler), report)


def _check_freeze(params: dict[str, Any], warmup: int, report: Report) -> None:
    freeze = params.get("freeze_step")
    if isinstance(freeze, int) and freeze < warmup:
        report.complain(
            "optimizer.params.freeze_step",
            freeze,
            f"the learning rate rises for {warmup} steps, and a variance that is frozen before does not "
            f'fit the gradients after them: set it to {warmup} at least, or to "auto"',
        )


__all__ = ["check_one_bit", "warmup_steps"]
