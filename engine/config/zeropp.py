"""Checks of the ZeRO++ keys that need other keys of the section."""

from __future__ import annotations

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig

_STAGE_3 = "only stage 3 gathers parameters for each forward and backward: set stage to 3, or remove the key"
_DIVERGENT = (
    "with divergent_graphs parameters are sent to the ranks that ask for them, exactly: set divergent_graphs "
    "to false, or remove the key"
)


def check_zeropp(zero: ZeroConfig, optimizer: str | None, report: Report) -> None:
    """Report combinations that do not work. optimizer: its type, if the section is given."""
    parts = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size,
    }
    for key, value in parts.items():
        if value in (0, 1) and value is not True:
            continue
        if zero.stage != 3:
            report.complain(f"zero_optimization.{key}", value, _STAGE_3)
        elif zero.divergent_graphs:
            report.complain(f"zero_optimization.{key}", value, _DIVERGENT)
    gradients = "zero_optimization.zero_quantized_gradients"
    if zero.zero_quantized_gradients and zero.stage == 0:
        report.complain(
            gradients,
            True,
            "stage 0 sends sums of gradients as well, which stay exact: set stage to 1, 2 or 3, or "
            "optimizer.type to OneBitAdam",
        )
    if zero.zero_quantized_gradients and optimizer in ONE_BIT_OPTIMIZERS:
        report.complain(
            gradients, True, f"{optimizer} sends gradients in one bit already: set it to false"
        )
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        report.complain(
            "zero_optimization.zeropp_loco_param",
            zero.zeropp_loco_param.as_dict(),
            "it feeds back what 4-bit gradients lose: set zero_quantized_gradients to true, or remove the key",
        )


__all__ = ["check_zeropp"]
