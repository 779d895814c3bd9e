"""Makes DeepSpeed's modules out of the table in names.py, and lets `import deepspeed` find them.

    xds.deepspeed.runtime.engine      a view: its names are those of names.py, read from the files here
    deepspeed.runtime.engine          the same object, in a process that asks for it

`xds --as-deepspeed` and the variable XDS_AS_DEEPSPEED=1 ask. A file xds_as_deepspeed.pth in the environment's
site-packages calls `activate` at the start of every Python process where the variable is set. Elsewhere nothing
happens. An installed DeepSpeed is not touched; it is what `import deepspeed` finds in all other processes.

This file imports little, because it is imported before the script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, final

from . import names
from .names import ALIAS, VERSION

__version__ = f"{VERSION}+xds"  # scripts compare it; they ignore the text after "+"
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
__git_hash__ = __git_branch__ = "unknown"
VARIABLE = "XDS_AS_DEEPSPEED"
FILES = __package__  # xds.engine.deepspeed
PACKAGE = f"{FILES.partition('.')[0]}.{ALIAS}"  # xds.deepspeed


@final
class View(ModuleType):
    """A module of DeepSpeed: a listed name, then a module inside, then a stand-in that is refused when used."""

    def __getattr__(self, name: str) -> Any:
        inside = self.__name__.removeprefix(PACKAGE).removeprefix(".")
        if name == "__file__":
            return names.main_file(inside)
        if name == "__all__":
            return sorted(one for one in names.listed(inside) if not one.startswith("_"))
        where = names.listed(inside).get(name)
        if where is not None:
            return _read(where)
        if name.startswith("__"):  # Python and its libraries ask for these
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in names.modules_in(inside):
            return import_module(".".join(filter(None, (PACKAGE, inside, name))))
        from .missing import placeholder

        return placeholder(inside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A module inside does not hide a function of its name (`deepspeed.utils.z3_leaf_module`)."""
        inside = self.__name__.removeprefix(PACKAGE).removeprefix(".")
        if not (isinstance(value, View) and name in names.listed(inside)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        inside = self.__name__.removeprefix(PACKAGE).removeprefix(".")
        return sorted({*super().__dir__(), *names.listed(inside), *names.modules_in(inside)})


def _read(where: str) -> Any:
    """The value of "file:name" (".module:name": of a module elsewhere), or a module of DeepSpeed."""
    file, _, name = where.rpartition(":")
    if not file:
        return import_module(f"{PACKAGE}.{name}")
    return getattr(import_module(file[1:] if file.startswith(".") else f"{FILES}.{file}"), name)


@final
class _Loader:
    """Makes the views, and runs one as a script (`python -m deepspeed.env_report`)."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return View(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        inside = module.__name__.removeprefix(PACKAGE).removeprefix(".")
        module.__doc__ = f"`{f'{ALIAS}.{inside}'.removesuffix('.')}`, see docs/migration.md of xds."

    def get_code(self, fullname: str) -> CodeType:
        inside = fullname.removeprefix(PACKAGE).removeprefix(ALIAS).removeprefix(".")
        file, _, name = names.listed(inside).get("main", "").rpartition(":")
        if not file:
            raise ImportError(f"{fullname} is no script")
        return compile(f"from {FILES}.{file} import {name}\n{name}()", fullname, "exec")


_loader: Any = _Loader()


def spec_of(fullname: str) -> ModuleSpec | None:
    """The spec of `xds.deepspeed` or a module inside; None: DeepSpeed has no such module.

    Raises:
        ModuleNotFoundError: the same, with a reason.
    """
    inside = fullname.removeprefix(PACKAGE).removeprefix(".")
    if names.is_module(inside):
        return ModuleSpec(fullname, _loader, is_package=names.is_package(inside))
    from .missing import reason_of

    why = reason_of(inside)
    if why is None:
        return None
    text = f"No module named '{ALIAS}.{inside}': not covered by xds.deepspeed: {why}"
    raise ModuleNotFoundError(text, name=f"{ALIAS}.{inside}")


@final
class AliasFinder:
    """Finds `deepspeed` and `deepspeed.x`: the module objects of `xds.deepspeed` and `xds.deepspeed.x`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(f"{ALIAS}."):
            return None
        own = spec_of(PACKAGE + fullname.removeprefix(ALIAS))
        if own is None:
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

    def get_code(self, fullname: str) -> CodeType:
        return _Loader().get_code(fullname)

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """What `importlib.metadata.version("deepspeed")` finds."""
        name = getattr(context, "name", None)
        if name is None or name.lower() == ALIAS:
            from .accelerate import Standing, count_ranks_again, warn_of_ignored_plugin

            if name is not None:
                warn_of_ignored_plugin()
                count_ranks_again()
            yield Standing()


def is_asked_for() -> bool:
    """Whether this process's environment asks for the stand-in."""
    return os.environ.get(VARIABLE, "").lower() not in ("", "0", "false")


def activate() -> None:
    """Let `import deepspeed` find `xds.deepspeed`, also for importlib.metadata. A second call does nothing."""
    if not is_active():
        import atexit

        atexit.register(_at_exit)
        sys.meta_path.insert(0, AliasFinder())


def _at_exit() -> None:
    from .accelerate import warn_of_unused

    warn_of_unused()


def engine_was_made() -> None:
    """So this run does not end with the warning that it has not used the stand-in."""
    import atexit

    atexit.unregister(_at_exit)


def is_active() -> bool:
    """Whether `import deepspeed` finds `xds.deepspeed` in this process."""
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


__all__ = ["ALIAS", "VERSION", "activate", "is_active", "is_asked_for", "spec_of"]
