"""Runs on two hosts through one command (srun, pdsh, Open MPI). The hosts are processes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_stubs import calls, make_stub, with_stub

from xds.launcher.remote.messages import _unpacked

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
if dist.get_rank() == 0:
    is_here = os.getcwd() == os.path.dirname(os.path.abspath(__file__))
    print(sys.argv[1:], is_here, total.item(), os.environ["MARK"])
if dist.get_rank() == 1 and "fail" in sys.argv:
    raise ValueError("on purpose")
dist.barrier()
dist.destroy_process_group()
"""
WORDS = ("a b", "$(touch evil)", "%n", "ü\n")
SAID = f"{list(WORDS)} True 3.0 it's here\n"


def prepare(folder: Path) -> dict[str, str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    (folder / ".xds_env").write_text("# for every host\nMARK=it's here\n")
    foreign = ("SLURM_", "OMPI_", "PMI", "PET_", "MASTER_", "RANK", "WORLD_SIZE")
    kept = {key: value for key, value in with_stub(folder).items() if not key.startswith(foreign)}
    return kept | {"OMP_NUM_THREADS": "1"}


def start(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xds.launcher.cli", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.slow
def test_srun_that_numbers_hosts_in_its_own_order_runs_the_ranks_of_each(tmp_path: Path) -> None:
    environ = prepare(tmp_path)
    record = make_stub(tmp_path, "srun")
    words = ("--hostfile", "hosts", "--launcher", "slurm", "train.py", *WORDS)
    done = start(tmp_path, environ, *words)
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr
    (call,) = calls(record)
    assert "--nodelist=127.0.0.2,127.0.0.3" in call["argv"]  # type: ignore[operator]


KEEPS_THE_KEY = """
import os
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"key{os.environ['RANK']}.{start}", "w") as file:
    file.write(os.environ["XDS_RUN_KEY"])
if start == "0" and os.environ["RANK"] == "1":
    raise SystemExit(1)
"""


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ("slurm", "srun"),
        pytest.param("ssh", "ssh", marks=pytest.mark.slow),
        pytest.param("openmpi", "mpirun", marks=pytest.mark.slow),
        pytest.param("mpich", "mpiexec.hydra", marks=pytest.mark.slow),
    ],
)
def test_the_ranks_of_a_start_have_one_key_that_no_command_shows(
    launcher: str, program: str, tmp_path: Path
) -> None:
    environ = prepare(tmp_path) | {"XDS_RUN_KEY": "of the run around it"}
    record = make_stub(tmp_path, program)
    (tmp_path / "train.py").write_text(KEEPS_THE_KEY)
    words = ("--hostfile", "hosts", "--launcher", launcher, "--max-restarts", "1", "train.py")
    done = start(tmp_path, environ, *words)
    assert done.returncode == 0, done.stderr
    keys = {path.name: path.read_text() for path in tmp_path.glob("key*")}
    assert keys["key0.0"] == keys["key1.0"] != keys["key0.1"] == keys["key1.1"]
    assert all(len(key) == 64 for key in keys.values())
    assert [word for call in calls(record) for word in call["argv"]]  # type: ignore[attr-defined]
    for call in calls(record):
        shown = " ".join(call["argv"])  # type: ignore[arg-type]
        packed = shown.partition("--orders ")[2].split(" ")[0].strip("'")
        orders = json.dumps(_unpacked(packed)) if packed else ""
        assert not any(key in shown + orders for key in keys.values())


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdsh"), reason="no pdsh here")
def test_the_real_pdsh_runs_and_its_failures_are_told_once(tmp_path: Path) -> None:
    environ = prepare(tmp_path)
    make_stub(tmp_path, "ssh")
    words = ("--hostfile", "hosts", "--launcher", "pdsh", "train.py")
    done = start(tmp_path, environ, *words, *WORDS, "fail")
    assert (done.returncode, done.stdout) == (1, SAID.replace("]", ", 'fail']")), done.stderr
    assert done.stderr.count("ValueError: on purpose") == 1
    assert "rank 1 failed on 127.0.0.3" in done.stderr


def is_real_openmpi() -> bool:
    if not shutil.which("mpirun"):
        return False
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    return "Open MPI" in done.stdout


@pytest.mark.skipif(not is_real_openmpi(), reason="no mpirun of Open MPI here")
@pytest.mark.slow
def test_the_real_mpirun_runs_the_ranks_of_each_host(tmp_path: Path) -> None:
    environ = prepare(tmp_path)
    agent = tmp_path / "agent"  # stands for ssh; each host's daemon needs a folder of its own
    agent.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'TMPDIR={tmp_path}/$1; export TMPDIR; mkdir -p "$TMPDIR"; shift\nexec /bin/sh -c "$*"\n'
    )
    agent.chmod(0o755)
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more = f"--mca plm rsh --mca plm_rsh_agent {agent}"
    words = ("--hostfile", "hosts", "--launcher", "openmpi", "--launcher-args", more, "train.py")
    done = start(tmp_path, environ | {"TMPDIR": str(tmp_path)}, *words, *WORDS)
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr
    assert not (tmp_path / "evil").exists()
    assert os.path.isdir(tmp_path / "127.0.0.3"), "both hosts had a daemon"
