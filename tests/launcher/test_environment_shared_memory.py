"""`xds env` says whether ranks of this machine share memory, and otherwise why not, with the remedy."""

import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from xds.launcher.environment.probes import shared_memory
from xds.ops.build import build
from xds.ops.comm.memory import segment
from xds.utils.errors import BuildError

SIZE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def told():
    return {line.key: line for line in shared_memory.shared_memory()}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The native library is there."""
    monkeypatch.setattr(build, "find", lambda library: object())


@pytest.fixture
def no_memfd(monkeypatch):
    def missing(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", missing)


def free_is(monkeypatch, free_bytes):
    usage = namedtuple("usage", "total used free")(2 * free_bytes, free_bytes, free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def limits_are(monkeypatch, **limits):
    def limit(kind):
        soft = limits.get("v" if kind == resource.RLIMIT_AS else "f", resource.RLIM_INFINITY)
        return soft, resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", limit)


def test_the_conditions_are_those_of_a_run():
    assert shared_memory.LEAST_SHARE == segment.LEAST_SHARE
    assert shared_memory.SHM_FOLDER == segment.SHM_FOLDER
    assert segment._memory_bytes() == SIZE_BYTES


def test_memory_that_can_be_shared_has_no_remedy(monkeypatch):
    limits_are(monkeypatch)
    lines = told()
    assert lines["memfd"].value == "works"
    assert lines["address space"].value == "unlimited (ulimit -v)"
    assert str(lines["shared memory"]) == (
        "shared memory: CPU ranks read each other's memory (memfd)"
    )


def test_few_addresses_are_few_ranks(monkeypatch):
    limits_are(monkeypatch, v=3 * SIZE_BYTES + (2 << 30))
    assert told()["shared memory"].value.startswith("CPU ranks (up to 3, for ulimit -v) read")
    limits_are(monkeypatch, v=2 * SIZE_BYTES)
    line = told()["shared memory"]
    assert line.value.startswith("CPU ranks send messages through gloo: a rank needs addresses")
    assert line.remedy == "`ulimit -v unlimited`"


def test_without_memfd_there_must_be_room(no_memfd, monkeypatch):
    limits_are(monkeypatch)
    free_is(monkeypatch, SIZE_BYTES)
    lines = told()
    assert lines["memfd"].value == "missing, Function not implemented"
    assert "a file in /dev/shm, as there is no memfd" in lines["shared memory"].value
    free_is(monkeypatch, 64 << 20)
    line = told()["shared memory"]
    assert "no memfd, and /dev/shm has 0.1 GiB free of" in line.value
    assert "--shm-size" in line.remedy


def test_a_library_that_cannot_be_built_is_why(monkeypatch):
    def find(library):
        raise BuildError("there is no g++", remedy="install it")

    monkeypatch.setattr(build, "find", find)
    line = told()["shared memory"]
    assert line.value.endswith("the native library is missing: there is no g++")
    assert line.remedy == "see `xds ops build memory`"


def test_a_limit_of_files_is_found_without_torch():
    """The probe makes the file that a run makes, so no list of limits has to be complete."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        "from xds.launcher.environment.probes import shared_memory\n"
        "print(*shared_memory.shared_memory(), sep='\\n')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "file size: 0.0 GiB (ulimit -f)" in done.stdout
    assert "cannot be used, File too large" in done.stdout
