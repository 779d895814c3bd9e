"""Helper for tests of the build: libraries of a few lines, compilers that do other things than asked."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from xds.ops.build.build import Library, Source
from xds.ops.build.compilers import Torch

SOURCE = """#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER + MORE; }
"""
BROKEN = "\n".join(f"unknown_{number} x;" for number in range(40))
SLOW = "XDS_TEST_SLOW"  # the compiler waits as long as this file is there
WRAPPER = """#!/bin/sh
printf '%s\\n' "$*" >> "{log}"
if [ "$*" = --version ]; then echo "{version}"; exit 0; fi
tries=0
while [ -n "${slow}" ] && [ -e "${slow}" ] && [ $tries -lt 600 ]; do
    sleep 0.05; tries=$((tries + 1))
done
exec "{compiler}" "$@"
"""
BUILD = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from xds.utils.errors import BuildError
from native_sources import library
from xds.ops.build.build import build
try:
    print(build(library(sys.argv[1])))
except BuildError as error:
    sys.exit(str(error))
"""


def library(folder: Path | str, flag: str = "-DMORE=0") -> Library:
    """One source and one header in `folder`."""
    return Library(
        "tiny", "cpu", (Source("cpu/answer.cpp", "answer.o", (flag,)),), root=Path(folder)
    )


def write_sources(folder: Path, answer: int = 42) -> Path:
    (folder / "cpu").mkdir(parents=True, exist_ok=True)
    (folder / "cpu" / "answer.cpp").write_text(SOURCE)
    (folder / "cpu" / "answer.h").write_text(f"#define ANSWER {answer}\n")
    return folder


def write_compiler(folder: Path, version: str = "c++ 1.0") -> Path:
    """A compiler that logs each call to `calls` beside it, and then is the real one."""
    folder.mkdir(exist_ok=True)
    path = folder / "logged-c++"
    real = shutil.which("c++")
    path.write_text(
        WRAPPER.format(log=folder / "calls", version=version, compiler=real, slow="{" + SLOW + "}")
    )
    path.chmod(0o755)
    return path


STREAMS = """extern "C" int aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}
"""


def with_libtorch_cuda(torch: Torch, folder: Path) -> Torch:
    """`torch` with a libtorch_cuda in `folder`, which has what kernels take from it."""
    link_stub(folder, "libtorch_cuda.so", STREAMS)
    (folder / "libtorch_cpu.so").symlink_to(torch.libraries / "libtorch_cpu.so")
    return dataclasses.replace(torch, libraries=folder)


def link_stub(folder: Path, name: str, source: str = "") -> None:
    """A shared library of another's name in `folder`, with the functions of `source`."""
    folder.mkdir()
    (folder / "stub.cpp").write_text(source)
    command = ["c++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "stub.cpp", "-o", name]
    subprocess.run(command, cwd=folder, check=True)


CHANGING = """#!/bin/bash
words=()
for word; do case "$word" in {cases} esac; words+=("$word"); done
exec {compiler} "${{words[@]}}" {last}
"""


def write_changing_compiler(folder: Path, replaced: dict[str, str], last: str = "") -> Path:
    """A compiler that replaces some words of its command, given by their patterns, and adds `last`."""
    path = folder / "changing-c++"
    cases = " ".join(f"{pattern}) word={word!r};;" for pattern, word in replaced.items())
    path.write_text(CHANGING.format(cases=cases, compiler=shutil.which("c++"), last=last))
    path.chmod(0o755)
    return path


def num_compiled(folder: Path) -> int:
    """How often the logged compiler has compiled a source."""
    try:
        lines = (folder / "calls").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum(" -c " in line for line in lines)


def start_build(sources: Path, **variables: str) -> subprocess.Popen[str]:
    """A process, in a session of its own, that builds the library of `sources` and prints its path."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(sources)],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        start_new_session=True,
        **settings,
    )
