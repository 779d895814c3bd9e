"""Plans the build of a native library: its sources, the compile and link commands, and the key of the result.

The key is a hash of everything that can change the result: the sources, every header in their folders, the
commands, the compilers' versions, torch's version and stable ABI, libc, the machine type and the environment
variables that compilers read. The CPU features are not part of the key. Code is compiled for the baseline of
the machine type; the AVX2 and AVX-512 versions are separate objects, and the dispatcher calls one only after
it has checked the CPU. So machines with different CPUs can share one cache folder, and no machine runs an
instruction that it does not support. The sources follow two rules, which tests check: no flag contains
`native`, and an object for AVX2 or AVX-512 defines no function that the linker could use for all machines.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ...utils.errors import BuildError
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
class Plan:
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


def plan(library: Library, kept: Path) -> Plan:
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
    return Plan(library, objects, link, cxx.words, needs, (nvcc or cxx).version, key)


def ninja_file(plan: Plan, *, is_linked: bool) -> str:
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
    """Every library is needed, whatever the compiler's defaults are; see linked.py for what happens without.

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
