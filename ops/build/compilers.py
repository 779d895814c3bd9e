"""Finds the compilers of native ops and the facts about them that identify a built library.

Reading a compiler's version starts a process, so the version is kept in the cache folder under the program's
path, size and modification time. A library that is already built is found without starting a process.
The version of wrappers (scripts, ccache) is read once per process: the compiler that they call may change.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import final

from ...utils.errors import BuildError
from ...utils.small_files import replace_small_file
from ...utils.trust import make_folders, why_not_trusted

CUDA_FOLDER = Path("/usr/local/cuda")
ARCHS_VARIABLE = "XDS_CUDA_ARCHS"
USUAL_ARCHS = (("80", (11, 0)), ("90", (11, 8)), ("100", (12, 8)))  # with the lowest nvcc release
MAX_VERSION_SECONDS = 60.0
# environment variables that compilers read besides their command line
VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH"),
    *("GCC_EXEC_PREFIX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"),
)
_COMPILER = re.compile(r"(.*-)?(g\+\+|gcc|c\+\+|clang\+\+|clang|nvcc|icpx)(-[\d.]+)?")


@final
@dataclass(frozen=True)
class Compiler:
    """The command of a compiler, and its version in one line."""

    words: tuple[str, ...]
    version: str

    @property
    def identity(self) -> str:
        return f"{shlex.join(self.words)}: {self.version}"


@final
@dataclass(frozen=True)
class Torch:
    """The torch installation that libraries are built for, read from its files without importing it.

    facts: a hash of its version and of the headers of the stable ABI.
    cuda: the CUDA release that it was built with; "" for a CPU build.
    """

    include: Path
    libraries: Path
    version: str
    cuda: str
    facts: str


def find_cxx(kept: Path) -> Compiler:
    """The C++ compiler: $CXX, else c++, g++ or clang++ on PATH. `kept` is the cache folder.

    Raises BuildError: there is none, or it does not work.
    """
    asked = os.environ.get("CXX", "")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        words = shlex.split(name)
        path = shutil.which(words[0]) if words else None
        if path:
            return Compiler((path, *words[1:]), _version((path, *words[1:]), kept))
    raise BuildError(
        f"no C++ compiler: CXX = {asked!r} is not a program"
        if asked
        else "no C++ compiler on PATH",
        remedy="install g++ (from version 9), or set CXX to a compiler",
    )


def find_nvcc(kept: Path) -> Compiler:
    """The CUDA compiler: in $CUDA_HOME, else on PATH, else in /usr/local/cuda.

    Raises BuildError: there is none, or it does not work.
    """
    home = os.environ.get("CUDA_HOME", "")
    beside = str(CUDA_FOLDER / "bin" / "nvcc")
    places = [os.path.join(home, "bin", "nvcc")] if home else ["nvcc", beside]
    for place in places:
        path = shutil.which(place)
        if path:
            return Compiler((path,), _version((path,), kept))
    raise BuildError(
        f"no CUDA compiler: CUDA_HOME = {home!r} has no bin/nvcc" if home else "no nvcc on PATH",
        remedy="install the CUDA toolkit that torch was built with, or set CUDA_HOME to its folder",
    )


def release(nvcc: Compiler) -> tuple[int, int]:
    """The CUDA release of an nvcc; (0, 0) where its version text does not contain one."""
    found = re.search(r"release (\d+)\.(\d+)", nvcc.version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def architectures(nvcc: Compiler) -> list[str]:
    """The GPU architectures to compile for: $XDS_CUDA_ARCHS, else the usual ones that this nvcc supports.

    Raises BuildError: $XDS_CUDA_ARCHS is not a list of architectures.
    """
    asked = os.environ.get(ARCHS_VARIABLE, "")
    archs = re.split(r"[\s,;]+", asked.strip().replace(".", "")) if asked.strip() else []
    if not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        raise BuildError(
            f"{ARCHS_VARIABLE} = {asked!r} is not a list of architectures", remedy='write "80 90"'
        )
    return archs or [arch for arch, needed in USUAL_ARCHS if release(nvcc) >= needed] or ["80"]


def arch_flags(nvcc: Compiler) -> tuple[str, ...]:
    """Flags for machine code of each architecture, and for PTX of the newest one, for future GPUs."""
    archs = architectures(nvcc)
    newest = max(archs, key=_number)
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return (*codes, f"-gencode=arch=compute_{newest},code=compute_{newest}")


def runs_on(archs: list[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability can run the code: machine code of its generation, or PTX."""
    number = capability[0] * 10 + capability[1]
    has_code = any(_number(a) // 10 == capability[0] and _number(a) <= number for a in archs)
    return has_code or max(map(_number, archs)) <= number


def _number(arch: str) -> int:
    return int(arch.rstrip("af"))


def environment_facts() -> dict[str, str]:
    """The environment variables that change what a compiler does."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


@cache
def find_torch() -> Torch:
    """Where torch's headers and libraries are. Raises BuildError: torch is not installed."""
    spec = find_spec("torch")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise BuildError("torch is not installed", remedy="install torch")
    root = Path(places[0])
    text = (root / "version.py").read_text()
    include = root / "include"
    parts = [text.encode(), *(path.read_bytes() for path in _abi_headers(include))]
    return Torch(
        include,
        root / "lib",
        _assigned("__version__", text),
        _assigned("cuda", text),
        hashlib.sha256(b"\0".join(parts)).hexdigest()[:16],
    )


@cache
def find_libstdcxx() -> Path | None:
    """The shared C++ runtime that this process and its torch use; None: the loader finds none by name."""
    place = _Place()
    try:
        throws = ctypes.cast(ctypes.CDLL("libstdc++.so.6").__cxa_throw, ctypes.c_void_p)
        found = ctypes.CDLL(None).dladdr(throws, ctypes.byref(place))
    except (OSError, AttributeError):
        return None
    return Path(os.path.realpath(os.fsdecode(place.file))) if found else None


class _Place(ctypes.Structure):
    """The result of dladdr: the file of a function, and more."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _abi_headers(include: Path) -> Iterator[Path]:
    csrc = include / "torch" / "csrc"
    yield from sorted((csrc / "stable").rglob("*.h"))
    yield from sorted((csrc / "inductor" / "aoti_torch" / "c").glob("*.h"))
    yield from (include / "torch" / "headeronly").glob("version.h")


def _assigned(name: str, text: str) -> str:
    found = re.search(rf"(?m)^{name}\b[^=\n]*=\s*'([^']*)'", text)
    return found[1] if found else ""


def _version(words: tuple[str, ...], kept: Path) -> str:
    real = Path(os.path.realpath(words[0]))
    if not _is_plain(real):
        return _ask(words)
    status = real.stat()
    name = f"{shlex.join(words)}|{real}|{status.st_size}|{status.st_mtime_ns}"
    file = kept / "compilers.json"
    known = _read(file)
    if name not in known:
        known = {**known, name: _ask(words)}
        _keep(file, known)
    return known[name]


def _is_plain(path: Path) -> bool:
    """Whether it is the compiler itself, not a script or ccache with a compiler's name."""
    if not _COMPILER.fullmatch(path.name):
        return False
    with path.open("rb") as file:
        return file.read(2) != b"#!"


@cache
def _ask(words: tuple[str, ...]) -> str:
    """The line of `--version` that names the release, for gcc, clang and nvcc."""
    command = [*words, "--version"]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=MAX_VERSION_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stdout", None) or b""
        lines = output.decode("utf-8", "replace").splitlines() or [str(error)]
        raise BuildError(
            f"{words[0]} does not work", shlex.join(command), lines, "repair or replace it"
        ) from error
    lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line]
    named = [line for line in lines if "release" in line and "Cuda" in line]
    return (named or lines or ["unknown"])[0]


def _read(file: Path) -> dict[str, str]:
    if why_not_trusted(file):
        return {}
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _keep(file: Path, known: dict[str, str]) -> None:
    """Write the versions, if the folder is writable. Of two writers the later one wins."""
    with suppress(OSError):
        make_folders(file.parent)
        if not why_not_trusted(file.parent):
            replace_small_file(file, json.dumps(known, indent=1))
