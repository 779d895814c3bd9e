"""`xds ops`: builds the native libraries ahead of time, lists them, cleans their cache; no devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..ops import libraries
from ..ops.build import build, build_cache
from ..ops.build.plan import Library
from ..utils.errors import BuildError, UsageError
from ..utils.sizes import size_text
from .command_line.parser import Parser

DONE, FAILED, USAGE = 0, 1, 2
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str]) -> int:
    """Run one command. 0; 1: a library cannot be built, and stderr says why; 2: it cannot be asked so."""
    asked = _parser().parse_args(list(argv))
    try:
        code: int = asked.run(asked)
        return code
    except (UsageError, BuildError, OSError) as error:
        print(f"xds ops {asked.command}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds ops",
        description="Native ops are compiled on first use; here that is done ahead of time.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    building = _command(commands, "build", _build, "Compile libraries that are not in the cache")
    known = ", ".join(libraries.LIBRARIES)
    building.add_argument("names", nargs="*", metavar="name", help=f"of {known} (default: all)")
    _command(commands, "list", _list, "Which libraries there are, which are built, and where")
    cleaning = _command(commands, "clean", _clean, "Remove libraries that nothing here would load")
    cleaning.add_argument("--all", action="store_true", help="also those that are up to date")
    return parser


def _command(commands: Any, name: str, run: Run, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help}.")
    parser.set_defaults(run=run)
    return parser


# -- build --------------------------------------------------------------------------------------------------


def _build(asked: argparse.Namespace) -> int:
    """What is named must be built; of all, CUDA libraries are left out where there is no CUDA."""
    wanted = [_named(name) for name in asked.names] or list(libraries.LIBRARIES.values())
    code = DONE
    for library in wanted:
        reason = libraries.why_not(library)
        if reason and not asked.names:
            print(f"{library.name}: left out: {reason}", flush=True)
        else:
            code = max(code, _build_one(library))
    return code


def _named(name: str) -> Library:
    if name not in libraries.LIBRARIES:
        raise UsageError(f"{name} is no native library; there are {', '.join(libraries.LIBRARIES)}")
    return libraries.LIBRARIES[name]


def _build_one(library: Library) -> int:
    try:
        libraries.check(library)
        entry = build.find(library)
        if entry is not None:
            print(f"{library.name}: built before, {entry.path}", flush=True)
            return DONE
        entry = build.find_or_build(library)
    except BuildError as error:
        print(f"{library.name}: {error}", file=sys.stderr, flush=True)
        return FAILED
    print(f"{library.name}: built in {entry.info.seconds:.1f} s, {entry.path}", flush=True)
    return DONE


# -- list ---------------------------------------------------------------------------------------------------


def _list(asked: argparse.Namespace) -> int:
    print(f"cache: {build_cache.default_folder()}")
    for library in libraries.LIBRARIES.values():
        lines = list(_facts(library))
        print(f"{library.name} ({library.device}): {lines[0]}")
        for line in lines[1:]:
            print(f"  {line}")
    return DONE


def _facts(library: Library) -> Iterator[str]:
    reason = libraries.why_not(library)
    try:
        entry = build.find(library) if not reason else None
    except BuildError as error:
        entry, reason = None, error.what
    if entry is None:
        yield f"cannot be built here: {reason}" if reason else "not built"
        return
    info = entry.info
    yield f"built {info.built_at} in {info.seconds:.1f} s, {size_text(info.size_bytes)}"
    yield info.compiler
    yield str(entry.path)


# -- clean --------------------------------------------------------------------------------------------------


def _clean(asked: argparse.Namespace) -> int:
    """Libraries of older versions, compilers and flags, and what killed builds left; never one in use."""
    current = set() if asked.all else {entry.folder for entry in _current()}
    num_removed = 0
    for folder in build_cache.folders():
        for path in build_cache.keys(folder):
            if path in current:
                continue
            is_library = path.exists()  # else the lock of one that could not be built
            if build_cache.remove(path):
                num_removed += is_library
                print(f"removed {path}\n" * is_library, end="")
            else:
                print(f"kept {path}: a process uses it, or it is not yours to remove")
        build_cache.sweep(folder)
    print(f"{num_removed} removed")
    return DONE


def _current() -> Iterator[build_cache.Entry]:
    for library in libraries.LIBRARIES.values():
        try:
            entry = build.find(library)
        except BuildError:  # nothing can be built here, so nothing is up to date
            continue
        if entry is not None:
            yield entry
