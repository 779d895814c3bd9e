"""The command line of `xds`: options of xds, arguments of the script, and refused options."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import xds
from xds.launcher import cli
from xds.launcher.job import Host, Job, Rendezvous, Restarts
from xds.launcher.ranks import local
from xds.launcher.remote import head_per_host


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """What main() would have run, and where."""
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "run", lambda *told: seen.append(told) or 5)
    monkeypatch.setattr(head_per_host, "run_per_host", lambda *told: seen.append(told) or 6)
    for name in [*os.environ]:
        if name.startswith(("PET_", "SLURM_", "XDS_", "CUDA_VISIBLE", "NNODES", "MASTER_")):
            monkeypatch.delenv(name)
    return seen


def test_command_lines(runs):
    for line, job in {
        "train.py": Job("script", "train.py"),
        "train.py --help -m": Job("script", "train.py", ("--help", "-m")),
        "-- -odd.py -- x": Job("script", "-odd.py", ("--", "x")),
        "./check": Job("script", "./check"),
        "-m a.b env": Job("module", "a.b", ("env",)),
        "--no_python sh -c x": Job("program", "sh", ("-c", "x")),
        "--num_gpus 4 t.py": Job("script", "t.py", num_ranks=4),
        "--nproc_per_node=gpu t.py": Job("script", "t.py", num_ranks="gpu"),
        "--backend gloo --nnodes 1 t.py": Job("script", "t.py", backend="gloo"),
        "--log_dir logs t.py": Job("script", "t.py", log_dir="logs"),
    }.items():
        assert cli.main(line.split()) == 5  # whatever the run gives
        assert runs.pop() == (job, Rendezvous(), Restarts()), line


REFUSED = """
--qqq t.py | unknown option --qqq; options of the script come after its name
--stage 3 t.py | unknown option --stage; options of the script come after its name
--nproc 2 | unknown option --nproc; did you mean --nproc-per-node?
--num_processes 2 t.py | did you mean --nproc-per-node?
-np 2 t.py | did you mean --nproc-per-node?
--host a t.py | did you mean --hostfile?
--log d t.py | did you mean --log-dir or --log-level?
--max-restart 2 t.py | did you mean --max-restarts?
--nproc-per-node 2 | no script is named after the options; write `xds --nproc-per-node 2 train.py`
--num-gpu 2 t.py | unknown option --num-gpu; did you mean --num-gpus?
--nproc-per-node 0 t.py | --nproc-per-node = 0: must be a number from 1, auto
--nproc-per-node | --nproc-per-node: needs a value, N
--threads-per-rank 2 t.py | set the variable OMP_NUM_THREADS
--dry-run t.py | --dry-run: was removed
--python /p t.py | start xds with the interpreter
--backend glue t.py | --backend = glue: must be one of nccl, gloo, mpi
--module --no-python t | cannot be combined
--module=yes t | --module = yes: takes no value
--autotuning x t.py | --autotuning = x: must be one of tune, run
--hostfile hosts --launcher pigeon t.py | --launcher = pigeon: must be one of ssh, pdsh
chekc config.json | xds: chekc: neither a command nor a file; did you mean `xds check`?
"""


def test_what_is_refused(runs, capsys):
    Path("hosts").write_text("a slots=2\n")
    for row in REFUSED.strip().splitlines():
        line, told = row.split(" | ")
        assert cli.main(line.split()) == 2
        assert told in capsys.readouterr().err and not runs
    Path("chekc").touch()  # a file is a script, whatever its name
    assert cli.main(["chekc"]) == 5 and runs


def test_a_script_that_is_not_there(capsys):
    assert cli.main(["no/train.py"]) == 2
    assert "script = 'no/train.py': no such file" in capsys.readouterr().err


def test_hosts_run_through_the_head(runs):
    Path("hosts").write_text("a slots=2\nb slots=1\n")
    assert cli.main(["--hostfile", "hosts", "--launcher", "ssh", "t.py", "x"]) == 6
    ((job, hosts, remote, backend, restarts),) = runs
    assert job == Job("script", "t.py", ("x",)) and restarts == Restarts()
    assert hosts == (Host("a", (0, 1)), Host("b", (0,)))
    assert remote.folder == os.getcwd() and remote.python == sys.executable
    assert backend.name == "ssh"


def test_named_devices_are_the_visible_ones(runs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert cli.main(["--include", "localhost:1,3", "t.py"]) == 5
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert runs[0][0].num_ranks == 2


def test_options_without_effect_are_told_unless_quiet(runs, capsys):
    words = ["--tee", "3", "--role=w", "--redirects", "3", "--no_local_rank", "t.py"]
    assert cli.main(words) == 5
    err = capsys.readouterr().err
    assert "xds: --tee has no effect: every rank's output" in err and "--role has no effect" in err
    assert err.count("no effect") == 2
    assert cli.main(["-q", *words]) == 5
    assert capsys.readouterr().err == ""


def test_help_and_version(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    options = "--nproc-per-node --module --log-dir --backend --hostfile --rdzv-endpoint --include"
    commands = ("xds check", "xds env", "xds elastic", "xds bench")
    assert all(part in text for part in (*options.split(), *commands))
    assert "--num_gpus" not in text and "--dry-run" not in text  # an alias, and a refusal
    assert max(map(len, text.splitlines())) <= 112
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"xds {xds.__version__}\n"
    assert cli.main([]) == 2
    assert "usage:" in capsys.readouterr().err


def test_quick_answers_do_not_import_torch(tmp_path):
    (tmp_path / "config.json").write_text('{"train_batch_size": 8}')
    script = (
        "import sys\n"
        "from xds.launcher.cli import main\n"
        "for line in ('--help', '--version', 'check config.json', 'elastic --help',"
        " 'checkpoint export --help', '--hostfile no t'):\n"
        "    try: main(line.split())\n"
        "    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True)
