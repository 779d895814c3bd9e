"""`xds ops`: builds the native libraries ahead of time, lists them, cleans their cache. Uses no device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..ops import libraries
from ..ops.build import build, build_cache
from ..ops.build.build import Library
from ..utils.errors import BuildError, UsageError
from ..utils.quoting import escaped
from ..utils.sizes import size_text
from .command_line.options import Parser

DONE, FAILED, USAGE = 0, 1, 2
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns 0, 1 if a library cannot be built (see stderr), or 2 for wrong arguments."""
    args = _parser().parse_args(list(argv))
    try:
        code: int = args.run(args)
        return code
    except BrokenPipeError:
        raise
    except (UsageError, BuildError, OSError) as error:
        print(f"xds ops {args.command}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds ops",
        description="Native ops are compiled on first use. These commands compile them ahead of time.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    building = _command(commands, "build", _build, "Compile libraries that are not in the cache")
    known = ", ".join(libraries.LIBRARIES)
    building.add_argument(
        "names", nargs="*", metavar="name", help=f"one or more of {known} (default: all)"
    )
    _command(commands, "list", _list, "List the libraries, whether they are built, and where")
    cleaning = _command(
        commands, "clean", _clean, "Remove libraries that this installation does not load"
    )
    cleaning.add_argument(
        "--all", action="store_true", help="also remove those that are up to date"
    )
    return parser


def _command(commands: Any, name: str, run: Run, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help}.")
    parser.set_defaults(run=run)
    return parser


# -- build --------------------------------------------------------------------------------------------------


def _build(args: argparse.Namespace) -> int:
    """Build the named libraries. Without names build all, and skip those that cannot be built here."""
    wanted = [_named(name) for name in args.names] or list(libraries.LIBRARIES.values())
    code = DONE
    for library in wanted:
        reason = libraries.why_not(library)
        if reason and not args.names:
            print(f"{library.name}: left out: {reason}", flush=True)
        else:
            code = max(code, _build_one(library))
    return code


def _named(name: str) -> Library:
    if name not in libraries.LIBRARIES:
        known = ", ".join(libraries.LIBRARIES)
        raise UsageError(f"{name} is not a native library; must be one of {known}")
    return libraries.LIBRARIES[name]


def _build_one(library: Library) -> int:
    try:
        libraries.check(library)
        entry = build.find(library)
        if entry is not None:
            print(f"{library.name}: built before, {escaped(str(entry.path))}", flush=True)
            return DONE
        entry = build.find_or_build(library)
    except BuildError as error:
        print(f"{library.name}: {error}", file=sys.stderr, flush=True)
        return FAILED
    print(
        f"{library.name}: built in {entry.info.seconds:.1f} s, {escaped(str(entry.path))}",
        flush=True,
    )
    return DONE


# -- list ---------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    print(f"cache: {escaped(str(build_cache.default_folder()))}")
    for library in libraries.LIBRARIES.values():
        lines = list(_facts(library))
        print(f"{library.name} ({library.device}): {lines[0]}")
        for line in lines[1:]:
            print(f"  {escaped(line)}")
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


def _clean(args: argparse.Namespace) -> int:
    """Remove libraries of other versions, compilers and flags, and files of killed builds. Skip used ones."""
    current = set() if args.all else {entry.folder for entry in _current()}
    num_removed = 0
    for folder in build_cache.folders():
        for path in build_cache.keys(folder):
            if path in current:
                continue
            is_library = path.exists()  # otherwise it is the lock of a failed build
            if build_cache.remove(path):
                num_removed += is_library
                print(f"removed {escaped(str(path))}\n" * is_library, end="")
            else:
                print(
                    f"kept {escaped(str(path))}: a process uses it, or you have no permission to remove it"
                )
        build_cache.sweep(folder)
    print(f"{num_removed} removed")
    return DONE


def _current() -> Iterator[build_cache.CachedLibrary]:
    for library in libraries.LIBRARIES.values():
        try:
            entry = build.find(library)
        except BuildError:  # nothing can be built here, so nothing is up to date
            continue
        if entry is not None:
            yield entry
