"""Tests of `deepspeed.launcher`: command lines, hosts and slots, commands, and a start of real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import xds
from xds.deepspeed.launcher import runner
from xds.deepspeed.launcher.multinode_runner import (
    IMPIRunner,
    MultiNodeRunner,
    OpenMPIRunner,
    PDSHRunner,
    SlurmRunner,
)
from xds.deepspeed.utils.numa import get_numactl_cmd, parse_range_list

SCRIPT = """import os, sys
print(sys.argv[1], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_SIZE"])
sys.exit(3 if sys.argv[1] == "fail" else 0)
"""
POOL = {"a": 4, "b": 4}


def test_hosts_and_slots_are_chosen_as_in_deepspeed() -> None:
    choose = runner.parse_inclusion_exclusion
    assert choose(POOL, "b@a:2,0,2", "") == {"a": [0, 2], "b": [0, 1, 2, 3]}
    assert choose(POOL, "", "a@b:1") == {"b": [0, 2, 3]}
    assert choose(POOL, "", "a@b") == {}
    assert runner.apply_num_nodes_and_gpus(choose(POOL, "", ""), 1, 2) == {"a": [0, 1]}


@pytest.mark.parametrize(
    "include, exclude, said",
    [
        ("a", "b", "mutually exclusive"),
        ("c", "", "Hostname 'c' not found.*it has a, b"),
        ("a:4", "", "No slot '4' specified on host 'a'"),
        ("", "a@b:1@5", "'5' not found"),
        ("a:x", "", "with numbers"),
    ],
)
def test_an_unknown_host_or_slot_is_a_value_error(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        runner.parse_inclusion_exclusion(POOL, include, exclude)
    assert isinstance(caught.value, xds.UsageError)


def test_a_hostfile_is_read_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\n# mine\n  worker-1 slots=2\n10.0.0.1 slots=8 # big\n")
    assert runner.fetch_hostfile(str(path)) == {"worker-1": 2, "10.0.0.1": 8}
    assert runner.fetch_hostfile(str(tmp_path / "absent")) is None
    for text in ("a slots=1\na slots=2", "a", "this is bad slots=1", ""):
        with pytest.raises(ValueError, match="hostfile"):
            runner._parse_hostfile(text.splitlines())


@pytest.mark.parametrize(
    "words, said",
    [
        ("--num_gpus 1 -i localhost x.py", "cannot be combined"),
        ("--num_nodes 2 x.py", "needs a hostfile"),
        ("--autotuning tune x.py", "does not search"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner.main(words.split())


def start(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"xds.deepspeed.launcher.{module}", *words]
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_main_starts_ranks_and_returns_their_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = start("runner", "--num_gpus", "2", str(script), """I'm "here" """)
    assert done.returncode == 0, done.stderr
    assert """I'm "here"  0 2 2""" in done.stdout
    assert start("runner", "--num_gpus", "1", str(script), "fail").returncode == 3


def test_launch_starts_the_ranks_of_one_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    world = runner.encode_world_info({"localhost": [0, 1]})
    done = start("launch", f"--world_info={world}", str(script), "go")
    assert done.returncode == 0, done.stderr
    assert "go 0 2 2" in done.stdout


def args_of(*words: str) -> Any:
    return runner.parse_args([*words, "train.py", "--text", 'a "b"'])


def test_commands_of_launchers_have_hosts_script_and_arguments() -> None:
    world = runner.encode_world_info(POOL)
    pdsh = PDSHRunner(args_of("--ssh_port", "22"), world)
    pdsh.add_export("NAME", "64(x2)")
    command, kill, environment = pdsh.get_cmd({}, POOL)
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    assert 'export NAME="64(x2)";' in command and command[-2:] == ["--text", '"a \\"b\\""']
    assert environment["PDSH_SSH_ARGS_APPEND"] == "-p 22" and kill[-1] == world
    mpi = OpenMPIRunner(args_of("--launcher_args", "-mca btl_tcp_if_include eth1"), world, POOL)
    words = mpi.get_cmd({}, POOL)
    assert words[:3] == ["mpirun", "-n", "8"] and "eth0" not in words and "eth1" in words
    bound = IMPIRunner(args_of("--bind_cores_to_rank", "--bind_core_list", "0-7"), world, POOL)
    words = bound.get_cmd({}, POOL)
    assert words.count("numactl") == 8
    assert words[words.index("OMP_NUM_THREADS") + 1] == "2"
    active = runner.parse_inclusion_exclusion(POOL, "b", "")
    slurm = SlurmRunner(args_of("--include", "b"), world, POOL).get_cmd({}, active)
    assert slurm[:3] == ["srun", "-n", "4"] and slurm[slurm.index("--nodelist") + 1] == "b"


def test_a_launcher_refuses_slots_that_it_cannot_select(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes no --include"):
        OpenMPIRunner(args_of("--include", "a"), "", POOL)
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=4\n")
    words = ["--hostfile", str(hosts), "--launcher", "slurm", "--include", "b:0,2", "train.py"]
    with pytest.raises(ValueError, match="cannot select specific device ids"):
        runner.main(words)
    MultiNodeRunner.validate_active_resources({"a": [0, 2]})


def test_cores_of_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for text in ("0,2-6,5-9", "8,2-6", "1,6-2", "x"):
        with pytest.raises(ValueError, match="cores"):
            parse_range_list(text)
    program = tmp_path / "numactl"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --hardware ] && echo "node 0 cpus: 0 1 2 3 4 5" && exit 0\n'
        '[ "$1" = "$DENIED" ] && echo "set_mempolicy: Operation not permitted" >&2 && exit 1\nexit 0\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    assert get_numactl_cmd("0,2-5", 2, 1) == (2, ["numactl", "-m", "0", "-C", "3-4"])
    monkeypatch.setenv("DENIED", "-m")
    assert get_numactl_cmd("0-3", 2, 0) == (2, ["numactl", "-C", "0-1"])
    with pytest.raises(ValueError, match="each rank needs one"):
        get_numactl_cmd("0", 2, 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="numactl, which is not installed"):
        get_numactl_cmd("0-3", 2, 0)
