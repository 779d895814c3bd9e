"""`xds env`: every line is there, also where something is missing or small."""

import json
import resource
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from xds.launcher import cli, environment


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "xds"


@pytest.fixture
def cpu(own_cache):
    """An answer that is there already: asking takes a second."""
    own_cache.mkdir()
    kept = own_cache / f"cpu-{environment._cpu_key()}.json"
    kept.write_text(json.dumps({"brand_raw": "Example 9000", "flags": ["avx2", "sse"]}))


def values():
    return {line.key: line for line in environment.lines()}


def test_every_line_is_key_and_value(cpu, capsys):
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.split(": ", 1) for line in lines)
    expected = {
        "xds",
        "python",
        "torch",
        "backends",
        "gpus",
        "cpu",
        "cores",
        "memory",
        "open files",
    }
    assert expected | {"/dev/shm", "gcc", "g++", "nvcc", "ninja"} <= told.keys()
    assert told["cpu"] == "Example 9000" and told["cpu vectors"] == "avx2"
    assert "gloo yes" in told["backends"]
    assert not [line for line in lines if "unknown, " in line]


def test_small_limits_come_with_a_remedy(cpu, monkeypatch):
    usage = namedtuple("usage", "total used free")(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 8192))
    told = values()
    assert str(told["/dev/shm"]).endswith("--shm-size=8g, or --ipc=host")
    assert told["open files"].remedy == "low for data loaders; `ulimit -n 8192`"


def test_missing_compilers_come_with_a_remedy(cpu, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    told = values()
    assert told["g++"].value == "missing" and "install g++" in told["g++"].remedy
    assert told["nvcc"].value == "missing" and told["nvcc"].remedy == ""  # no GPU asks for it


def test_a_missing_torch_is_one_line(cpu):
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from xds.launcher.cli import main\n"
        "sys.exit(main(['env']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "torch: cannot be imported" in done.stdout and "-> install torch" in done.stdout
    assert "gcc: " in done.stdout  # what comes later is still told


def test_a_failing_probe_does_not_stop_the_others(cpu, monkeypatch):
    monkeypatch.setattr(environment, "_container_limit_bytes", lambda: 1 // 0)
    told = values()
    assert told["memory"].value.startswith("unknown, ZeroDivisionError") and "ninja" in told


def test_the_cpu_is_asked_once(own_cache, monkeypatch):
    asked = []
    fake = type(sys)("cpuinfo")
    fake.get_cpu_info = lambda: asked.append(1) or {"brand_raw": "Asked"}
    monkeypatch.setitem(sys.modules, "cpuinfo", fake)
    assert environment.cpu_info() == environment.cpu_info() == {"brand_raw": "Asked"}
    assert asked == [1]
    next(own_cache.glob("cpu-*.json")).write_text("{ half")
    assert environment.cpu_info() == {"brand_raw": "Asked"} and asked == [1, 1]


def test_arguments_are_refused(capsys):
    assert cli.main(["env", "--all"]) == 2
    assert "takes no argument" in capsys.readouterr().err
