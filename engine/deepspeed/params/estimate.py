"""Estimates of memory for stages 2 and 3 from a model alone. `xds plan` builds what runs, and is exact."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ....offload.host import NUM_BUFFERS
from ....zero.layout.discover import find_units
from ...config.config import Config

PARAM_BYTES, GRAD_BYTES, MOMENT_BYTES = 2, 4, 8
MASTER_BYTES, HOST_MASTER_BYTES = 2, 4  # beside its parameter a master is 16 bits more
UNITS_IN_FLIGHT = {2: 4, 3: 6}
SUMS_IN_FLIGHT = 6  # shards of sums that are reduced, or copied to the host
BUILD_BYTES = 4  # a parameter is built in fp32
GIB = 2**30


@dataclass(frozen=True)
class Offload:
    """Which states are in host memory; parameters only together with the optimizer."""

    optimizer: bool = False
    params: bool = False


CHOICES = (Offload(), Offload(optimizer=True), Offload(optimizer=True, params=True))


def rank_bytes(
    stage: int, world_size: int, numel: int, largest_numel: int, offload: Offload = CHOICES[0]
) -> int:
    """Bytes of model states on one rank's device.

    Args:
        stage: 2 or 3.
        numel: elements of the whole model; largest_numel: of its largest unit.
    """
    kinds = {3: 0 if offload.params else PARAM_BYTES}
    kinds |= {2: 0, 1: 0} if offload.optimizer else {2: GRAD_BYTES, 1: MASTER_BYTES + MOMENT_BYTES}
    states = sum(
        numel * size / (world_size if stage >= level else 1) for level, size in kinds.items()
    )
    if offload.optimizer:
        states += SUMS_IN_FLIGHT * GRAD_BYTES * largest_numel / world_size
    return int(states) + UNITS_IN_FLIGHT[stage] * PARAM_BYTES * largest_numel


def host_bytes(  # noqa: PLR0913 (what the table varies)
    numel: int,
    largest_numel: int,
    nodes: tuple[int, int],
    factor: float,
    zero_init: bool,
    offload: Offload = CHOICES[0],
) -> int:
    """Bytes of a machine's host memory: of the states there, or while the model is built if that is more.

    A model is built whole on each rank, or one unit at a time.
    nodes: ranks per node, and number of nodes.
    """
    ranks_per_node, num_nodes = nodes
    build = BUILD_BYTES * (largest_numel if zero_init else numel) * ranks_per_node
    each = HOST_MASTER_BYTES + MOMENT_BYTES + GRAD_BYTES if offload.optimizer else 0
    each += PARAM_BYTES if offload.params else 0
    states = each * numel / num_nodes
    if offload.optimizer and not offload.params:
        states += NUM_BUFFERS * PARAM_BYTES * largest_numel / num_nodes
    return int(max(build, states) * factor)


def measure(model: nn.Module) -> tuple[int, int]:
    """(elements of the model, elements of its largest unit). Tied parameters count once."""
    config = Config.model_construct().zero_optimization
    units, root = find_units(model, config.units, config.unit_min_numel)
    sizes = [unit.numel for unit in (*units, root)]
    return sum(sizes), max(sizes)


def table(stage: int, model: nn.Module, nodes: tuple[int, int], factor: float) -> str:
    """The text that the functions print.

    nodes: ranks per node, and number of nodes.
    """
    numel, largest = measure(model)
    per_node, num_nodes = nodes
    lines = [
        "Estimated memory for parameters, gradients and optimizer state, Adam in bf16:",
        f"{num_nodes} nodes with {per_node} ranks each; {numel / 1e6:.1f}M parameters, "
        f"{largest / 1e6:.1f}M in the largest unit; ZeRO stage {stage}.",
        "  host of a node | device of a rank",
    ]
    for offload in CHOICES if stage == 3 else CHOICES[:2]:
        device = rank_bytes(stage, per_node * num_nodes, numel, largest, offload) / GIB
        for zero_init in (True, False) if stage == 3 else (False,):
            host = host_bytes(numel, largest, nodes, factor, zero_init, offload) / GIB
            how = "built under zero.Init" if zero_init else "built whole on each rank"
            lines.append(f"  {host:10.2f} GiB | {device:12.2f} GiB | {how}{_words(offload)}")
    return "\n".join(lines)


def _words(offload: Offload) -> str:
    if offload.params:
        return ", optimizer and parameters on the host"
    return ", optimizer on the host" if offload.optimizer else ""


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimate for `model`, which may be on the meta device."""
    print(table(3, model, (num_gpus_per_node, num_nodes), additional_buffer_factor))


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimate for `model`, which may be on the meta device."""
    print(table(2, model, (num_gpus_per_node, num_nodes), additional_buffer_factor))
