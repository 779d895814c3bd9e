"""`xds ops`: the output, the files and the exit code of each command."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import native_sources as tiny
import pytest

from xds.launcher.cli import main as xds_main
from xds.launcher.native_ops import main
from xds.ops import libraries
from xds.ops.build import build, build_cache, gpu
from xds.ops.build import compilers as build_compilers
from xds.ops.build.build import Library

needs_cxx = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the one library for CPUs that there is; another is for CUDA."""
    monkeypatch.setenv("XDS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    folder = tiny.write_sources(tmp_path / "csrc")
    both = (tiny.library(folder), Library("tiny_cuda", "cuda", (), root=folder))
    monkeypatch.setattr(libraries, "LIBRARIES", {one.name: one for one in both})
    for_cpu = build_compilers.Torch(Path(), Path(), "2.13.0+cpu", "", "")
    monkeypatch.setattr(gpu, "find_torch", lambda: for_cpu)
    return folder


@needs_cxx
def test_build_and_list_say_what_is_built_where_and_what_cannot_be(
    sources: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = f"cache: {tmp_path / 'cache'}"
    other = "tiny_cuda (cuda): cannot be built here: this torch is built without CUDA"
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [cache, "tiny (cpu): not built", other]
    assert xds_main(["ops", "build"]) == 0
    first, left_out = capsys.readouterr().out.splitlines()
    assert first.startswith("tiny: built in ") and first.endswith("libtiny.so")
    assert left_out == "tiny_cuda: left out: this torch is built without CUDA"
    assert main(["build", "tiny"]) == 0
    assert capsys.readouterr().out.startswith("tiny: built before, ")
    entry = build.find_or_build(libraries.LIBRARIES["tiny"])
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"tiny (cpu): built {entry.info.built_at} in ")
    assert lines[1].endswith(" KB")
    assert lines[2:4] == [f"  {entry.info.compiler}", f"  {entry.path}"]

    (sources / "cpu" / "answer.cpp").write_text(tiny.BROKEN)
    assert main(["build"]) == 1
    told = capsys.readouterr().err
    assert "tiny does not compile" in told and "command: " in told and "unknown_39" in told
    assert main(["build", "tiny_cuda"]) == 1
    assert "this torch is built without CUDA; install a CUDA build" in capsys.readouterr().err
    assert main(["build", "tinny"]) == 2
    said = "tinny is not a native library; must be one of tiny, tiny_cuda"
    assert said in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(sources))
    assert main(["list"]) == 0
    assert "tiny (cpu): cannot be built here: no C++ compiler on PATH" in capsys.readouterr().out


@needs_cxx
def test_clean_removes_what_is_out_of_date_and_never_what_is_in_use(
    sources: Path, capsys: Capture, tmp_path: Path
) -> None:
    library = libraries.LIBRARIES["tiny"]
    old = build.find_or_build(library)
    tiny.write_sources(sources, answer=7)
    current = build.find_or_build(library)
    killed = tmp_path / "cache" / f".tmp-{old.folder.name}-0123abcd"
    killed.mkdir()
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == f"removed {old.folder}\n1 removed\n"
    assert current.path.exists() and not old.folder.exists() and not killed.exists()
    fd = build_cache.use(current)
    assert main(["clean", "--all"]) == 0
    assert f"kept {current.folder}: a process uses it" in capsys.readouterr().out
    assert current.path.exists()
    os.close(fd)
    assert main(["clean", "--all"]) == 0
    assert list((tmp_path / "cache").glob("tiny*")) == []
