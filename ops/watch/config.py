"""The config section `watch`: how ranks that stall, differ or are slow are detected. Imports no torch."""

from __future__ import annotations

from typing import Annotated, final

from pydantic import Field

from ...utils.schema.section import Section
from ...utils.schema.values import WHOLE, Flag, NonNegative


@final
class WatchConfig(Section):
    """The watcher diagnoses stalls, and reports ranks that are slower than their peers."""

    enabled: Flag = Field(
        True,
        description="a thread per rank reports its state when others wait; false: xds reports only waits that "
        "failed",
    )
    notice_seconds: NonNegative = Field(
        60.0,
        description="a rank that waits so long for others logs a warning, which names the rank that it waits "
        "for and the line of its script; 0 for never. The wait goes on until the timeout of the group",
    )
    heartbeat_seconds: Annotated[float, Field(ge=0.05, le=60)] = Field(
        1.0, description="how often a rank sends a heartbeat and checks whether others wait"
    )
    ring_size: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = Field(
        256,
        description="number of collectives that a rank remembers, for the diagnosis and its file",
    )
    straggler_ratio: NonNegative = Field(
        1.2,
        description="a rank is reported if its compute time exceeds this many times the median of the other "
        "ranks while they wait; 0 for never",
    )
