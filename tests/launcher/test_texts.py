"""Hostile text in command lines, configs and hostfiles, and a failing standard output: a message, no crash."""

import json
import os
import resource
import subprocess
import sys

import pytest

from xds.launcher.cli import main

ESCAPES = "\x1b[31m\x1b]0;title\x07\r\x9b"
LONG = "x" * 500_000


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node-1 slots=2\nnode-2 slots=2\n")
    return tmp_path


def said(argv, capsys):
    """What one command prints, after a refusal; every character of it is one that is seen."""
    try:
        code = main(argv)
    except SystemExit as request:
        code = request.code
    out, err = capsys.readouterr()
    assert code == 2 and err and "Traceback" not in err
    lines = (out + err).split("\n")
    assert all(line.isprintable() for line in lines), lines
    assert max(map(len, lines)) < 1500 and len(lines) < 40
    return err


ELASTICITY = {"enabled": True, "max_train_batch_size": 10**15, "max_gpus": 10**9}
ELASTICITY["micro_batch_sizes"] = list(range(1, 3000))
CONFIGS = {
    "keys": json.dumps({f"a{ESCAPES}\nxds check: all is well": 1, "fp16": {ESCAPES: 2}}),
    "values": json.dumps({"optimizer": {"type": ESCAPES, "params": {ESCAPES: ESCAPES}}}),
    "no JSON": '{"a' + ESCAPES + '": ' + ESCAPES + " nothing}",
    "twice": '{"' + "a\\u001b[2J" + '": 1, "' + "a\\u001b[2J" + '": 2}',
    "long keys": json.dumps({LONG: 1, "fp16": {LONG[1:]: {LONG[2:]: 1}}}),
    "long values": json.dumps({"fp16": LONG, "optimizer": {"type": LONG, "params": {"lr": LONG}}}),
    "many keys": json.dumps({f"key{number}": number for number in range(20_000)}),
    "deep": "[" * 300_000,
    "elastic": json.dumps({"elasticity": ELASTICITY}),
}


@pytest.mark.parametrize("command", ["check", "elastic"])
def test_configs_and_their_names(command, folder, capsys):
    for text in CONFIGS.values():
        (folder / "config.json").write_text(text)
        assert f"xds {command}: config.json: " in said([command, "config.json"], capsys)
    said([command, f"none{ESCAPES}\n"], capsys)
    (folder / f"a{ESCAPES}\nb").write_text("{")
    assert "a\\x1b[31m" in said([command, f"a{ESCAPES}\nb"], capsys)
    said([command, f"--{ESCAPES}", "config.json"], capsys)


def test_command_lines(capsys):
    on_hosts = ["--hostfile", "hosts", "t.py"]
    for argv in (
        [f"--{ESCAPES}"],
        [f"--nproc-per-node={ESCAPES}", "t.py"],
        ["--hostfile", f"none{ESCAPES}\n", "t.py"],
        [f"--include={ESCAPES}", *on_hosts],
        [f"--include={LONG}", *on_hosts],
        [f"--launcher-args={ESCAPES}'", *on_hosts],
        ["--nnodes", ESCAPES, "--node-rank", "0", "t.py"],
        ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ESCAPES}:x:", "t.py"],
        ["bench", "comm", f"--op={ESCAPES}"],
        ["env", f"--{ESCAPES}"],
        ["checkpoint", "info", ESCAPES],
        ["checkpoint", ESCAPES],
        [f"{ESCAPES}.py"],
    ):
        said(argv, capsys)


def test_hostfiles_and_environment_files(folder, capsys):
    for text in (f"{ESCAPES}\n", LONG * 3):
        (folder / ".xds_env").write_text(text)
        assert "environment file" in said(["--hostfile", "hosts", "t.py"], capsys)
    lines = [
        f"{ESCAPES} slots=2",
        f"node-1 {ESCAPES}",
        f"node-1 slots={ESCAPES}",
        f"-{LONG} slots=1",
    ]
    for text in (*lines, LONG * 3, f"bad{ESCAPES}\n" * 9999, "node-1 slots=1\n" * 9999):
        (folder / "hosts").write_text(text)
        assert "hostfile = 'hosts'" in said(["--hostfile", "hosts", "t.py"], capsys)


def test_an_endless_file_is_not_read(folder):
    """With little memory, in a process that can be killed."""
    done = subprocess.run(
        [sys.executable, "-m", "xds.launcher.cli", "check", "/dev/zero"],
        timeout=60,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_a_pipe_that_nobody_writes_is_not_waited_for(folder, monkeypatch, capsys):
    os.mkfifo(folder / "pipe")
    monkeypatch.setattr("xds.utils.small_files.PIPE_SECONDS", 0.1)
    assert "a pipe that received no data" in said(["check", "pipe"], capsys)


# -- standard output -----------------------------------------------------------------------------------


def run(stdout):
    # argparse ignores errors of unbuffered writes
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-m", "xds.launcher.cli", "ops", "--help"]
    return subprocess.run(
        words, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
    )


def test_a_reader_that_is_gone_and_a_full_disk_give_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    ended = run(writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        ended = run(full)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "standard output: No space left on device" in ended.stderr


def test_standard_output_stays_and_may_be_missing(monkeypatch, capfd):
    before = sys.stdout
    assert main(["--version"]) == 0
    assert sys.stdout is before and capfd.readouterr().out.startswith("xds ")
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 0


def test_ctrl_c_before_ranks_run(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("xds.launcher.cli._start", interrupted)
    assert main(["t.py"]) == 130
    assert capsys.readouterr().err == ""


def test_paths_of_checkpoints(folder, capsys):
    """What the commands print when all is well; every character of it is one that is seen."""
    torch = pytest.importorskip("torch")
    (folder / f"in{ESCAPES}").mkdir()
    source, out = f"in{ESCAPES}/pytorch_model.bin", f"out{ESCAPES}"
    torch.save({f"weight{ESCAPES}": torch.ones(2), ESCAPES: 1}, source)
    for argv in (
        ["import", source, out],
        ["info", out, "--tag=imported", "--tensors"],
        ["verify", f"{out}/imported"],
        ["export", f"{out}/imported", f"back{ESCAPES}", "--to", "safetensors"],
        ["diff", f"{out}/imported", f"{out}/imported"],
    ):
        assert main(["checkpoint", *argv]) == 0
        said_here = capsys.readouterr().out
        assert all(line.isprintable() for line in said_here.split("\n")), said_here
        assert "\\x1b" in said_here
