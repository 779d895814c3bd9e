"""A dry run prints the command lines of a run; it starts nothing and prints no secret."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from launcher_stubs import calls, make_stub, with_stub

from xds.launcher.cli import main
from xds.launcher.command_line.dry_run import show
from xds.launcher.command_line.where import Hosts, Local
from xds.launcher.job import Host, Job, Remote, Rendezvous, Restarts
from xds.launcher.remote.backends import BACKENDS

JOB = Job("script", "train it.py", ("--name", "$(touch evil); 'x'\n"), num_ranks=2)
HOSTS = (Host("h1", (0, 1)), Host("h2", (3,)))
SECRET = "hunter2-hunter2"
REMOTE = Remote(
    "/work it", "python", {"NCCL_DEBUG": "INFO", "MY_API_KEY": SECRET, "PYTHONKEY": SECRET}
)
Said = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_would_be_run_is_shown_without_secrets(name: str, capsys: Said) -> None:
    assert show(Hosts(JOB, HOSTS, REMOTE, name, Restarts(max_restarts=3))) == 0
    text = capsys.readouterr().out
    assert SECRET not in text
    assert "# ranks on each host: h1 2, h2 1" in text and "restarts after a failure: 3" in text
    assert shlex.join(["python", "-u", JOB.target, *JOB.args]) in text
    program = BACKENDS[name].program
    assert text.count(f"\n{program} ") + text.count(f" {program} ") == (2 if name == "ssh" else 1)


def test_a_line_that_is_copied_runs_what_xds_would(tmp_path: Path, capsys: Said) -> None:
    record = make_stub(tmp_path, "ssh")
    show(Hosts(Job("script", "t.py"), HOSTS, Remote(str(tmp_path), "echo", {}), "ssh"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("ssh"))
    done = subprocess.run(
        ["sh", "-c", line], env=with_stub(tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout == "-u -m xds.launcher.remote.node\n" and len(calls(record)) == 1


def test_on_this_machine_the_ranks_are_counted(capsys: Said) -> None:
    meeting = Rendezvous("static", "[fd00::1]:4000", "x", 2, 2, node_rank=1)
    assert show(Local(JOB, meeting, Restarts(), (4, 6))) == 0
    text = capsys.readouterr().out
    assert "# 2 ranks on this machine, devices (4, 6)" in text
    assert "one of 2 machines; rendezvous at [fd00::1]:4000" in text
    assert shlex.split(text, comments=True)[-3:] == ["train it.py", *JOB.args]


def test_the_command_line_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    record = make_stub(tmp_path, "ssh")
    monkeypatch.setenv("PATH", with_stub(tmp_path)["PATH"])
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=1\n")
    assert main(["--dry-run", "--hostfile", str(tmp_path / "hosts"), "none.py", "--lr", "1"]) == 0
    assert "none.py --lr 1" in capsys.readouterr().out
    assert not record.exists()
