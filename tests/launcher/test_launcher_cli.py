"""The command line of `xds`: what belongs to xds, what to the script, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

import xds
from xds.launcher import cli, local
from xds.launcher.local import LocalJob


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that main() would have run."""
    seen = []
    monkeypatch.setattr(local, "run", lambda job: seen.append(job) or 5)
    return seen


@pytest.mark.parametrize(
    "words, job",
    [
        (["train.py"], LocalJob("script", "train.py")),
        (["train.py", "--help", "-m"], LocalJob("script", "train.py", ("--help", "-m"))),
        (["--", "-odd.py", "--", "x"], LocalJob("script", "-odd.py", ("--", "x"))),
        (["./check"], LocalJob("script", "./check")),
        (["-m", "a.b", "env"], LocalJob("module", "a.b", ("env",))),
        (["--no_python", "sh", "-c", "x"], LocalJob("program", "sh", ("-c", "x"))),
        (["--num_gpus", "4", "t.py"], LocalJob("script", "t.py", num_ranks=4)),
        (["--nproc_per_node=gpu", "t.py"], LocalJob("script", "t.py", num_ranks="gpu")),
        (["--nproc-per-node", "cpu", "t.py"], LocalJob("script", "t.py", num_ranks="cpu")),
        (["--backend", "gloo", "t.py"], LocalJob("script", "t.py", backend="gloo")),
        (["--threads-per-rank=3", "t.py"], LocalJob("script", "t.py", threads_per_rank=3)),
        (["--log_dir", "logs", "t.py"], LocalJob("script", "t.py", log_dir=Path("logs"))),
        (["--nnodes", "1", "t.py"], LocalJob("script", "t.py")),
    ],
)
def test_command_lines(jobs, words, job):
    assert cli.main(words) == 5  # whatever the run gives
    assert jobs == [job]


@pytest.mark.parametrize(
    "words, told",
    [
        (["--qqq", "t.py"], "unknown option --qqq; see `xds --help`"),
        (["--num-gpu", "2", "t.py"], "unknown option --num-gpu; did you mean --num-gpus?"),
        (["--nproc-per-node", "0", "t.py"], "--nproc-per-node = 0: must be a number from 1, auto"),
        (["--nproc-per-node"], "expected one argument"),
        (["--threads-per-rank", "many", "t.py"], "--threads-per-rank = many: must be a number"),
        (["--nnodes", "2", "t.py"], "--nnodes = 2: xds starts ranks on one machine so far"),
        (["--backend", "glue", "t.py"], "invalid choice: 'glue'"),
        (["--module", "--no-python", "t"], "exclude one another"),
        (["--module=yes", "t"], "ignored explicit argument 'yes'"),
    ],
)
def test_what_is_refused(jobs, capsys, words, told):
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err and not jobs


def test_a_script_that_is_not_there(capsys):
    assert cli.main(["no/train.py"]) == 2
    assert "script = 'no/train.py': no such file" in capsys.readouterr().err


def test_help_and_version(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for option in (
        "--nproc-per-node",
        "--module",
        "--log-dir",
        "--backend",
        "xds check",
        "xds env",
    ):
        assert option in text
    assert "--num_gpus" not in text  # an alias
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"xds {xds.__version__}\n"
    assert cli.main([]) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["check", "--help"]])
def test_quick_answers_do_not_import_torch(words):
    script = (
        "import sys\n"
        "from xds.launcher.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
