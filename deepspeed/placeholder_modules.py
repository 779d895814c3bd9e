"""DeepSpeed's modules without a counterpart in xds: a table, and the finder that creates them on import.

Every name in them is a placeholder, see missing.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

MODULES = (
    "linear",
    "moe",
    "moe.layer",
    "moe.utils",
    "profiling",
    "profiling.flops_profiler",
)
_PACKAGE = __package__ or ""
_NAMES = frozenset(f"{_PACKAGE}.{name}" for name in MODULES)


@final
class _Finder(MetaPathFinder, Loader):
    """Creates the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NAMES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        shown = module.__name__.removeprefix("xds.")
        module.__doc__ = f"`{shown}`: placeholders, see missing.py."
        vars(module)["__getattr__"] = partial(_name_of, module.__name__)


def _name_of(module: str, name: str) -> Any:
    if f"{module}.{name}" in _NAMES:
        return import_module(f"{module}.{name}")
    from .missing import placeholder

    return placeholder(module, name)


def install() -> None:
    """Let imports find the modules. A second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
