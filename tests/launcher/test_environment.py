"""`xds env`: every line is printed, also if something is missing or small; slow settings have a remedy."""

import resource
import shutil
import subprocess
import sys
from collections import namedtuple

from xds.launcher import cli, environment
from xds.ops.build import build
from xds.ops.comm.memory import segment
from xds.ops.device import KINDS
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
    }
    assert expected | {"gcc", "open files", "/dev/shm", "shared memory"} <= told.keys()
    assert "gloo yes" in told["backends"]
    assert not [line for line in lines if "unknown, " in line]


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


# Each kind in a fork of its own: torch takes the name of a registered device once.
PRETEND = """
import os, sys, types
import torch
from xds.launcher import environment
from xds.ops.device import KINDS


def pretend(name):
    kind, there = KINDS[name], "cuda" if name == "rocm" else name
    if there in ("npu", "mlu"):
        torch.utils.rename_privateuse1_backend(there)
    module = types.ModuleType("torch." + there)
    module.get_device_name = lambda device=None: "a card"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(has_fp64=False)
    module.is_available, module.device_count = lambda: False, lambda: 2
    setattr(torch, there, module)
    if name == "rocm":
        torch.version.hip = "6.3"
    if kind.package != "torch":
        sys.modules[kind.package] = types.ModuleType(kind.package)
        sys.modules[kind.package].__version__ = "2.7"
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device(there)
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.current_device_index = lambda: 1
    os.environ["DS_ACCELERATOR"] = name
    os.environ.update(dict.fromkeys(kind.slow, "1"))


for name in KINDS:
    if name != "cpu" and os.fork() == 0:
        pretend(name)
        for probe in (environment.torch_and_backends, environment.devices, environment.variables):
            for line in probe():
                print(name, line, flush=True)
        os._exit(0)
    elif name != "cpu":
        assert os.wait()[1] == 0
"""


def test_each_kind_of_device_has_its_name_collectives_versions_and_what_is_slow():
    done = subprocess.run([sys.executable, "-c", PRETEND], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name, kind in KINDS.items():
        if name == "cpu":
            continue
        told = [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]
        text = "\n".join(told)
        there = "cuda" if name == "rocm" else name
        assert f"device: {there} (a card), {kind.backend}" in text and "gpus: 2" in text
        assert ("native ops: none for this device  -> " in text) == (name != "cuda")
        assert ("no fp64, so norms" in text) == (name not in ("cuda", "rocm")), text
        assert ("no streams, so copies" in text) == (name == "mps")
        if kind.backend != "gloo":
            assert (
                f"{kind.backend} no" in text and f"devices without {kind.backend}: install" in text
            )
        for variable, (_, remedy) in kind.slow.items():
            found = [line for line in told if line.startswith(f"${variable}: 1")]
            assert len(found) == 1 and (variable == "NVIDIA_TF32_OVERRIDE") != (remedy in found[0])
        if kind.package != "torch":
            assert f"torch built for: {kind.package} 2.7" in text
    assert "rocm torch built for: ROCm 6.3" in lines


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


def test_a_slow_value_has_a_remedy_and_a_good_one_has_none():
    for key, slow, fast in (
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("NVIDIA_TF32_OVERRIDE", "0", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "INFO"),
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("NCCL_DEBUG", "TRACE", "INFO"),
        ("OMP_NUM_THREADS", "9999", "1"),
        ("CUDA_VISIBLE_DEVICES", "-1", "0"),
    ):
        assert environment.slow_variable(key, slow) and not environment.slow_variable(key, fast), (
            key
        )
    assert not environment.slow_variable("PATH", "")


def test_a_torch_for_other_cards_is_told():
    for capability, built, has in (
        ((9, 0), "sm_80 sm_90a", True),
        ((8, 9), "sm_80 sm_90", True),  # a kernel of 8.0 runs on 8.9
        ((8, 0), "sm_86", False),
        ((12, 0), "sm_90 compute_90", True),
        ((7, 0), "sm_75 sm_80 compute_80", False),
    ):
        assert environment._has_kernels(*capability, built.split()) == has


def test_options_are_refused(capsys):
    assert cli.main(["env", "--hostfile", "hosts"]) == 2
    assert "xds env --hostfile hosts: takes no options" in capsys.readouterr().err
