"""Checks of zero_optimization.shared_parameters: what it needs of the other keys."""

from __future__ import annotations

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...ops.comm.config import Communication
from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig

_KEY = "zero_optimization.shared_parameters"


def check_shared_parameters(
    zero: ZeroConfig, communication: Communication, optimizer: str | None, report: Report
) -> None:
    """Report combinations that do not work. optimizer: its type, if the section is given."""
    if not zero.shared_parameters:
        return
    needs = []
    if zero.stage == 0:
        needs.append("at stage 0 every rank updates all parameters: set stage to 1 or 2")
    if zero.stage == 3:
        needs.append("at stage 3 no rank keeps all parameters: set stage to 1 or 2")
    if zero.stage and zero.mics_shard_size == 1:
        needs.append(
            "with mics_shard_size = 1 every rank updates all parameters: set mics_shard_size to 2 or more, "
            "or to -1 for one shard group of all ranks"
        )
    if zero.offload_optimizer.device != "none":
        needs.append(
            "with offload_optimizer a rank may write new values while other ranks still read the old ones: set "
            'offload_optimizer.device to "none"'
        )
    if optimizer in ONE_BIT_OPTIMIZERS:
        needs.append(
            f"{optimizer} sends differences of one bit, and updates in place send nothing: choose AdamW"
        )
    if not communication.shared_memory:
        needs.append("communication.shared_memory is false: set it to true")
    for need in needs:
        report.complain(_KEY, True, f"{need}, or remove the key")


__all__ = ["check_shared_parameters"]
