"""Bandwidths of collectives from their bytes and times, as NVIDIA's nccl-tests define them.

    algorithm bandwidth   size / time: how fast the call seems to its caller
    bus bandwidth         algorithm bandwidth * factor: how fast each link carries bytes, at any number of ranks

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Iterable

_OTHERS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_WHOLE = ("broadcast", "reduce", "send", "receive", "barrier")

# the names of other libraries for the same operations
ALIASES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_gather_object": "all_gather",
    "allgather_fn": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_fn": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "broadcast_object_list": "broadcast",
    "monitored_barrier": "barrier",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
    "batch_isend_irecv": "send",
}
TRIMMED = 0.1  # the part of measured times that an average leaves out, at each end
OPERATIONS = ("all_reduce", *_OTHERS, *_WHOLE)


def bus_factor(operation: str, world_size: int) -> float:
    """The bytes that each rank must send, over the size of the operation.

    The size is that of the whole tensor: what all_gather and gather return, what reduce_scatter and scatter
    take, all parts of all_to_all on one rank.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)

    Raises KeyError: `operation` is none of `OPERATIONS` and `ALIASES`.
    """
    operation = ALIASES.get(operation, operation)
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if operation in _OTHERS:
        return (world_size - 1) / world_size
    if operation in _WHOLE:
        return 1.0
    raise KeyError(operation)


def gbps(size_bytes: float, milliseconds: float) -> float:
    """Gigabits (10^9) per second; 0 where no time was measured."""
    return size_bytes * 8e-6 / milliseconds if milliseconds > 0 else 0.0


def trimmed_mean(values: Iterable[float], part: float = TRIMMED) -> float:
    """The mean without the least and the greatest `part` of the values; 0 of none.

    >>> trimmed_mean([3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 90.0])
    2.125
    """
    ordered = sorted(values)
    cut = round(len(ordered) * part)
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept) if kept else 0.0


__all__ = ["ALIASES", "OPERATIONS", "bus_factor", "gbps", "trimmed_mean"]
