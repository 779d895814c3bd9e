"""Tests of linking: with every tool chain a library has what it needs, and errors of kernels are exceptions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import native_sources as tiny
import pytest
import torch

from xds.ops.build import build
from xds.ops.build import compilers as build_compilers
from xds.ops.build.build import Library, Source, read_linked
from xds.utils.errors import BuildError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a C++ compiler"
)

SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

void fail(torch::stable::Tensor tensor, int64_t number) {
  void* stream = nullptr;
  if (number < 0) TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(0, &stream));
  STD_TORCH_CHECK(false, "number ", number, " of ", 2.5, " after all");
}

STABLE_TORCH_LIBRARY_FRAGMENT(linking, m) { m.def("fail(Tensor tensor, int number) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(linking, CPU, m) { m.impl("fail", TORCH_BOX(&fail)); }
"""
SHORT = """
#include <string>
extern "C" int aoti_torch_get_current_cuda_stream(int, void**);
extern "C" int fail(int number) {
  void* stream = nullptr;
  if (number < 0) return aoti_torch_get_current_cuda_stream(0, &stream);
  throw std::to_string(number);
}
"""
FAIL = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
torch.ops.load_library(sys.argv[2])
try:
    torch.ops.linking.fail(torch.zeros(1), 1234567)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDS_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def failing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library for CUDA, which is compiled without nvcc and linked with a libtorch_cuda of the test."""
    found = tiny.with_libtorch_cuda(build_compilers.find_torch(), tmp_path / "torch")
    monkeypatch.setattr(build, "find_torch", lambda: found)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "fail.cpp").write_text(SOURCE)
    return Library("failing", "cuda", (Source("fail.cpp", "fail.o"),), root=tmp_path / "csrc")


@pytest.fixture
def short(failing: Library) -> Library:
    """The same without torch's headers, which take seconds to compile."""
    (failing.root / "fail.cpp").write_text(SHORT)
    return failing


@pytest.mark.slow  # torch's headers take seconds to compile
def test_an_error_is_a_python_exception_and_a_missing_function_fails_the_load(
    failing: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With options that break libraries. A missing function would otherwise end the process in a kernel."""
    monkeypatch.setenv("CXX", "c++ -static-libstdc++ -static-libgcc")
    path = build.build(failing)
    needed = read_linked(path.read_bytes()).needed
    assert {"libtorch_cpu.so", "libtorch_cuda.so", "libstdc++.so.6"} <= set(needed)
    if shutil.which("readelf"):
        lines = subprocess.check_output(["readelf", "-dW", path], text=True).splitlines()
        shown = [line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line]
        assert shown == list(needed)
    tiny.link_stub(tmp_path / "older", "libtorch_cuda.so")
    command = [sys.executable, "-c", FAIL]
    both = [
        subprocess.Popen(
            [*command, str(tmp_path / folder / "libtorch_cuda.so"), str(path)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        )
        for folder in ("torch", "older")
    ]
    (out, said), (_, refused) = (process.communicate() for process in both)
    assert "number 1234567 of 2.5 after all" in out, said[-2000:]
    if torch.version.cuda is None:  # else this torch has a libtorch_cuda of its own
        assert "OSError" in refused and "aoti_torch_get_current_cuda_stream" in refused


def test_the_runtime_of_this_process_is_linked_by_its_file(
    short: Library, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    runtime = build_compilers.find_libstdcxx()
    assert runtime is not None and str(runtime) in build.plan(short, cache).link
    monkeypatch.setattr(build, "find_libstdcxx", lambda: None)
    assert build.plan(short, cache).link[-1] == "-lstdc++"


@pytest.mark.parametrize(
    "replaced, last, complaint",
    [
        (
            {"-ltorch_cuda": "-ltorch_cpu", "--no-undefined": "--no-as-needed"},
            "",
            "without libtorch_cuda.so",
        ),
        ({"*/libstdc++.so*": "--no-as-needed"}, "-static-libstdc++", "without libstdc"),
        (
            {},
            "-Wl,--whole-archive -l:libstdc++.a -Wl,--no-whole-archive",
            "a C.. runtime beside torch's .[0-9]+ functions: .*_",
        ),
        ({}, "-L{folder} -l:libc++.so.1", "it uses libc...so.1, and torch another"),
    ],
    ids=["no libtorch_cuda", "no libstdc++", "two of libstdc++", "libc++"],
)
def test_what_would_crash_is_refused_when_it_is_built(
    short: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replaced: dict[str, str],
    last: str,
    complaint: str,
) -> None:
    tiny.link_stub(tmp_path / "other", "libc++.so.1")
    last = last.format(folder=tmp_path / "other")
    compiler = tiny.write_changing_compiler(tmp_path, replaced, last)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        BuildError, match=f"failing is not used: .*{complaint}.*; remove opt"
    ) as caught:
        build.build(short)
    assert "-shared" in caught.value.command
    assert build.find(short) is None


def test_what_is_not_a_library_is_refused() -> None:
    begin = b"\x7fELF\x02\x01"
    for damage in (b"", b"#!/bin/sh\n" * 9, begin, begin + b"\xff" * 90):
        with pytest.raises(ValueError, match="ELF|cannot be read"):
            read_linked(damage)
