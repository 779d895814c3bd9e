"""`xds env`: every line is printed, also if something is missing or small."""

import json
import resource
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from xds.launcher import cli
from xds.launcher.environment import this_machine
from xds.launcher.environment.probes import cpu as cpu_probe
from xds.launcher.environment.probes import machine, network, software


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "xds"


@pytest.fixture
def cpu(own_cache):
    """An answer that is there already: asking takes a second."""
    own_cache.mkdir()
    kept = own_cache / f"cpu-{cpu_probe.cpu_key()}.json"
    kept.write_text(json.dumps({"brand_raw": "Example 9000", "flags": ["avx2", "sse"]}))


def values():
    return {line.key: line for line in this_machine.lines()}


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
    monkeypatch.setattr(machine, "container_limit_bytes", lambda: 1 // 0)
    told = values()
    assert told["memory"].value.startswith("unknown, ZeroDivisionError") and "ninja" in told


def test_the_cpu_is_asked_once(own_cache, monkeypatch):
    asked = []
    fake = type(sys)("cpuinfo")
    fake.get_cpu_info = lambda: asked.append(1) or {"brand_raw": "Asked"}
    monkeypatch.setitem(sys.modules, "cpuinfo", fake)
    assert cpu_probe.cpu_info() == cpu_probe.cpu_info() == {"brand_raw": "Asked"}
    assert asked == [1]
    next(own_cache.glob("cpu-*.json")).write_text("{ half")
    assert cpu_probe.cpu_info() == {"brand_raw": "Asked"} and asked == [1, 1]


def test_json_is_one_line_of_the_same_keys(cpu, capsys):
    assert cli.main(["env", "--json"]) == 0
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    found = {line["key"]: line for line in json.loads(told)}
    assert {"xds", "hostname", "torch", "clock", "processes", "ops cpu"} <= found.keys()
    assert found["clock"]["varies"] and not found["torch"]["varies"]


def test_native_libraries_say_whether_they_can_be_built(cpu):
    told = values()
    assert told["ops cpu"].value in ("built", "not built yet, compiled on first use")
    cannot = told["ops cuda_quantize"]
    assert cannot.value.startswith("cannot be built: ") or "built" in cannot.value


def test_variables_are_told_but_secrets_are_not(cpu, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_HOSTID", "a\n\x1b[31mb")
    monkeypatch.setenv("XDS_SECRET_TOKEN", "hidden")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    told = values()
    assert str(told["$NCCL_HOSTID"]) == "$NCCL_HOSTID: a\\n\\x1b[31mb"  # one line, and no colour
    assert told["$NCCL_DEBUG"].value == "INFO" and "$XDS_SECRET_TOKEN" not in told
    assert told["$GLOO_SOCKET_IFNAME"].remedy.startswith("there is no interface nosuch0")


@pytest.mark.parametrize("value", ["^docker,lo", "=lo", "l", "lo:0"])
def test_words_that_nccl_takes_for_interfaces_are_no_fault(value):
    assert software._variable_remedy("NCCL_SOCKET_IFNAME", value) == ""


def test_little_room_comes_with_a_remedy(cpu, monkeypatch):
    usage = namedtuple("usage", "total used free")(2**40, 2**40, 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    told = values()
    assert told["temporary files free"].remedy == "little; set TMPDIR to a larger disk"
    assert "XDS_CACHE_DIR" in told["ops cache free"].remedy


def test_the_network_is_read_from_the_system(tmp_path, monkeypatch):
    def put(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    for name, speed, state in (("slow0", 100, "up"), ("fast0", 25000, "up"), ("off0", -1, "down")):
        put(f"net/{name}/speed", str(speed))
        put(f"net/{name}/operstate", state)
        put(f"net/{name}/mtu", "9000")
    for port, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        put(f"infiniband/mlx5_0/ports/{port}/state", state)
        put(f"infiniband/mlx5_0/ports/{port}/rate", "400 Gb/sec (4X NDR)")
        put(f"infiniband/mlx5_0/ports/{port}/link_layer", "Ethernet")
    monkeypatch.setattr(network, "_NET", tmp_path / "net")
    monkeypatch.setattr(network, "_INFINIBAND", tmp_path / "infiniband")
    told = {line.key: line for line in [*network.interfaces(), *network.infiniband()]}
    assert told["network fast0"].value == "25 Gbit/s, MTU 9000" and not told["network fast0"].remedy
    assert told["network slow0"].remedy.startswith("slow; ") and "network off0" not in told
    assert told["infiniband mlx5_0:1"].value == "RoCE, ACTIVE, 400 Gb/sec (4X NDR)"
    assert "not active" in told["infiniband mlx5_0:2"].remedy


def test_links_between_gpus_are_read_from_what_nvidia_smi_prints():
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-31\t0\n"
        "GPU1\tNV18\t X \tSYS\t32-63\t1\n"
        "NIC0\tPIX\tSYS\t X \t\t\n\nLegend:\n\n  X    = Self\n"
    )
    assert [str(line) for line in machine.topology(matrix)] == [
        "links of gpu 0: GPU1 NV18, NIC0 PIX",
        "links of gpu 1: GPU0 NV18, NIC0 SYS",
    ]
    assert list(machine.topology("")) == []
    status = (
        "GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
        "GPU 1: NVIDIA H100 (UUID: GPU-2)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    )
    assert network.nvlinks(status) == {"0": [26.562, 26.562], "1": [26.562]}


def test_words_that_are_no_options_are_refused(capsys):
    assert cli.main(["env", "all"]) == 2
    assert "takes options only" in capsys.readouterr().err
