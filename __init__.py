"""xds: train PyTorch models that do not fit one device, steered by a JSON config.

Names are loaded on first use, so that `xds check` and `xds --help` never pay for importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .utils.version import __version__ as __version__

if TYPE_CHECKING:
    from . import zero as zero
    from .engine.checkpoint.io.folders import newest_checkpoint as newest_checkpoint
    from .engine.checkpoint.io.reader import get_fp32_state_dict as get_fp32_state_dict
    from .engine.config.config import Config as Config
    from .engine.engine import Engine as Engine
    from .engine.initialize import initialize as initialize
    from .engine.preemption.coordinator import Preempted as Preempted
    from .utils.errors import ConfigError as ConfigError
    from .utils.errors import UsageError as UsageError
    from .utils.errors import XdsError as XdsError

_HOMES = {
    "initialize": ".engine.initialize",
    "Engine": ".engine.engine",
    "Config": ".engine.config.config",
    "Preempted": ".engine.preemption.coordinator",
    "newest_checkpoint": ".engine.checkpoint.io.folders",
    "get_fp32_state_dict": ".engine.checkpoint.io.reader",
    "XdsError": ".utils.errors",
    "ConfigError": ".utils.errors",
    "UsageError": ".utils.errors",
}

_MODULES = ("zero",)

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "Preempted",
    "UsageError",
    "XdsError",
    "get_fp32_state_dict",
    "initialize",
    "newest_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'xds' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
