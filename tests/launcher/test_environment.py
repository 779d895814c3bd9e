"""`xds env`: every line is printed, also if something is missing or small; slow settings have a remedy."""

import json
import resource
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from xds.launcher import cli, environment
from xds.ops.build import build
from xds.ops.comm.memory import segment
from xds.utils.errors import BuildError


def values():
    return {line.key: line for line in environment.lines()}


def test_every_line_is_key_and_value(capsys):
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
        "cpu vectors",
        "cores",
        "memory",
        "gcc",
    }
    assert expected | {"open files", "/dev/shm", "shared memory"} <= told.keys()
    assert "gloo yes" in told["backends"]
    assert not [line for line in lines if "unknown, " in line]


def test_json_is_one_line_of_the_same_keys(capsys):
    assert cli.main(["env", "--json"]) == 0
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    found = {line["key"]: line for line in json.loads(told)}
    assert found["hostname"]["varies"] and not found["torch"]["varies"]


def test_a_missing_torch_is_one_line():
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from xds.launcher.cli import main\n"
        "sys.exit(main(['env']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "torch: cannot be imported" in done.stdout and "-> install torch" in done.stdout
    assert "open files: " in done.stdout  # what comes later is still told


def test_small_limits_come_with_a_remedy(monkeypatch):
    usage = namedtuple("usage", "total used free")(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 8192))
    told = {line.key: line for line in environment.limits()}
    assert str(told["/dev/shm"]).endswith("--shm-size=8g, or --ipc=host")
    assert told["open files"].remedy == "low for data loaders; `ulimit -n 8192`"


def test_why_ranks_share_no_memory_is_told(monkeypatch):
    def refused():
        raise segment.NoSegment("/dev/shm has 64 MiB free")

    monkeypatch.setattr(build, "find", lambda library: object())
    monkeypatch.setattr(segment, "segment", refused)
    (line,) = environment.shared_memory()
    assert line.value == "CPU ranks send messages through gloo: /dev/shm has 64 MiB free"

    def missing(library):
        raise BuildError("there is no g++", remedy="install it")

    monkeypatch.setattr(build, "find", missing)
    (line,) = environment.shared_memory()
    assert line.value.endswith("there is no g++") and line.remedy == "see `xds ops build memory`"


def test_variables_are_told_but_secrets_are_not(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_HOSTID", "a\n\x1b[31mb")
    monkeypatch.setenv("XDS_SECRET_TOKEN", "hidden")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    told = {line.key: line for line in environment.variables()}
    assert str(told["$NCCL_HOSTID"]) == "$NCCL_HOSTID: a\\n\\x1b[31mb"  # one line, and no colour
    assert told["$NCCL_DEBUG"].value == "INFO" and "$XDS_SECRET_TOKEN" not in told
    assert told["$CUDA_LAUNCH_BLOCKING"].remedy.startswith("the host waits for each kernel")


@pytest.mark.parametrize(
    ("key", "slow", "fast"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("NVIDIA_TF32_OVERRIDE", "0", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "INFO"),
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("NCCL_DEBUG", "TRACE", "INFO"),
        ("OMP_NUM_THREADS", "9999", "1"),
        ("CUDA_VISIBLE_DEVICES", "-1", "0"),
        ("PATH", "", "1"),
    ],
)
def test_a_slow_value_has_a_remedy_and_a_good_one_has_none(key, slow, fast):
    assert bool(environment.slow_variable(key, slow)) == (key != "PATH")
    assert not environment.slow_variable(key, fast)


def test_cards_and_their_links_are_read_from_what_nvidia_smi_prints():
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-31\t0\n"
        "GPU1\tNV18\t X \tSYS\t32-63\t1\n"
        "NIC0\tPIX\tSYS\t X \t\t\n\nLegend:\n\n  X    = Self\n"
    )
    assert [str(line) for line in environment.links(matrix)] == [
        "links of gpu 0: GPU1 NV18, NIC0 PIX",
        "links of gpu 1: GPU0 NV18, NIC0 SYS",
    ]
    assert list(environment.links("")) == []
    table = "0, 700.00, 700.00, 16, 16\nwarning: something\n1, 250.00, 350.00, 8, 16\n2, [N/A], [N/A], 8, 8\n"
    told = {line.key: line.remedy for line in environment.cards(table)}
    assert not told["gpu 0 power limit"] and not told["gpu 0 PCIe lanes"]
    assert told["gpu 1 power limit"].endswith("350.00 W; `nvidia-smi -i 1 -pl 350`")
    assert "the card has 16" in told["gpu 1 PCIe lanes"] and "gpu 2 power limit" not in told


@pytest.mark.parametrize(
    ("capability", "built", "has"),
    [
        ((9, 0), "sm_80 sm_90a", True),
        ((8, 9), "sm_80 sm_90", True),  # a kernel of 8.0 runs on 8.9
        ((8, 0), "sm_86", False),
        ((12, 0), "sm_90 compute_90", True),
        ((7, 0), "sm_75 sm_80 compute_80", False),
    ],
)
def test_a_torch_for_other_cards_is_told(capability, built, has):
    assert environment._has_kernels(*capability, built.split()) == has


def test_words_that_are_no_options_are_refused(capsys):
    assert cli.main(["env", "all"]) == 2
    assert "takes options only" in capsys.readouterr().err
