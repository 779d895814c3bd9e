"""`deepspeed.runtime.data_pipeline`: schedules of the difficulty of samples."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
