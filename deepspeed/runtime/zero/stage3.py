"""`deepspeed.runtime.zero.stage3`: memory estimates for stage 3, with xds's formulas (estimate.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ....zero.access.gathered import GatheredParameters
from ...missing import placeholder
from ..optimizer_kinds import DeepSpeedZeroOptimizer_Stage3 as DeepSpeedZeroOptimizer_Stage3
from . import estimate


def estimate_zero3_model_states_mem_needs(  # noqa: PLR0913 (DeepSpeed's arguments)
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of a machine's host memory, of a rank's device memory, of its units in flight).

    The device memory includes the units in flight. As in DeepSpeed, parameters are offloaded only together
    with the optimizer.
    """
    world_size = num_gpus_per_node * num_nodes
    offload = estimate.Offload(cpu_offload, cpu_offload and cpu_offload_params)
    return (
        estimate.host_bytes(
            total_params,
            largest_layer_params,
            (num_gpus_per_node, num_nodes),
            additional_buffer_factor,
            zero_init,
            offload,
        ),
        estimate.rank_bytes(3, world_size, total_params, largest_layer_params, offload),
        estimate.PARAM_BYTES * estimate.UNITS_IN_FLIGHT[3] * largest_layer_params,
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimate for `model`, which may be on the meta device."""
    sizes = estimate.measure(model)
    nodes = (num_gpus_per_node, num_nodes)
    print(estimate.table(3, sizes, nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimate for these numbers of elements."""
    sizes, nodes = (total_params, largest_layer_params), (num_gpus_per_node, num_nodes)
    print(estimate.table(3, sizes, nodes, additional_buffer_factor))


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The engine `model`, with all parameters whole, as in DeepSpeed. Entry and exit are collectives.

    `engine.generate` needs less memory: it gathers units as it uses them.
    """
    held = getattr(model.optimizer, "parameter_offload", None)
    with GatheredParameters(model.parameters()):
        if held is not None:
            held._remove_module_hooks()
        try:
            yield model
        finally:
            if held is not None:
                held._register_deepspeed_module(held.module)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
