"""`deepspeed.comm`: torch.distributed with DeepSpeed's names, for the script's own collectives (comm.py)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comm import get_world_group as get_world_group
    from .comm import init_distributed as init_distributed


def __getattr__(name: str) -> Any:
    return getattr(import_module(".comm", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(import_module(".comm", __name__))})
