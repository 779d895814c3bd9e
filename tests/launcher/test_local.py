"""Complete runs of the `xds` command on small scripts: output, exit code, remaining processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from xds.launcher.ranks import worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MARK = "XDS_TEST_MARK"  # in the environment of every process of one test
PATIENCE_SECONDS = 60.0

WAIT_FOR_EVER = """
    import time
    from pathlib import Path
    Path(f"here{os.environ['RANK']}").touch()
    while True:
        time.sleep(0.1)
"""

GLOO = """
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts xds on the text of a script, in tmp_path; it ends with the test."""
    mark = str(uuid.uuid4())
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    begun = []

    def begin(script, *options, before="", args=(), **settings):
        lines = ["import os, sys", textwrap.dedent(before), textwrap.dedent(script)]
        (tmp_path / "train.py").write_text("\n".join(lines))
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment |= {MARK: mark, "TMPDIR": str(temporary), "PYTHONSAFEPATH": ""}
        environment["XDS_CACHE_DIR"] = str(tmp_path / "cache")
        process = subprocess.Popen(
            [sys.executable, "-m", "xds.launcher.cli", *(options or ("train.py",)), *args],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **settings,
        )
        begun.append(process)
        return process

    begin.mark = mark
    begin.temporary = temporary
    yield begin
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    for process in begun:
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out, err


def marked(mark):
    """Living processes that carry `mark` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if is_ours:
            found.append(int(entry.name))
    return found


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def wait_for_ranks(folder, num_ranks=2):
    wait_until(lambda: len(list(folder.glob("here*"))) == num_ranks, "every rank runs")


def test_a_good_run_passes_arguments_and_environment_and_leaves_nothing(start, tmp_path):
    (tmp_path / "sibling.py").write_text("NAME = 'sibling'\n")
    code, out, err = finish(
        start(
            """
            import json, multiprocessing, sibling
            from pathlib import Path
            names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"]
            names += ["OMP_NUM_THREADS", "XDS_BACKEND"]
            def double(x):
                return 2 * x
            if __name__ == "__main__":
                told = {name: os.environ.get(name) for name in names}
                told |= {"argv": sys.argv, "sibling": sibling.NAME, "file": __file__}
                told["spawned"] = multiprocessing.get_context("spawn").Pool(1).map(double, [21])
                Path(f"told{os.environ['RANK']}.json").write_text(json.dumps(told))
                print("to stdout"); print("to stderr", file=sys.stderr)
            """,
            *("--num_gpus", "3", "--backend=gloo", "train.py"),
            args=("--help", "$$ ${local_rank}", "--", "-x"),
        )
    )
    assert (code, out, err) == (0, "to stdout\n", "to stderr\n")  # rank 0's alone
    told = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in range(3)]
    assert [each["RANK"] for each in told] == ["0", "1", "2"]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "2"]
    assert told[1]["WORLD_SIZE"] == "3" and told[1]["MASTER_ADDR"] == "127.0.0.1"
    assert told[1]["argv"] == ["train.py", "--help", "$$ ${local_rank}", "--", "-x"]
    assert int(told[1]["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert told[1]["XDS_BACKEND"] == "gloo"
    assert told[1]["sibling"] == "sibling" and told[1]["spawned"] == [42]
    assert told[1]["file"] == str(tmp_path / "train.py")
    assert not list(start.temporary.iterdir()) and not marked(start.mark)


def test_an_installation_through_a_link_imports_what_lies_beside_the_script(
    start, tmp_path, monkeypatch
):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "xds").symlink_to(Path(__file__).parents[2])
    (tmp_path / "sibling.py").write_text("NAME = 'sibling'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "linked"))
    code, out, err = finish(start("import sibling; print(sibling.NAME)"))
    assert (code, out, err) == (0, "sibling\n", "")


@pytest.mark.slow
def test_an_exception_is_told_once_though_the_peer_fails_too(start):
    code, out, err = finish(
        start(
            """
            print(f"rank {rank} speaks")
            if rank == 1:
                print("a warning of rank 1", file=sys.stderr)
                raise ValueError("the data of rank 1 are wrong")
            dist.all_reduce(torch.ones(1))
            """,
            before=GLOO,
        )
    )
    assert code == 1
    assert out == "rank 0 speaks\n"
    assert err.count("Traceback") == 1
    assert err.count("ValueError: the data of rank 1 are wrong") == 1
    assert "rank 1 failed" in err and "exit code 1" in err
    assert "worker.py" not in err and "runpy" not in err  # the user's frames only
    log = Path(err.rpartition("full output of rank 1: ")[2].strip())
    assert "rank 1 speaks\na warning of rank 1\n" in log.read_text()


def test_the_exit_code_is_the_scripts(start, tmp_path):
    script = """
        print("last words", os.environ["RANK"])
        if os.environ["RANK"] == "1":
            sys.exit(3)
        import time
        time.sleep(60)
    """
    code, _, err = finish(start(script, "--log-dir", "logs", "train.py"))
    assert code == 3
    assert "rank 1 failed" in err and "exit code 3" in err and "| last words 1" in err
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {
        "rank0.log",
        "rank1.log",
        "rank1.error.json",
    }
    assert not list(start.temporary.iterdir())


def test_a_killed_rank_gives_128_plus_the_signal_and_is_not_blamed_on_its_peer(start):
    code, _, err = finish(
        start(
            """
            import signal
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
            """,
            before=GLOO,
        )
    )
    assert code == 137
    assert "rank 1 failed" in err and "SIGKILL" in err and "Traceback" not in err


def test_a_crash_shows_the_frames_it_happened_in(start):
    code, _, err = finish(
        start(
            """
            import ctypes
            def crash():
                ctypes.string_at(0)
            crash()
            """,
            *("--nproc-per-node", "1", "train.py"),
        )
    )
    assert code == 139
    assert "rank 0 failed" in err and "SIGSEGV" in err and err.count("in crash") == 1


@pytest.mark.slow
def test_a_rank_that_fails_but_does_not_end_is_stopped(start, monkeypatch):
    """A thread that never ends keeps rank 1's process, so its peer would wait for ever."""
    script = """
        import threading, time
        if os.environ["RANK"] == "0":
            time.sleep(600)
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("stuck behind a thread")
    """
    code, _, err = finish(start(script))
    assert code == 1 and err.count("ValueError: stuck behind a thread") == 1


def test_a_module_runs_like_python_m(start, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("WORD = 'relative'\n")
    (package / "go.py").write_text(
        "import sys\nfrom .part import WORD\nprint(__name__, WORD, sys.argv[1:], __package__)\n"
    )
    options = ("-m", "--nproc-per-node", "1", "package.go", "--lr", "1")
    code, out, err = finish(start("", *options))
    assert (code, out, err) == (0, "__main__ relative ['--lr', '1'] package\n", "")


def test_a_module_of_xds_imports_nothing_from_the_working_folder(tmp_path):
    """It may be a folder where other users put files."""
    for name in ("pydantic", "torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working folder')")
    command = [sys.executable, worker.__file__, "module", "xds.ops.watch.config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_of_any_kind(start):
    command = ("--no-python", "--nproc-per-node", "1", "sh", "-c", 'echo "rank $RANK"; exit 7')
    code, out, err = finish(start("", *command))
    assert (code, out) == (7, "rank 0\n") and "exit code 7" in err


@pytest.mark.parametrize(
    "signum, expected",
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_stops_every_rank_even_a_deaf_one(start, tmp_path, signum, expected):
    deaf = """
        import signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"])
    """
    process = start(WAIT_FOR_EVER, before=deaf if signum == signal.SIGTERM else "")
    wait_for_ranks(tmp_path)
    process.send_signal(signum)
    code, _, err = finish(process)
    assert code == expected
    assert "Traceback" not in err and "stopping every rank" in err
    wait_until(lambda: not marked(start.mark), "no process is left")
    assert not list(start.temporary.iterdir())


def test_the_ranks_die_with_a_killed_launcher(start, tmp_path):
    process = start(WAIT_FOR_EVER)
    wait_for_ranks(tmp_path)
    process.kill()
    process.communicate()
    wait_until(lambda: not marked(start.mark), "no process is left")


HAS_CHILDREN = """
    import os, subprocess, sys, time
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)  # as a shell's jobs
    os.system("sh -c 'sleep 600 & sleep 600 &'")  # children of nobody
    deaf = "import signal, time; [signal.signal(each, signal.SIG_IGN) for each in (1, 2, 15)]; time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", deaf])
    if not os.fork():  # as a worker of a data loader
        while True:
            time.sleep(0.1)
    time.sleep(0.3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "its group"])
def test_what_ranks_had_started_dies_with_a_killed_launcher(start, tmp_path, whom):
    process = start(WAIT_FOR_EVER, before=HAS_CHILDREN, start_new_session=True)
    wait_for_ranks(tmp_path)
    assert len(marked(start.mark)) > 2 * 6
    os.killpg(process.pid, signal.SIGKILL) if whom == "its group" else process.kill()
    process.communicate()
    wait_until(lambda: not marked(start.mark), "no process is left")


@pytest.mark.slow
def test_what_a_failed_rank_had_started_is_swept_in_whatever_group_it_is(start, tmp_path):
    process = start("sys.exit(3)", before=HAS_CHILDREN)
    assert finish(process)[0] == 3
    wait_until(lambda: not marked(start.mark), "no process is left")
