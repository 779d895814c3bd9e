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
        description="a thread per rank reports its state when others wait; false: xds reports only waits that "
        "failed",
    )
    notice_seconds: Annotated[float, number(0)] = Field(
        60.0,
        description="a rank that waits so long for others logs a warning, which names the rank that it waits "
        "for and the line of its script; 0 for never. The wait goes on until the timeout of the group",
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
        description="a rank is reported if its compute time exceeds this many times the median of the other "
        "ranks while they wait; 0 for never",
    )
