"""A command whose output nobody reads, or whose output cannot be written, ends without a traceback."""

import json
import os
import subprocess
import sys

import pytest

from xds.launcher import cli

ELASTIC = json.dumps(
    {
        "elasticity": {
            "enabled": True,
            "version": 0.1,
            "max_train_batch_size": 8,
            "micro_batch_sizes": [2],
            "min_gpus": 1,
            "max_gpus": 4,
        }
    }
)
COMMANDS = [
    ["check", '{"train_batch_size": 2}'],
    ["check", "--help"],
    ["elastic", ELASTIC],
    ["ops", "list"],
    ["--help"],
    ["--version"],
]


def run(words, stdout):
    command = [sys.executable, "-m", "xds.launcher.cli", *words]
    # argparse ignores errors of unbuffered writes
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_that_is_gone(words):
    reader, writer = os.pipe()
    os.close(reader)
    ended = run(words, writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("words", COMMANDS[1:3], ids=" ".join)
def test_a_full_disk(words):
    with open("/dev/full", "w") as full:
        ended = run(words, full)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "standard output: No space left on device" in ended.stderr


def test_the_output_is_as_before(capfd):
    before = sys.stdout
    assert cli.main(["--version"]) == 0
    assert sys.stdout is before
    assert capfd.readouterr().out.startswith("xds ")


def test_without_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["--version"]) == 0


def test_what_ranks_print_is_written_as_before(tmp_path):
    (tmp_path / "t.py").write_text("print('from the rank')")
    out = tmp_path / "out"
    with open(out, "w") as file:
        ended = run(
            ["--nproc-per-node", "1", "--log-dir", str(tmp_path), str(tmp_path / "t.py")], file
        )
    assert (ended.returncode, ended.stderr, out.read_text()) == (0, "", "from the rank\n")


def test_ctrl_c_before_ranks_run(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_start", interrupted)
    assert cli.main(["t.py"]) == 130
    assert capsys.readouterr().err == ""
