"""Checks of what is sent: one-bit optimizers, ZeRO++, MiCS, shared parameters. They need several sections."""

from __future__ import annotations

from typing import Any

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...ops.comm.config import Communication
from ...ops.mesh import Mesh
from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig

WARMUP_STEPS = 1000  # the default of the schedules
CYCLE_STEPS = 2000
_STAGE_3 = "only stage 3 gathers parameters for each forward and backward: set stage to 3, or remove the key"
_DIVERGENT = (
    "with divergent_graphs parameters are sent to the ranks that ask for them, exactly: set divergent_graphs "
    "to false, or remove the key"
)
_SIZE = "zero_optimization.mics_shard_size"
_HIERARCHICAL = "zero_optimization.mics_hierarchical_params_gather"
_SHARED = "zero_optimization.shared_parameters"


def check_messages(
    optimizer: Any, scheduler: Any, zero: ZeroConfig, communication: Communication, report: Report
) -> None:
    """Report what does not work together. optimizer, scheduler: their sections, or None."""
    kind = None if optimizer is None else optimizer.type
    _check_mics(zero, report)
    _check_shared_parameters(zero, communication, kind, report)
    _check_one_bit(optimizer, scheduler, zero, report)
    _check_zeropp(zero, kind, report)


def warmup_steps(scheduler: Any) -> int:
    """The steps in which the schedule raises the learning rate. scheduler: its section, or None."""
    if scheduler is None:
        return 0
    if scheduler.type.startswith("Warmup"):
        return int(scheduler.params.get("warmup_num_steps", WARMUP_STEPS))
    if scheduler.type == "OneCycle":
        return int(scheduler.params.get("cycle_first_step_size", CYCLE_STEPS))
    return 0


def _check_one_bit(optimizer: Any, scheduler: Any, zero: ZeroConfig, report: Report) -> None:
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


def _check_zeropp(zero: ZeroConfig, optimizer: str | None, report: Report) -> None:
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


def _check_mics(zero: ZeroConfig, report: Report) -> None:
    """Report where the keys contradict other sections, or have no effect."""
    size = zero.mics_shard_size
    if zero.mics_hierarchical_params_gather and size <= 1:
        report.notes.append(
            f"{_HIERARCHICAL} has no effect without {_SIZE}, the ranks that share one copy of the model"
        )
    if size <= 0:
        return
    if zero.stage == 0:
        report.notes.append(
            f"{_SIZE} = {size} has no effect at stage 0, where every rank holds everything"
        )
        return
    if zero.zero_hpz_partition_size > 1:
        report.complain(
            "zero_optimization.zero_hpz_partition_size",
            zero.zero_hpz_partition_size,
            f"second shards keep what gathers across hosts brought, and shard groups ({_SIZE} = {size}) are "
            "for no such gathers: remove one of the two keys",
        )
    if zero.mics_hierarchical_params_gather and (
        zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    ):
        report.complain(
            _HIERARCHICAL,
            True,
            "it gathers exact parameters, and gathers in 8 bits have two levels already: set it to false, or "
            "remove zero_quantized_weights and zero_quantized_nontrainable_weights",
        )
    if size == 1 and zero.offload_param.device != "none":
        report.complain(
            _SIZE,
            size,
            "with one rank nothing is sharded, and offload_param is for sharded parameters: set it to 2 or "
            'more, or offload_param.device to "none"',
        )


def complaints_of_ranks(zero: ZeroConfig, mesh: Mesh) -> list[str]:
    """Complaints about the number of data-parallel ranks."""
    size, ranks = zero.mics_shard_size, mesh.data * mesh.sequence
    if size <= 0 or zero.stage == 0 or ranks % size == 0:
        return []
    named = "data-parallel ranks" if mesh.sequence == 1 else "data-parallel and sequence ranks"
    fits = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
    return [
        f"{_SIZE} = {size}: must divide the number of {named} ({ranks}), so that every shard group has as many "
        f"ranks; set it to {' or '.join(fits[:8])}, or start a multiple of {size}"
    ]


def _check_shared_parameters(
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
        report.complain(_SHARED, True, f"{need}, or remove the key")


__all__ = ["check_messages", "complaints_of_ranks", "warmup_steps"]
