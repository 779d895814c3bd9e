"""`deepspeed.runtime.rollout`: what a trainer and a generator say to each other, and losses on responses.

There is no generator of xds: `build_rollout` refuses, and a script derives its own from `RolloutEngine`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SOURCES = {
    "JSDLossOutput": ".opsd",
    "ResponseTokenBatch": ".opsd",
    "RolloutBatch": ".base",
    "RolloutConfig": ".base",
    "RolloutEngine": ".base",
    "RolloutRequest": ".base",
    "SamplingConfig": ".base",
    "build_rollout": ".factory",
    "generalized_jsd_loss": ".opsd",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    from ...missing import placeholder

    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    return placeholder(__name__, name)
