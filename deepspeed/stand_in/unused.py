"""A warning at the end of a run that asked for DeepSpeed, where accelerate trained without it.

`Accelerator()` without a DeepSpeedPlugin and without ACCELERATE_USE_DEEPSPEED trains with DDP. On a machine
without a GPU each rank trains alone. accelerate says nothing, and asks nothing of deepspeed meanwhile.
"""

from __future__ import annotations

import os
import sys
from typing import Any

WITH = "DEEPSPEED"  # the name of accelerate's DistributedType
_used: set[str] = set()


def note_use(what: str) -> None:
    """This process has made an engine."""
    _used.add(what)


def warn_of_unused() -> None:
    """Warn on rank 0 of several, if this process had an Accelerator without DeepSpeed, and no engine."""
    if int(os.environ.get("WORLD_SIZE") or 1) < 2 or os.environ.get("RANK", "0") != "0":
        return
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: dict[str, Any] = getattr(state, "_shared_state", {})
    kind = getattr(shared.get("distributed_type"), "name", WITH)
    if kind == WITH or _used:
        return
    import logging

    how = "each rank alone" if kind == "NO" else kind
    logging.getLogger("xds").warning(
        "deepspeed was asked for, but accelerate trained without it (%s): it had no DeepSpeedPlugin; set "
        "ACCELERATE_USE_DEEPSPEED=true and ACCELERATE_DEEPSPEED_ZERO_STAGE, or use `accelerate launch "
        "--use_deepspeed`",
        how,
    )


__all__ = ["note_use", "warn_of_unused"]
