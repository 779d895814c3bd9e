"""`deepspeed.runtime.zero.partition_parameters`: the same names as `deepspeed.zero`."""

from __future__ import annotations

from typing import Any

from ... import zero
from ...missing import placeholder


def __getattr__(name: str) -> Any:
    try:
        return getattr(zero, name)
    except AttributeError:
        return placeholder(__name__, name)
