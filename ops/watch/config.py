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
        description="a thread a rank answers for it when others wait; false explains failed waits alone",
    )
    heartbeat_seconds: Annotated[float, number(0.05, 60)] = Field(
        1.0, description="how often a rank shows that it lives and looks whether others wait"
    )
    ring_size: Annotated[int, whole(1, 1_000_000)] = Field(
        256, description="collectives that a rank remembers, for the diagnosis and its file"
    )
    straggler_ratio: Annotated[float, number(0)] = Field(
        1.2,
        description="a rank that computes so many times as long as the median of its peers, while they "
        "wait, is named; 0 for never",
    )
