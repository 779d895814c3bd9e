"""`deepspeed.runtime.zero.partition_parameters`: the same names as `deepspeed.zero`."""

from __future__ import annotations

from typing import Any

from ... import zero


def __getattr__(name: str) -> Any:
    return getattr(zero, name)
