"""Finders for imports: DeepSpeed's modules that have no file here, and the package name `deepspeed`.

They are plain objects: importlib.abc would take longer to import than all of this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

from .release import ALIAS

PACKAGE = __package__.rpartition(".")[0]  # xds.deepspeed


@final
class TableFinder:
    """Creates modules of the table of names: `xds.deepspeed.inference.v2`. Files win, see `install_table`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        from .names import modules

        inside = fullname.removeprefix(f"{PACKAGE}.")
        if inside not in modules():
            _say_why(inside)
            return None
        return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from ..missing import placeholder

        shown = module.__name__.removeprefix(f"{PACKAGE.rpartition('.')[0]}.")
        module.__doc__ = (
            f"`{shown}`: xds has no such module; its names can be imported, see missing.py."
        )
        vars(module)["__getattr__"] = partial(placeholder, module.__name__)
        vars(module)["__dir__"] = partial(_names_in, module.__name__)


@final
class AliasFinder:
    """Finds `deepspeed` and `deepspeed.x`: the module objects of `xds.deepspeed` and `xds.deepspeed.x`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(f"{ALIAS}."):
            return None
        inside = fullname.removeprefix(ALIAS)
        own = _own_spec(PACKAGE + inside)
        if own is None:
            _say_why(inside.removeprefix("."))
            return None
        spec = ModuleSpec(fullname, self, origin=own.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = own.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(PACKAGE + spec.name.removeprefix(ALIAS))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name. importlib has set the alias's spec, which is undone here."""
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """What `importlib.metadata.version("deepspeed")` finds."""
        name = getattr(context, "name", None)
        if name is None or name.lower() == ALIAS:
            from .distribution import Standing
            from .early_state import count_ranks_again
            from .ignored_plugin import warn_of_ignored_plugin

            if name is not None:
                warn_of_ignored_plugin()
                count_ranks_again()
            yield Standing()


def _say_why(inside: str) -> None:
    """Raise ModuleNotFoundError with the reason, if there is one, for a module that neither side has."""
    from ..missing import missing_module

    why = missing_module(inside)
    if why is not None:
        text = f"No module named '{ALIAS}.{inside}': not covered by xds.deepspeed: {why}"
        raise ModuleNotFoundError(text, name=f"{ALIAS}.{inside}")


def _own_spec(fullname: str) -> ModuleSpec | None:
    from importlib.util import find_spec

    try:
        return find_spec(fullname)
    except ModuleNotFoundError:  # a parent is missing
        return None


def _names_in(module: str) -> list[str]:
    from .names import names_of

    return sorted([*vars(sys.modules[module]), *names_of(module.removeprefix(f"{PACKAGE}."))])


def install_table() -> None:
    """Let imports find the modules of the table, after all files. A second call does nothing."""
    if not any(isinstance(finder, TableFinder) for finder in sys.meta_path):
        sys.meta_path.append(TableFinder())


def install_alias() -> None:
    """Let imports find `deepspeed`, before all files. A second call does nothing."""
    if not is_alias_installed():
        sys.meta_path.insert(0, AliasFinder())


def is_alias_installed() -> bool:
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)
