"""`deepspeed.runtime.data_pipeline.data_sampling`: samples on disk and batches of them."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ....missing import placeholder

    return placeholder(__name__, name)
