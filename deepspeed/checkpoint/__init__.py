"""`deepspeed.checkpoint`: names of files, copies of states, and the converter of universal checkpoints.

Constants come from the table of names.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ..missing import placeholder

    return placeholder(__name__, name)
