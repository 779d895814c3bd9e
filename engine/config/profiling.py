"""The section `flops_profiler`: which step is profiled, and what is printed of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, final

from pydantic import Field

from ...utils.schema.keys import Entry, NoEffect
from ...utils.schema.rules import FLAG, NULL, TEXT, Rule, either, number, whole
from ...utils.schema.section import Section

_STEPS_NEED = "a whole number, at least 0, or a list [first, last] of two of them"


def _read_steps(value: object) -> Any:
    if isinstance(value, (list, tuple)):
        found = [whole(0).read(each) for each in value]
        if len(found) == 2 and found[0] <= found[1]:
            return tuple(found)
        raise ValueError(f"must be {_STEPS_NEED}, the first not above the last")
    try:
        return whole(0).read(value)
    except ValueError:
        raise ValueError(f"must be {_STEPS_NEED}") from None


@final
class FlopsProfiler(Section):
    """Count the operations of a training step, by module."""

    others: ClassVar[Mapping[str, Entry]] = {
        "step": NoEffect(whole(0), "profile_step chooses the step, here and in DeepSpeed")
    }

    enabled: Annotated[bool, FLAG] = Field(False, description="a step is profiled and printed")
    recompute_fwd_factor: Annotated[float, number(0)] = Field(
        0.0,
        description="forwards that a backward runs again; only for a backward that the script calls itself, "
        "because others are counted",
    )
    profile_step: Annotated[int | tuple[int, int], Rule(_STEPS_NEED, _read_steps)] = Field(
        1,
        description="updates before the profiled step: 1 is the second step; [first, last]: the mean of "
        "several steps",
    )
    module_depth: Annotated[int, whole(-1)] = Field(
        -1, description="depth down to which modules are printed; 0 is the model itself, -1 is all"
    )
    top_modules: Annotated[int, whole(1)] = Field(
        1, description="classes of modules that are printed at each depth, those that take most"
    )
    detailed: Annotated[bool, FLAG] = Field(True, description="the tree of modules is printed")
    output_file: Annotated[str | None, either(TEXT, NULL)] = Field(
        None, description="rank 0 writes this file; null: it prints"
    )

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last profiled step, counted from 0."""
        found = self.profile_step
        return found if isinstance(found, tuple) else (found, found)


__all__ = ["FlopsProfiler"]
