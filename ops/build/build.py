"""Builds native libraries on first use: one ninja run for each key of the cache, safe with concurrent builds.

    key -> in the cache and undamaged? -> load
        -> lock the key -> in the cache by now? -> load
                        -> compile in a temporary folder -> fsync, rename -> load

A process that is killed at any point leaves no lock and no incomplete library that could be loaded. The next
build removes its temporary folder. See plan.py for the key and cache.py for the locks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

from ...utils.errors import BuildError
from . import build_cache
from .build_cache import Entry, Info, KeyLock
from .linked import REMEDY, why_refused
from .plan import HOST_COMPILER, Library, Plan, Source, ninja_file, plan

__all__ = ["BuildError", "Library", "Source", "build", "compile_objects", "find", "find_or_build"]

log = logging.getLogger("xds")
LAST_LINES = 20
_UNWANTED = ("NINJA_STATUS", "CLICOLOR_FORCE")  # they change what ninja prints


def build(library: Library) -> Path:
    """The path of the shared library, from the cache or built now. Raises BuildError: it cannot be built."""
    return find_or_build(library).path


def find(library: Library) -> Entry | None:
    """The library in the cache, or None. Raises BuildError: it could not be built on this machine either."""
    return _find(plan(library, build_cache.default_folder()))


def _find(planned: Plan) -> Entry | None:
    for folder in build_cache.folders():
        entry = build_cache.read_entry(folder / planned.key)
        if entry is not None:
            return entry
    return None


def find_or_build(library: Library) -> Entry:
    """Like `build`, but returns the cache entry. Of several processes that call this at once, one builds."""
    planned = plan(library, build_cache.default_folder())
    entry = _find(planned)
    if entry is not None:
        return entry
    folder = build_cache.writable_folder()
    try:
        with build_cache.locked(folder, planned.key) as lock:
            return _build_locked(planned, folder, lock)
    except OSError as error:  # the disk is full, another process removed the folder, ...
        raise BuildError(
            f"the native library {library.name} cannot be built in {folder}: {error}",
            remedy=f"free disk space, or set {build_cache.FOLDER_VARIABLE} to another folder",
        ) from error


def _build_locked(planned: Plan, folder: Path, lock: KeyLock) -> Entry:
    """Look again, then build: while this process waited, another one may have built it or failed to."""
    entry = build_cache.read_entry(folder / planned.key)
    if entry is not None:
        return entry
    failure = lock.failure()
    if failure is not None:
        raise failure
    try:
        return _build(planned, folder)
    except BuildError as error:
        lock.record_failure(error)
        raise
    finally:
        build_cache.sweep(folder)


def compile_objects(library: Library, folder: Path) -> list[Path]:
    """Compile every source into `folder` without linking, for machines without the device or its torch build.

    Raises BuildError: a compiler is missing, or a source does not compile.
    """
    planned = plan(library, build_cache.default_folder())
    _run_ninja(planned, folder, is_linked=False)
    return [folder / name for name in planned.objects]


def _build(planned: Plan, folder: Path) -> Entry:
    log.info("compiling %s (once, about 20 s)", planned.library.name)
    start = time.perf_counter()
    with build_cache.temporary(folder, planned.key) as path:
        _run_ninja(planned, path, is_linked=True)
        data = (path / planned.file).read_bytes()
        reason = why_refused(data, planned.needs)
        if reason:  # an error of a kernel would end the process
            what = f"the native library {planned.library.name} is not used: {reason}"
            raise BuildError(what, shlex.join(planned.link), remedy=REMEDY)
        for leftover in path.iterdir():
            if leftover.name != planned.file:
                build_cache.discard(leftover)
        info = Info(
            key=planned.key,
            name=planned.library.name,
            device=planned.library.device,
            file=planned.file,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            seconds=round(time.perf_counter() - start, 3),
            compiler=planned.compiler,
            built_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        entry = build_cache.commit(path, folder, info)
    log.info("compiled %s in %.1f s", info.name, info.seconds)
    return entry


def _run_ninja(planned: Plan, folder: Path, *, is_linked: bool) -> None:
    """Run ninja in `folder` with relative names, so that an orphaned process cannot write to other folders."""
    (folder / "build.ninja").write_text(ninja_file(planned, is_linked=is_linked))
    (folder / "tmp").mkdir(exist_ok=True)
    if len(planned.host) > 1:
        (folder / HOST_COMPILER).write_text(f'#!/bin/sh\nexec {shlex.join(planned.host)} "$@"\n')
        (folder / HOST_COMPILER).chmod(0o755)
    environment = {name: text for name, text in os.environ.items() if name not in _UNWANTED}
    # compilers that are killed leave temporary files; here they are removed together with the folder
    environment |= {"LC_ALL": "C", "TMPDIR": str(folder / "tmp")}
    command = [_find_ninja(), f"-j{_num_cores()}"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            process.terminate()  # it ends its compilers before itself
            raise
    if process.returncode:
        raise _failure(planned, output.decode("utf-8", "replace"), process.returncode)


def _failure(planned: Plan, output: str, code: int) -> BuildError:
    what = f"the native library {planned.library.name} does not compile"
    commands = {**planned.objects, planned.file: planned.link}
    found = re.search(r"(?m)^FAILED: .*?(\S+) *$", output)
    if found is None or found[1] not in commands:
        what = f"ninja failed with exit code {code} for the native library {planned.library.name}"
        return BuildError(what, "ninja", output.splitlines()[-LAST_LINES:], "repair ninja")
    lines = output[found.end() :].strip("\n").splitlines()[1:]  # the first is the command
    lines = [line for line in lines if not line.startswith("ninja: ")]
    remedy = "install a newer compiler, or send these lines to the authors"
    if "No space left on device" in output:
        remedy = f"free disk space, or set {build_cache.FOLDER_VARIABLE} to another folder"
    return BuildError(what, shlex.join(commands[found[1]]), lines[-LAST_LINES:], remedy)


def _find_ninja() -> str:
    """The ninja of the Python package `ninja`, else the one on PATH."""
    try:
        beside = Path(str(import_module("ninja").BIN_DIR), "ninja")
    except (ImportError, AttributeError):
        beside = Path()
    path = str(beside) if os.access(beside, os.X_OK) and beside.is_file() else shutil.which("ninja")
    if path is None:
        raise BuildError("no ninja on PATH", remedy="`pip install ninja`")
    return path


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
