"""A dry run prints the commands that would run; it starts nothing and prints no secret."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import zlib
from pathlib import Path

import pytest
from launcher_stubs import calls, make_stub, with_stub

from xds.launcher.cli import main
from xds.launcher.command_line.dry_run import dry_run, dry_run_here
from xds.launcher.job import Host, Job, Remote, Rendezvous, Restarts
from xds.launcher.remote.backends import BACKENDS

JOB = Job("script", "train it.py", ("--name", "$(touch evil); 'x'\n"), num_ranks=2)
HOSTS = (Host("h1", (0, 1)), Host("h2", (3,)))
SECRET = "hunter2-hunter2"
REMOTE = Remote(
    "/work it", "python", {"NCCL_DEBUG": "INFO", "MY_API_KEY": SECRET}, is_numbered=True
)


def commands(text: str) -> list[str]:
    """Everything that is no comment; a command may have line ends in quotes."""
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_would_be_told_is_shown_without_secrets(name: str) -> None:
    text = dry_run(JOB, HOSTS, REMOTE, BACKENDS[name], Restarts(max_restarts=3))
    assert SECRET not in text
    for word in shlex.split(" ".join(commands(text)).replace("'", " ").replace('"', " ")):
        if len(word) > 100 and word.isascii():
            assert SECRET.encode() not in zlib.decompress(base64.urlsafe_b64decode(word))
    assert '"MY_API_KEY": "***"' in text and '"NCCL_DEBUG": "INFO"' in text
    assert "# 3 ranks on 2 hosts" in text and "restarts after a failure: 3" in text
    assert f"script: {json.dumps([JOB.target, *JOB.args])}" in text
    assert "as node 1 of 2" in text and "devices: 3" in text
    assert len(commands(text)) == (2 if name == "ssh" else 1)


def test_a_line_that_is_copied_runs_what_xds_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_stub(tmp_path, "ssh")
    remote = Remote(str(tmp_path), "echo", {})
    line = commands(dry_run(JOB, HOSTS, remote, BACKENDS["ssh"], Restarts()))[0]
    done = subprocess.run(
        ["sh", "-c", line], env=with_stub(tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout == "-u -m xds.launcher.remote.node\n"
    words = BACKENDS["ssh"].command(
        HOSTS[0], remote, ["echo", "-u", "-m", "xds.launcher.remote.node"]
    )  # type: ignore[attr-defined]
    (call,) = calls(record)
    assert call["argv"][1:] == words[1:]  # type: ignore[index]


def test_on_this_machine_each_rank_is_a_line() -> None:
    text = dry_run_here(JOB, Rendezvous(), Restarts(), None)
    lines = shlex.split(text.partition("failure: 0\n")[2])
    assert lines.count("env") == 2 and lines.count("train it.py") == 2
    assert {"RANK=0", "RANK=1", "LOCAL_RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"} <= set(
        lines
    )
    assert lines.count(JOB.args[1]) == 2


def test_as_one_of_several_machines_its_own_ranks_are_shown() -> None:
    meeting = Rendezvous("static", "[fd00::1]:4000", "x", 2, 2, node_rank=1)
    text = dry_run_here(JOB, meeting, Restarts(), (4, 6))
    assert "one of 2 machines; rendezvous at [fd00::1]:4000 (static)" in text
    for word in (
        "RANK=2",
        "RANK=3",
        "WORLD_SIZE=4",
        "MASTER_ADDR=fd00::1",
        "CUDA_VISIBLE_DEVICES=4,6",
    ):
        assert word in text


def test_the_command_line_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_stub(tmp_path, "ssh")
    monkeypatch.setenv("PATH", with_stub(tmp_path)["PATH"])
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=1\n")
    assert main(["--dry-run", "--hostfile", str(tmp_path / "hosts"), "none.py", "--lr", "1"]) == 0
    out = capsys.readouterr().out
    assert 'host "h2": 1 ranks' in out and 'script: ["none.py", "--lr", "1"]' in out
    assert not record.exists()
