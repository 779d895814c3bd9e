"""`deepspeed.ops.op_builder`: DeepSpeed's builders of ops. xds's own ops are built on first use."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from .builder import CUDAOpBuilder, OpBuilder, get_default_compute_capabilities
from .builders import BUILDERS, builder_names


def __getattr__(name: str) -> Any:
    if name in BUILDERS:
        return BUILDERS[name]
    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *BUILDERS])


__all__ = ["CUDAOpBuilder", "OpBuilder", "builder_names", "get_default_compute_capabilities"]
