"""Checks of the MiCS keys that need other sections, or the number of ranks."""

from __future__ import annotations

from ...ops.mesh import Mesh
from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig

SIZE = "zero_optimization.mics_shard_size"
HIERARCHICAL = "zero_optimization.mics_hierarchical_params_gather"


def check_mics(zero: ZeroConfig, report: Report) -> None:
    """Report where the keys contradict other sections, or have no effect."""
    size = zero.mics_shard_size
    if zero.mics_hierarchical_params_gather and size <= 1:
        report.notes.append(
            f"{HIERARCHICAL} has no effect without {SIZE}, the ranks that share one copy of the model"
        )
    if size <= 0:
        return
    if zero.stage == 0:
        report.notes.append(
            f"{SIZE} = {size} has no effect at stage 0, where every rank holds everything"
        )
        return
    if zero.zero_hpz_partition_size > 1:
        report.complain(
            "zero_optimization.zero_hpz_partition_size",
            zero.zero_hpz_partition_size,
            f"second shards keep what gathers across hosts brought, and shard groups ({SIZE} = {size}) are for "
            "no such gathers: remove one of the two keys",
        )
    if zero.mics_hierarchical_params_gather and (
        zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    ):
        report.complain(
            HIERARCHICAL,
            True,
            "it gathers exact parameters, and gathers in 8 bits have two levels already: set it to false, or "
            "remove zero_quantized_weights and zero_quantized_nontrainable_weights",
        )
    if size == 1 and zero.offload_param.device != "none":
        report.complain(
            SIZE,
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
        f"{SIZE} = {size}: must divide the number of {named} ({ranks}), so that every shard group has as many "
        f"ranks; set it to {' or '.join(fits[:8])}, or start a multiple of {size}"
    ]


__all__ = ["check_mics", "complaints_of_ranks"]
