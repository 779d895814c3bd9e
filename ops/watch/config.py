"""The config section `watch`: how ranks that stall, differ or are slow are detected. Imports no torch."""

from __future__ import annotations

from typing import Annotated, final

from pydantic import Field

from ...utils.schema.rules import FLAG, number, whole
from ...utils.schema.section import Section


@final
class WatchConfig(Section):
    """The watcher diagnoses stalls, and reports ranks that are slower than their peers."""

    enabled: Annotated[bool, FLAG] = Field(
        True,
        description="a thread per rank reports its state when others wait; false: only failed waits",
    )
    heartbeat_seconds: Annotated[float, number(0.05, 60)] = Field(
        1.0, description="how often a rank sends a heartbeat and checks whether others wait"
    )
    ring_size: Annotated[int, whole(1, 1_000_000)] = Field(
        256,
        description="number of collectives that a rank remembers, for the diagnosis and its file",
    )
    straggler_ratio: Annotated[float, number(0)] = Field(
        1.2,
        description="a rank is reported if it computes so many times as long as the median of its peers while "
        "they wait; 0 for never",
    )
