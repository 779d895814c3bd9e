"""`deepspeed.constants`: the default port and time limit of process groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from .missing import placeholder

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"

# DeepSpeed's variable, in minutes. The engine's own limit is XDS_TIMEOUT_SECONDS.
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
