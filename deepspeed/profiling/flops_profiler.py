"""`deepspeed.profiling.flops_profiler`: stand-ins, see missing.py."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ..missing import stand_in

    return stand_in(__name__, name)
