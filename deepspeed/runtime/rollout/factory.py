"""`deepspeed.runtime.rollout.build_rollout`, which refuses."""

from __future__ import annotations

from typing import Any

from ....utils.errors import UsageError
from ...errors import raises_theirs
from .base import RolloutEngine


@raises_theirs
def build_rollout(
    rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> RolloutEngine:
    """Always raises.

    Raises:
        UsageError: also a ValueError; with what to do instead.
    """
    name = rollout_cfg.engine
    if name != "hybrid_engine":
        raise UsageError(f"Unknown rollout engine {name!r}; DeepSpeed has hybrid_engine alone")
    if student_engine is None or tokenizer is None:
        raise UsageError("hybrid_engine needs both student_engine and tokenizer")
    raise UsageError(
        "the rollout engine hybrid_engine is not covered by xds.deepspeed: derive from RolloutEngine, and call "
        "engine.module.generate() in it"
    )
