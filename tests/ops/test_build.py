"""Tests of the build of native ops: concurrent builds, kills during a build, and outdated libraries."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import native_sources as tiny
import pytest
import torch

from xds.ops import libraries
from xds.ops.build import build, build_cache, gpu
from xds.ops.build import compilers as build_compilers
from xds.ops.build.build import Library, Source
from xds.ops.libraries import LIBRARIES, LoadedLibraries, NativeOpsWarning
from xds.utils.errors import BuildError

needs_cxx = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path, cache: Path) -> Path:
    return tiny.write_sources(tmp_path / "csrc")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a compiler that counts; it is $CXX."""
    monkeypatch.setenv("CXX", str(tiny.write_compiler(tmp_path / "bin")))
    return tmp_path / "bin"


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def key(sources: Path, flag: str = "-DMORE=0") -> str:
    build_compilers._ask.cache_clear()
    return build.plan(tiny.library(sources, flag), build_cache.default_folder()).key


def rubbish(cache: Path) -> list[str]:
    """What there is beside finished libraries, their locks, and what is kept for good."""
    names = {path.name for path in cache.iterdir()} - {"compilers.json", build_cache.SWEEP}
    return sorted(
        name for name in names if not build_cache.KEY.fullmatch(name.removesuffix(".lock"))
    )


# -- building -----------------------------------------------------------------------------------------------


@needs_cxx
def test_a_library_is_built_once_and_then_found_without_any_process(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.build(tiny.library(sources))
    assert answer(path) == 42 and path.is_relative_to(cache)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    build_compilers._ask.cache_clear()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert build.build(tiny.library(sources)) == path
    assert rubbish(cache) == []


@needs_cxx
def test_processes_that_race_build_once(sources: Path, compiler: Path, cache: Path) -> None:
    racing = [tiny.start_build(sources) for _ in range(3)]
    answers = {process.communicate(timeout=60) for process in racing}
    ((path, complaint),) = answers
    assert complaint == "" and answer(Path(path.strip())) == 42
    assert tiny.num_compiled(compiler) == 1
    assert rubbish(cache) == []


@needs_cxx
def test_who_waited_for_a_build_that_fails_does_not_compile_again(
    sources: Path, compiler: Path, tmp_path: Path
) -> None:
    (sources / "cpu" / "answer.cpp").write_text(tiny.BROKEN)
    slow = tmp_path / "slow"
    slow.touch()
    racing = [tiny.start_build(sources, **{tiny.SLOW: str(slow)}) for _ in range(2)]
    wait_for(lambda: num_waiting(tmp_path / "cache") == 2)
    time.sleep(1)  # from the open to the lock
    slow.unlink()
    complaints = {process.communicate(timeout=60)[1] for process in racing}
    (complaint,) = complaints
    assert "unknown_39" in complaint
    assert tiny.num_compiled(compiler) == 1
    # but who comes later tries again: the reason may be gone
    tiny.write_sources(sources)
    assert answer(build.build(tiny.library(sources))) == 42


def num_waiting(cache: Path) -> int:
    """How many processes have opened a lock of the cache: read from /proc, so 2 where there is none."""
    if not Path("/proc/self/fd").exists():
        time.sleep(3)
        return 2
    found = 0
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found += os.readlink(fd).startswith(f"{cache}/tiny-")
        except OSError:
            continue
    return found


def wait_for(condition: object, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.02)


@needs_cxx
def test_after_a_kill_in_the_middle_the_next_process_builds(
    sources: Path, compiler: Path, cache: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    killed = tiny.start_build(sources, **{tiny.SLOW: str(slow)})
    wait_for(lambda: tiny.num_compiled(compiler) == 1)
    killed.kill()
    killed.wait()
    assert len(rubbish(cache)) == 2, "its temporary folder, and that folder's lock"
    # the killed build's compiler is still at work
    assert answer(build.build(tiny.library(sources))) == 42
    assert rubbish(cache) == []
    slow.unlink()
    killed.communicate(timeout=120)  # the orphans hold its pipes until they end
    assert rubbish(cache) == []
    assert answer(build.build(tiny.library(sources))) == 42


@needs_cxx
def test_an_interrupted_build_ends_its_compilers_and_leaves_nothing(
    sources: Path, compiler: Path, cache: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    building = tiny.start_build(sources, **{tiny.SLOW: str(slow)})
    wait_for(lambda: tiny.num_compiled(compiler) == 1)
    building.send_signal(signal.SIGINT)
    _, complaint = building.communicate(timeout=120)
    assert "KeyboardInterrupt" in complaint and slow.exists()
    assert rubbish(cache) == []


@needs_cxx
def test_a_builder_that_is_stuck_is_waited_for_once_told_and_then_passed(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    monkeypatch.setattr(build_cache, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(build_cache, "PATIENCE_SECONDS", 0.3)
    cache.mkdir()
    with build_cache.locked(cache, key(sources)), caplog.at_level(logging.INFO, "xds"):
        assert answer(build.build(tiny.library(sources))) == 42
    told = [line for line in caplog.messages if line.startswith("waiting for another process")]
    assert len(told) == 1 and told[0].endswith(" compiles tiny (once, about 20 s)")


# -- what is out of date, or damaged ------------------------------------------------------------------------


@needs_cxx
def test_whatever_can_change_the_result_gives_another_library(
    sources: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(build.build(tiny.library(sources))) == 42
    assert answer(build.build(tiny.library(sources, "-DMORE=1"))) == 43
    first = key(sources)
    assert key(tiny.write_sources(tmp_path / "elsewhere" / "csrc")) == first, "another checkout"
    keys = {first, key(sources, "-DMORE=1")}

    def differs(what: str) -> None:
        now = key(sources)
        assert now not in keys, what
        keys.add(now)

    tiny.write_sources(sources, answer=7)
    differs("a header")
    (sources / "cpu" / "answer.cpp").write_text(tiny.SOURCE + "// more\n")
    differs("a source")
    (sources / "cpu" / "other.h").write_text("")
    differs("one more header")
    tiny.write_compiler(compiler, "c++ 2.0")
    differs("a compiler's version")
    monkeypatch.delenv("CXX")
    differs("another compiler")
    monkeypatch.setenv("CPATH", "/somewhere")
    differs("a variable that compilers read")
    usual = build_compilers.find_torch()
    assert (usual.version, usual.cuda or None) == (torch.__version__, torch.version.cuda)
    for changed in ({"version": "9.9.9"}, {"facts": "other headers"}):
        other = dataclasses.replace(usual, **changed)
        monkeypatch.setattr(build, "find_torch", lambda other=other: other)
        differs(f"torch: {changed}")
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    differs("the kind of machine")


@needs_cxx
def test_a_damaged_library_is_built_anew(sources: Path, cache: Path) -> None:
    path = build.build(tiny.library(sources))
    whole, info = path.read_bytes(), path.parent / build_cache.INFO
    told = info.read_bytes()
    damages = {
        "cut off": lambda: path.write_bytes(whole[:-100]),
        "changed": lambda: path.write_bytes(whole[:-1] + b"\xff"),
        "no info": info.unlink,
        "bad info": lambda: info.write_text('{"key": 1}'),
    }
    for damage, do in damages.items():
        path.write_bytes(whole)
        info.write_bytes(told)
        assert build.find(tiny.library(sources)) is not None
        do()
        assert build.find(tiny.library(sources)) is None, damage
    assert build.build(tiny.library(sources)) == path and len(path.read_bytes()) == len(whole)
    entry = build.find(tiny.library(sources))
    assert entry is not None and rubbish(cache) == []
    told = json.loads(info.read_text())
    assert told["name"] == "tiny" and told["size_bytes"] == entry.path.stat().st_size
    assert told["seconds"] > 0 and told["compiler"] and told["built_at"].endswith("+00:00")
    fd = build_cache.use(entry)  # what a process uses is not removed
    assert not build_cache.remove(entry.folder) and entry.path.exists()
    os.close(fd)
    assert build_cache.remove(entry.folder)
    assert [one.name for one in cache.glob("tiny*")] == []


# -- failures -----------------------------------------------------------------------------------------------


@needs_cxx
def test_a_source_that_does_not_compile_warns_once_with_command_and_last_lines(
    sources: Path, cache: Path
) -> None:
    (sources / "cpu" / "answer.cpp").write_text(tiny.BROKEN)
    shelf = LoadedLibraries()
    with pytest.warns(NativeOpsWarning) as caught:
        assert shelf.load(tiny.library(sources), is_required=False) is False
    (message,) = [str(one.message) for one in caught]
    assert "native library tiny does not compile" in message and "command: " in message
    assert "answer.cpp -o answer.o" in message and "unknown_39" in message
    assert "unknown_1 " not in message, "the last lines alone"
    assert '"ops": {"require": true}' in message
    # no second warning (warnings are errors here), no second try
    assert shelf.load(tiny.library(sources), is_required=False) is False
    with pytest.raises(BuildError, match="does not compile"):
        shelf.load(tiny.library(sources), is_required=True)
    assert rubbish(cache) == [] and not shelf.is_loaded("tiny")


@needs_cxx
def test_a_missing_symbol_is_told_by_the_linker(sources: Path) -> None:
    text = "int absent();\nint answer() { return absent(); }\n"
    (sources / "cpu" / "answer.cpp").write_text(text)
    with pytest.raises(BuildError) as caught:
        build.build(tiny.library(sources))
    assert "-shared" in caught.value.command and "absent" in "".join(caught.value.lines)


def test_without_a_compiler_there_is_one_warning_or_an_error(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in ("", "no-such-compiler -x"):
        monkeypatch.setenv("CXX", name)
        with pytest.warns(NativeOpsWarning, match=r"no C\+\+ compiler.*install g\+\+"):
            assert LoadedLibraries().load(tiny.library(sources), is_required=False) is False
    with pytest.raises(BuildError, match="set CXX"):
        LoadedLibraries().load(tiny.library(sources), is_required=True)


@needs_cxx
def test_what_a_build_lacks_is_told_with_the_remedy(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setenv("CXX", str(shutil.which("c++")))
        without.setenv("PATH", str(tmp_path))
        without.setitem(sys.modules, "ninja", None)
        with pytest.raises(BuildError, match="no ninja on PATH; `pip install ninja`"):
            build.build(tiny.library(sources))
    with monkeypatch.context() as full:
        full.setattr(build_cache, "MIN_FREE_BYTES", 2**62)
        with pytest.raises(BuildError, match="MiB are free"):
            build.build(tiny.library(sources))
    with monkeypatch.context() as closed:
        (tmp_path / "file").touch()
        closed.setenv("XDS_CACHE_DIR", str(tmp_path / "file" / "cache"))
        with pytest.raises(BuildError, match="XDS_CACHE_DIR = .* set it to another folder"):
            build.build(tiny.library(sources))

    def fill_up(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as filling:
        filling.setattr(build_cache, "commit", fill_up)
        with pytest.warns(NativeOpsWarning, match="No space left on device.*; free disk space, or"):
            assert LoadedLibraries().load(tiny.library(sources), is_required=False) is False
        assert rubbish(cache) == []
    entry = build.find_or_build(tiny.library(sources))
    not_one = dataclasses.replace(entry, info=dataclasses.replace(entry.info, file="info.json"))
    monkeypatch.setattr(libraries, "find_or_build", lambda library: not_one)
    with pytest.warns(NativeOpsWarning, match=r"(?s)cannot be loaded.*\| .*info.json: "):
        assert LoadedLibraries().load(tiny.library(sources), is_required=False) is False


@needs_cxx
def test_without_a_usable_home_libraries_go_to_the_temporary_folder(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build_cache.tempfile, "tempdir", str(tmp_path))
    path = build.build(tiny.library(sources))
    assert path.is_relative_to(tmp_path / f"xds-{os.getuid()}") and answer(path) == 42
    assert "set XDS_CACHE_DIR" in caplog.text
    assert build.build(tiny.library(sources)) == path
    # a folder that others can write to may hold anything
    path.parents[1].chmod(0o777)
    with pytest.raises(BuildError, match="another user may change it"):
        build.build(tiny.library(sources))


@pytest.mark.slow
def test_importing_xds_builds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    script = "import xds.engine.initialize, xds.ops.libraries as all\n"
    script += "assert not any(map(all.is_loaded, all.LIBRARIES))"
    environment = {**os.environ, "XDS_CACHE_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert not folder.exists()


# -- the sources of xds -------------------------------------------------------------------------------------


@needs_cxx
@pytest.mark.slow
def test_objects_for_newer_processors_hold_nothing_that_others_would_be_linked_to(
    tmp_path: Path, cache: Path
) -> None:
    """The linker may take a function from either of two objects that define it, such as AVX-512 code."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm to look into objects with")
    library = LIBRARIES["cpu"]
    own = tuple(one for one in library.sources if any(flag.startswith("-m") for flag in one.flags))
    for path in build.compile_objects(dataclasses.replace(library, sources=own), tmp_path):
        done = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        shared = [line for line in done.stdout.splitlines() if line[17:18] in "WVui"]
        assert shared == [], path.name


def test_no_flag_names_the_processor_that_compiles() -> None:
    flags = {flag for one in LIBRARIES.values() for source in one.sources for flag in source.flags}
    assert not [flag for flag in flags if flag.startswith(("-march", "-mtune", "-mcpu"))]
    assert "-ffast-math" not in flags


KERNELS = """
import ctypes, importlib, pkgutil, sys
import torch, xds.ops.kernels as kernels
for module in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module(f"xds.ops.kernels.{module.name}")
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
torch.ops.load_library(sys.argv[2])
for key in ("CompositeExplicitAutograd", "CUDA"):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    print(*sorted(name for name in names if name.startswith("xds::")))
"""


@pytest.mark.slow
def test_cuda_sources_compile_without_a_warning_and_hold_a_kernel_for_every_op(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in two halves, one for each core: torch's headers are what takes the time."""
    try:
        build_compilers.find_nvcc(tmp_path)
    except BuildError as error:
        pytest.skip(f"CUDA sources are not compiled: {error.what}")
    monkeypatch.setenv(build_compilers.ARCHS_VARIABLE, "90")  # one is enough to see whether they do
    wanted = [one for one in LIBRARIES.values() if one.device == "cuda"]
    files = [library.root / source.path for library in wanted for source in library.sources]
    (tmp_path / "cuda").mkdir()
    for half in (0, 1):
        text = "".join(f'#include "{path}"\n' for path in files[half::2])
        (tmp_path / "cuda" / f"half_{half}.cu").write_text(text)
    strict = (
        *("-Werror", "all-warnings"),
        "-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-Wno-unknown-pragmas",
    )
    halves = tuple(Source(f"cuda/half_{half}.cu", f"half_{half}.o", strict) for half in (0, 1))
    found = tiny.with_libtorch_cuda(build_compilers.find_torch(), tmp_path / "torch")
    monkeypatch.setattr(build, "find_torch", lambda: found)
    path = build.build(Library("halves", "cuda", halves, root=tmp_path))
    streams = found.libraries / "libtorch_cuda.so"
    command = [sys.executable, "-c", KERNELS, str(streams), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ops, kernels = done.stdout.splitlines()
    assert kernels.split() == ops.split() != []


def nvcc_of(version: str) -> build_compilers.Compiler:
    return build_compilers.Compiler(("nvcc",), f"Cuda compilation tools, release {version}, V")


def test_a_cuda_library_needs_a_torch_and_an_nvcc_of_one_cuda_and_code_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "find_nvcc", lambda kept: nvcc_of("13.0"))
    for built_for, complaint in (
        ("", "without CUDA"),
        ("12.8", "CUDA 12.8, but nvcc is of CUDA 13.0; set CUDA_HOME"),
        ("13.1", ""),
    ):
        built = dataclasses.replace(build_compilers.find_torch(), cuda=built_for)
        monkeypatch.setattr(gpu, "find_torch", lambda built=built: built)
        with pytest.raises(BuildError, match=complaint) if complaint else nullcontext():
            libraries.check(LIBRARIES["cuda_optimizers"])
    monkeypatch.setattr(gpu, "find_nvcc", lambda kept: nvcc_of("12.1"))
    monkeypatch.delenv(build_compilers.ARCHS_VARIABLE, raising=False)
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):  # code of its generation, or older PTX
        assert build_compilers.runs_on(["80", "90"], capability)
        gpu.check_card(capability)
    assert not build_compilers.runs_on(["80", "90"], (7, 0))
    with pytest.raises(BuildError, match=r"this GPU \(sm_70\), only for sm_80, sm_90; set XDS_"):
        gpu.check_card((7, 0))


def test_architectures_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def flags(version: str) -> list[str]:
        found = build_compilers.arch_flags(nvcc_of(version))
        return [flag.removeprefix("-gencode=arch=compute_") for flag in found]

    monkeypatch.delenv(build_compilers.ARCHS_VARIABLE, raising=False)
    assert flags("12.1") == ["80,code=sm_80", "90,code=sm_90", "90,code=compute_90"]
    assert "100,code=sm_100" in flags("13.0")
    monkeypatch.setenv(build_compilers.ARCHS_VARIABLE, "8.6;90a")
    assert flags("") == ["86,code=sm_86", "90a,code=sm_90a", "90a,code=compute_90a"]
    monkeypatch.setenv(build_compilers.ARCHS_VARIABLE, "hopper")
    with pytest.raises(BuildError, match='XDS_CUDA_ARCHS = .hopper. is not a list .* write "80 90'):
        flags("")
