"""The backends that start node processes on hosts: ssh for each host, or one command that reaches all hosts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import AllAtOnce as AllAtOnce
    from .base import Backend as Backend
    from .base import PerHost as PerHost
    from .base import node_index as node_index
    from .registry import BACKENDS as BACKENDS
    from .registry import backend_named as backend_named

_MODULES = {
    **dict.fromkeys(("AllAtOnce", "Backend", "PerHost", "node_index"), ".base"),
    **dict.fromkeys(("BACKENDS", "backend_named"), ".registry"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
