"""The section `flops_profiler`: which step is profiled, and what is printed of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, final

from pydantic import AfterValidator, Field

from ...utils.schema.section import Entry, NoEffect, Section
from ...utils.schema.values import TUPLE, WHOLE, Count, Flag, Natural, NonNegative, needs


def _check_steps(value: int | tuple[int, int]) -> int | tuple[int, int]:
    if isinstance(value, tuple) and value[0] > value[1]:
        raise ValueError(f"must be {_STEPS_NEED}, the first not above the last")
    return value


_STEPS_NEED = "a whole number, at least 0, or a list [first, last] of two of them"
Steps = Annotated[
    Natural | Annotated[tuple[Natural, Natural], Field(fail_fast=True), TUPLE],
    needs(_STEPS_NEED),
    AfterValidator(_check_steps),
]


@final
class FlopsProfiler(Section):
    """Count the operations of a training step, by module."""

    others: ClassVar[Mapping[str, Entry]] = {
        "step": NoEffect(Natural, "profile_step chooses the step, here and in DeepSpeed")
    }

    enabled: Flag = Field(False, description="a step is profiled and printed")
    recompute_fwd_factor: NonNegative = Field(
        0.0,
        description="forwards that a backward runs again; only for a backward that the script calls itself, "
        "because others are counted",
    )
    profile_step: Steps = Field(
        1,
        description="updates before the profiled step: 1 is the second step; [first, last]: the mean of "
        "several steps",
    )
    module_depth: Annotated[int, Field(ge=-1), WHOLE] = Field(
        -1, description="depth down to which modules are printed; 0 is the model itself, -1 is all"
    )
    top_modules: Count = Field(
        1, description="classes of modules that are printed at each depth, those that take most"
    )
    detailed: Flag = Field(True, description="the tree of modules is printed")
    output_file: str | None = Field(None, description="rank 0 writes this file; null: it prints")

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last profiled step, counted from 0."""
        found = self.profile_step
        return found if isinstance(found, tuple) else (found, found)


__all__ = ["FlopsProfiler"]
