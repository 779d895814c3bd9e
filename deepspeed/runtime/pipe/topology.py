"""`deepspeed.runtime.pipe.topology`: coordinates of ranks, and the groups along their axes."""

from __future__ import annotations

from typing import Any

from .coordinates import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    topology_of,
)
from .grid import PipelineParallelGrid, prime_factors

_prime_factors = prime_factors


def __getattr__(name: str) -> Any:
    from ...missing import placeholder

    return placeholder(__name__, name)


__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "topology_of",
]
