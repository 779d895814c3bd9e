"""`deepspeed.runtime.zero.stage_1_and_2`: memory estimates for stage 2, with xds's formulas (estimate.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...missing import placeholder
from ..optimizer_kinds import DeepSpeedZeroOptimizer as DeepSpeedZeroOptimizer
from . import estimate


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of a machine's host memory, of a rank's device memory), without those of the largest unit."""
    nodes, offload = (num_gpus_per_node, num_nodes), estimate.Offload(cpu_offload)
    return (
        estimate.host_bytes(total_params, 0, nodes, additional_buffer_factor, False, offload),
        estimate.rank_bytes(2, num_gpus_per_node * num_nodes, total_params, 0, offload),
    )


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimate for `model`, which may be on the meta device."""
    sizes = estimate.measure(model)
    nodes = (num_gpus_per_node, num_nodes)
    print(estimate.table(2, sizes, nodes, additional_buffer_factor))


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimate for this number of elements."""
    sizes, nodes = (total_params, 0), (num_gpus_per_node, num_nodes)
    print(estimate.table(2, sizes, nodes, additional_buffer_factor))


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
