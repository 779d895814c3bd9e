"""A run on two hosts through one command, srun. The hosts are processes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_stubs import calls, make_stub, with_stub

from xds.launcher.remote.messages import _unpacked

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
with open(f"key{rank}", "w") as file:
    file.write(os.environ["XDS_RUN_KEY"])
if rank == "1":
    raise ValueError("on purpose")
is_here = os.getcwd() == os.path.dirname(os.path.abspath(__file__))
print(sys.argv[1:], is_here, os.environ["MARK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
WORDS = ("a b", "$(touch evil)", "%n", "ü\n")


@pytest.mark.slow
def test_a_command_that_fails_starts_again_and_the_ranks_have_one_key_that_no_command_shows(
    tmp_path: Path,
) -> None:
    """srun numbers the hosts in an order of its own, and hands words and variables over literally."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    (tmp_path / ".xds_env").write_text("# for every host\nMARK=it's here\n")
    record = make_stub(tmp_path, "srun")
    refused = tmp_path / "refused"
    once = (
        f"if not os.path.exists({str(refused)!r}):\n    open({str(refused)!r}, 'w'); sys.exit(9)\n"
    )
    stub = tmp_path / "srun"
    stub.write_text(stub.read_text().replace("\nrecord()\n", f"\nrecord()\n{once}"))
    foreign = ("SLURM_", "OMPI_", "PMI", "PET_", "MASTER_", "RANK", "WORLD_SIZE")
    kept = {key: value for key, value in with_stub(tmp_path).items() if not key.startswith(foreign)}
    options = ("--hostfile", "hosts", "--launcher", "slurm", "--max-restarts", "1")
    done = subprocess.run(
        [sys.executable, "-m", "xds.launcher.cli", *options, "train.py", *WORDS],
        cwd=tmp_path,
        env=kept | {"OMP_NUM_THREADS": "1", "XDS_RUN_KEY": "of the run around it"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stdout) == (1, f"{list(WORDS)} True it's here 1\n"), done.stderr
    assert "slurm ended with exit code 9 before the ranks had ended" in done.stderr
    assert done.stderr.count("ValueError: on purpose") == 1
    assert "rank 1 failed on 127.0.0.3" in done.stderr and not (tmp_path / "evil").exists()
    commands = calls(record)
    first, second = (call["environ"]["XDS_RUN_KEY"] for call in commands)  # type: ignore[index]
    assert first != second and len(first) == len(second) == 64
    assert [(tmp_path / f"key{rank}").read_text() for rank in range(2)] == [second, second]
    for call in commands:
        assert "--nodelist=127.0.0.2,127.0.0.3" in call["argv"]  # type: ignore[operator]
        shown = " ".join(call["argv"])  # type: ignore[arg-type]
        packed = shown.partition("--orders ")[2].split(" ")[0].strip("'")
        orders = json.dumps(_unpacked(packed)) if packed else ""
        assert not any(key in shown + orders for key in (first, second))
