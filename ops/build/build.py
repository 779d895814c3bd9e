"""Builds native libraries on first use: one ninja run for each key of the cache, safe with concurrent builds.

    key -> in the cache and undamaged? -> load
        -> lock the key -> in the cache by now? -> load
                        -> compile in a temporary folder -> fsync, rename -> load

A process that is killed at any point leaves no lock and no incomplete library that could be loaded. The next
build removes its temporary folder. See `plan` for the key and build_cache.py for the locks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import final

from ...utils.errors import BuildError
from . import build_cache
from .build_cache import CachedLibrary, Info, KeyLock
from .compilers import (
    Compiler,
    Torch,
    arch_flags,
    environment_facts,
    find_cxx,
    find_libstdcxx,
    find_nvcc,
    find_torch,
)

# -- the plan: sources, the compile and link commands, and the key of the result --
# The key is a hash of everything that can change the result: the sources, every header in their folders, the
# commands, the compilers' versions, torch's version and stable ABI, libc, the machine type and the environment
# variables that compilers read. The CPU features are not part of the key. Code is compiled for the baseline of
# the machine type; the AVX2 and AVX-512 versions are separate objects, and the dispatcher calls one only after
# it has checked the CPU. So machines with different CPUs can share one cache folder, and no machine runs an
# instruction that it does not support. The sources follow two rules, which tests check: no flag contains
# `native`, and an object for AVX2 or AVX-512 defines no function that the linker could use for all machines.

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FORMAT = 1  # version of the cache's contents
HEADERS = (".h", ".hpp", ".cuh")
HOST_COMPILER = "host-c++"  # the program that nvcc calls where $CXX is more than a program
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # the stable ABI of torch 2.11
_ABOUT_ALL = ("-std=c++17", "-O3", TORCH_TARGET)
_SHARED_CODE = ("-fPIC", "-fvisibility=hidden")


@final
@dataclass(frozen=True)
class Source:
    """One object to compile from `path`, relative to the library's root. A file may give several objects."""

    path: str
    object_name: str
    flags: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        return self.path.endswith(".cu")


@final
@dataclass(frozen=True)
class Library:
    """A shared library. All headers in the folders of its sources are part of its key."""

    name: str
    device: str  # "cpu" or "cuda"
    sources: tuple[Source, ...]
    root: Path = CSRC


@final
@dataclass(frozen=True)
class BuildPlan:
    """How to build a library on this machine. Commands run in the folder of the objects.

    objects: object name to command. key: identifies this library and this way to build it.
    host: the words of the C++ compiler, which nvcc calls by the name `HOST_COMPILER` if there are several.
    needs: beginnings of the names of the libraries that must be loaded with it.
    """

    library: Library
    objects: dict[str, tuple[str, ...]]
    link: tuple[str, ...]
    host: tuple[str, ...]
    needs: tuple[str, ...]
    compiler: str
    key: str

    @property
    def file(self) -> str:
        return f"lib{self.library.name}.so"


def plan(library: Library, kept: Path) -> BuildPlan:
    """Plan how to build `library`. `kept` is the cache folder, which also stores the compilers' versions.

    Raises BuildError: a compiler, torch or a source is missing.
    """
    torch, cxx = find_torch(), find_cxx(kept)
    nvcc = find_nvcc(kept) if any(source.is_cuda for source in library.sources) else None
    objects = {
        source.object_name: _compile_command(library, source, torch, cxx, nvcc)
        for source in library.sources
    }
    torch_names = ("torch_cpu", "torch_cuda") if library.device == "cuda" else ("torch_cpu",)
    link = _link_command(library, tuple(objects), torch, torch_names, cxx, nvcc)
    facts = {
        "format": FORMAT,
        "library": [library.name, library.device],
        "commands": [
            _without_places(command, library, torch) for command in (*objects.values(), link)
        ],
        "files": _contents(library),
        "compilers": [each.identity for each in (cxx, nvcc) if each],
        "torch": [torch.version, torch.facts],
        "machine": [platform.system(), platform.machine(), _libc()],
        "variables": environment_facts(),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    needs = (*(f"lib{name}.so" for name in torch_names), "libstdc++.so")
    key = f"{library.name}-{digest}"
    return BuildPlan(library, objects, link, cxx.words, needs, (nvcc or cxx).version, key)


def ninja_file(plan: BuildPlan, *, is_linked: bool) -> str:
    """The text of build.ninja. Every build starts in an empty folder, so the inputs are not listed."""
    lines = ["ninja_required_version = 1.5", "rule run", "  command = $command"]
    steps = {f"{name}: run": command for name, command in plan.objects.items()}
    if is_linked:
        steps[f"{plan.file}: run {' '.join(plan.objects)}"] = plan.link
    for step, command in steps.items():
        lines += [f"build {step}", f"  command = {shlex.join(command).replace('$', '$$')}"]
    return "\n".join(lines) + "\n"


def _compile_command(
    library: Library, source: Source, torch: Torch, cxx: Compiler, nvcc: Compiler | None
) -> tuple[str, ...]:
    places = ("-I", str(library.root / Path(source.path).parent), "-isystem", str(torch.include))
    files = ("-c", str(library.root / source.path), "-o", source.object_name)
    if not source.is_cuda or nvcc is None:
        return (*cxx.words, *_ABOUT_ALL, *_SHARED_CODE, *source.flags, *places, *files)
    for_host = f"-Xcompiler={','.join(_SHARED_CODE)}"
    flags = (_host_flag(cxx), for_host, *arch_flags(nvcc), *source.flags)
    return (*nvcc.words, *_ABOUT_ALL, *flags, *places, *files)


def _host_flag(cxx: Compiler) -> str:
    """nvcc takes a program without arguments, but $CXX may be "ccache g++" or have flags."""
    return f"-ccbin={cxx.words[0] if len(cxx.words) == 1 else './' + HOST_COMPILER}"


def _link_command(
    library: Library,
    objects: tuple[str, ...],
    torch: Torch,
    torch_names: tuple[str, ...],
    cxx: Compiler,
    nvcc: Compiler | None,
) -> tuple[str, ...]:
    """Every library is needed, whatever the compiler's defaults are; see `why_refused` about others.

    The C++ runtime is the shared one that torch uses. It comes before a static one that the compiler may add
    at the end, from which then nothing is taken.
    """
    program = (*nvcc.words, _host_flag(cxx)) if nvcc else cxx.words
    # a missing symbol fails here, with its name, and not when the library is loaded
    strict = _for_linker("--no-undefined")
    runtime = find_libstdcxx()
    needed = (
        *_for_linker("--no-as-needed", *([str(runtime)] if runtime else [])),
        *("-L", str(torch.libraries), *(f"-l{name}" for name in torch_names)),
        *(() if runtime else ("-lstdc++",)),
    )
    return (*program, "-shared", "-o", f"lib{library.name}.so", *objects, *strict, *needed)


def _for_linker(*words: str) -> tuple[str, ...]:
    return tuple(part for word in words for part in ("-Xlinker", word))


def _without_places(command: tuple[str, ...], library: Library, torch: Torch) -> list[str]:
    """The command without absolute paths, equal in every checkout; the files there are hashed separately."""
    places = [(library.root, "CSRC"), (torch.include, "INCLUDE"), (torch.libraries, "LIB")]
    runtime = find_libstdcxx()
    if runtime:
        places.append((runtime.parent, "RUNTIME"))  # the name that is left has its release
    words = list(command)
    for place, name in places:
        words = [word.replace(str(place), name) for word in words]
    return words


def _contents(library: Library) -> dict[str, str]:
    """Checksums of the sources and of all headers in their folders, by path."""
    sources = {library.root / source.path for source in library.sources}
    headers = {
        path
        for folder in {path.parent for path in sources}
        for path in folder.glob("*")
        if path.suffix in HEADERS
    }
    try:
        return {
            str(path.relative_to(library.root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(sources | headers)
        }
    except OSError as error:
        raise BuildError(
            f"the source {error.filename} of the native library {library.name} cannot be read",
            remedy="reinstall xds",
        ) from error


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


# -- what a linked library needs: one in which an error of a kernel would end the process is refused --
# A linker may leave out a library that it was given (`--as-needed`), and a compiler may copy the C++ runtime
# into what it links (`-static-libstdc++`). Then two runtimes are in one process, and a stream of one fails in
# the other: an exception with a number in its text loses the text, or the process ends by a segmentation fault.

REMEDY = "remove options of the linker from CXX and NVCC_APPEND_FLAGS, or set CXX to another g++"
_DYNAMIC, _DYNSYM = 6, 11  # types of sections
_NEEDED = 1  # tag of an entry of the dynamic section
_GLOBAL = 1  # a symbol's binding: neither local nor weak, as templates are
_RUNTIME = ("__cxa_", "_ZNSt", "_ZNKSt", "_ZSt")  # names of the C++ runtime and of namespace std


@final
@dataclass(frozen=True)
class Linked:
    """needed: the libraries that are loaded with it. runtime: functions of the C++ runtime that it defines."""

    needed: tuple[str, ...]
    runtime: tuple[str, ...]


def read_linked(data: bytes) -> Linked:
    """Read a 64-bit ELF file. Raises ValueError: it is none, or it is damaged."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("it is not a 64-bit ELF file")
    try:
        return _read(data, "<" if data[5] == 1 else ">")
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"its sections cannot be read: {error}") from error


def why_refused(data: bytes, wanted: Sequence[str]) -> str:
    """Why a library with the contents `data` must not be used; "" if it may.

    wanted: beginnings of the names of libraries that it must need.
    """
    try:
        linked = read_linked(data)
    except ValueError as error:
        return str(error)
    missing = [name for name in wanted if not any(one.startswith(name) for one in linked.needed)]
    others = [one for one in linked.needed if one.startswith("libc++")]
    if missing:
        has = ", ".join(linked.needed) or "none"
        return f"it was linked without {' and '.join(missing)} (it needs {has})"
    if others:
        return f"it uses {' and '.join(others)}, and torch another C++ library, libstdc++"
    if linked.runtime:
        first = ", ".join(linked.runtime[:3])
        return (
            f"it holds a C++ runtime beside torch's ({len(linked.runtime)} functions: {first}, ...)"
        )
    return ""


def _read(data: bytes, order: str) -> Linked:
    start, _, _, _, _, size, count = struct.unpack_from(f"{order}QIHHHHH", data, 40)
    sections = [
        struct.unpack_from(f"{order}IIQQQQIIQQ", data, start + at * size) for at in range(count)
    ]

    def text(table: int, at: int) -> str:
        first = sections[table][4] + at
        return data[first : data.index(b"\0", first)].decode("utf-8", "replace")

    def entries(kind: int, layout: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        for section in sections:
            if section[1] == kind:
                content = data[section[4] : section[4] + section[5]]
                for entry in struct.iter_unpack(order + layout, content):
                    yield section[6], entry

    needed = [
        text(table, value) for table, (tag, value) in entries(_DYNAMIC, "qQ") if tag == _NEEDED
    ]
    symbols = [
        text(table, name)
        for table, (name, info, _, where, _, _) in entries(_DYNSYM, "IBBHQQ")
        if where != 0 and info >> 4 == _GLOBAL
    ]
    return Linked(tuple(needed), tuple(name for name in symbols if name.startswith(_RUNTIME)))


log = logging.getLogger("xds")
LAST_LINES = 20
_UNWANTED = ("NINJA_STATUS", "CLICOLOR_FORCE")  # they change what ninja prints


def build(library: Library) -> Path:
    """The path of the shared library, from the cache or built now. Raises BuildError: it cannot be built."""
    return find_or_build(library).path


def find(library: Library) -> CachedLibrary | None:
    """The library in the cache, or None. Raises BuildError: it could not be built on this machine either."""
    return _find(plan(library, build_cache.default_folder()))


def _find(planned: BuildPlan) -> CachedLibrary | None:
    for folder in build_cache.folders():
        entry = build_cache.read_entry(folder / planned.key)
        if entry is not None:
            return entry
    return None


def find_or_build(library: Library) -> CachedLibrary:
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


def _build_locked(planned: BuildPlan, folder: Path, lock: KeyLock) -> CachedLibrary:
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


def _build(planned: BuildPlan, folder: Path) -> CachedLibrary:
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


def _run_ninja(planned: BuildPlan, folder: Path, *, is_linked: bool) -> None:
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


def _failure(planned: BuildPlan, output: str, code: int) -> BuildError:
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


__all__ = [
    "BuildError",
    "Library",
    "Linked",
    "REMEDY",
    "Source",
    "build",
    "compile_objects",
    "find",
    "find_or_build",
    "read_linked",
    "why_refused",
]
