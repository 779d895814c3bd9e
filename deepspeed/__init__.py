"""`import xds.deepspeed as deepspeed`: DeepSpeed's names for the functions of xds, for unchanged scripts.

A name that xds does not implement can be imported and inspected. Using it raises an error with the alternative
(missing.py). Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerator import get_accelerator as get_accelerator
    from .arguments import add_config_arguments as add_config_arguments
    from .comm import init_distributed as init_distributed
    from .pipe import PipelineModule as PipelineModule
    from .runtime.config import DeepSpeedConfigError as DeepSpeedConfigError
    from .runtime.engine import DeepSpeedEngine as DeepSpeedEngine
    from .runtime.optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
    from .start import initialize as initialize
    from .start import tp_model_init as tp_model_init
    from .utils.logging import log_dist as log_dist
    from .utils.logging import logger as logger

if __name__ == "deepspeed":
    raise ImportError(
        "`import deepspeed` found a folder of xds, because the root of the xds checkout is on sys.path: run "
        "from another folder or set PYTHONSAFEPATH=1; xds's version of DeepSpeed's names is xds.deepspeed"
    )

VERSION: str = import_module(".stand_in.release", __name__).VERSION
# Scripts compare it; they ignore the text after "+".
__version__ = f"{VERSION}+xds"
__git_hash__ = __git_branch__ = "unknown"
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))

_SOURCES = {
    "add_config_arguments": ".arguments",
    "DeepSpeedConfigError": ".runtime.config",
    "DeepSpeedDataLoader": ".runtime.dataloader",
    "DeepSpeedEngine": ".runtime.engine",
    "DeepSpeedOptimizer": ".runtime.optimizer",
    "get_accelerator": ".accelerator",
    "git_branch": ".git_version_info",
    "git_hash": ".git_version_info",
    "init_distributed": ".comm",
    "initialize": ".start",
    "log_dist": ".utils.logging",
    "PipelineModule": ".pipe",
    "logger": ".utils.logging",
    "tp_model_init": ".start",
}
_MODULES = (
    *("accelerator", "checkpointing", "comm", "elasticity", "ops", "pipe", "profiling", "runtime"),
    *("sequence", "utils", "zero"),
)

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name == "dist":
        return import_module(".comm", __name__)
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from .missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES, *_MODULES])


import_module(".stand_in.finders", __name__).install_table()
