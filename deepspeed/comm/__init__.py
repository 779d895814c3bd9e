"""`deepspeed.comm`: torch.distributed with DeepSpeed's names, for the script's own collectives (comm.py)."""

from __future__ import annotations

from typing import Any

from . import comm as _comm
from .comm import get_world_group as get_world_group
from .comm import init_distributed as init_distributed


def __getattr__(name: str) -> Any:
    return getattr(_comm, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_comm)})
