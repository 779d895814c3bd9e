"""`ALL_OPS`: a builder of each op of DeepSpeed, by the op's name."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from .builder import OpBuilder
from .builders import BUILDERS

__op_builders__: list[OpBuilder] = [builder() for builder in BUILDERS.values()]
ALL_OPS: dict[str, OpBuilder] = {builder.name: builder for builder in __op_builders__}


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
