"""Complete runs of the `xds` command on one machine: output, exit code, restarts, remaining processes."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest
import stuck
from forked_launcher import ForkedLauncher

from xds.launcher.job import Rendezvous
from xds.launcher.ranks import worker
from xds.launcher.ranks.local import Arrivals, Ending, Peers
from xds.launcher.ranks.network import free_port
from xds.launcher.ranks.rendezvous_store import serve
from xds.launcher.ranks.run_folder import RunFolder
from xds.launcher.ranks.stop import Stop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).parents[2]
MARK = "XDS_TEST_MARK"  # in the environment of every process of one test
PATIENCE_SECONDS = 150.0  # generous: the machine may be busy


@pytest.fixture
def start(tmp_path):
    """A function that starts xds on the text of a script, in tmp_path; it ends with the test."""
    mark, begun = str(uuid.uuid4()), []
    (tmp_path / "temporary").mkdir()

    def begin(script, *words, forked=True, output="", seconds=None, **variables):
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment |= {MARK: mark, "TMPDIR": str(tmp_path / "temporary"), "PYTHONSAFEPATH": ""}
        environment |= {"XDS_CACHE_DIR": str(tmp_path / "cache"), **variables}
        words = words or ("train.py",)
        if forked:
            process = ForkedLauncher(words, tmp_path, environment, output=output, seconds=seconds)
        else:
            command = [sys.executable, "-m", "xds.launcher.cli", *words]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            environment |= stuck.STACKS_ON_ABORT
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)
        begun.append(process)
        return process

    begin.mark = mark
    yield begin
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
            os.kill(pid, signal.SIGKILL)
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.communicate()


# ranks that do not end are killed after seconds else
SHORT = {
    "xds.launcher.ranks.supervise:_FAILED_RANK_SECONDS": 1.0,
    "xds.launcher.ranks.stop:_SIGTERM_AFTER_SECONDS": 0.5,
    "xds.launcher.ranks.stop:_SIGKILL_AFTER_SECONDS": 1.0,
}


def finish(process):
    return stuck.finish(process, PATIENCE_SECONDS)


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


def wait_for_two(folder, what="here"):
    wait_until(lambda: all((folder / f"{what}{rank}").exists() for rank in (0, 1)), what)


def test_ranks_get_arguments_and_variables_and_leave_nothing_behind(start, tmp_path):
    """Through an installation by a link, with as many ranks as the elasticity section allows."""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "xds").symlink_to(ROOT)
    (tmp_path / "sibling.py").write_text("NAME = 'sibling'\n")
    elasticity = {"enabled": True, "version": 0.1, "micro_batch_sizes": [2]}
    elasticity |= {"max_train_batch_size": 4, "min_gpus": 1, "max_gpus": 4}
    (tmp_path / "elastic.json").write_text(json.dumps({"elasticity": elasticity}))
    script = """
        import json, multiprocessing, os, sibling, sys
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "XDS_BACKEND"]
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            told = {name: os.environ.get(name) for name in names}
            told |= {"argv": sys.argv, "sibling": sibling.NAME, "file": __file__}
            told["spawned"] = multiprocessing.get_context("spawn").Pool(1).map(double, [21])
            with open(f"told{os.environ['RANK']}.json", "w") as file:
                json.dump(told, file)
            print("to stdout"); print("to stderr", file=sys.stderr)
    """
    options = ("--num_gpus", "3", "--elastic-config", "elastic.json", "--backend=gloo")
    arguments = ("--help", "$$ ${local_rank}", "--", "-x")
    linked = {"forked": False, "PYTHONPATH": str(tmp_path / "linked")}
    process = start(script, *options, "train.py", *arguments, **linked)
    assert finish(process) == (0, "to stdout\n", "to stderr\n")  # rank 0's alone
    told = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in range(2)]
    assert [each["RANK"] for each in told] == ["0", "1"]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1"]
    assert told[1]["WORLD_SIZE"] == "2" and told[1]["MASTER_ADDR"] == "127.0.0.1"
    assert told[1]["argv"] == ["train.py", *arguments]
    assert int(told[1]["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert told[1]["XDS_BACKEND"] == "gloo"
    assert told[1]["sibling"] == "sibling" and told[1]["spawned"] == [42]
    assert told[1]["file"] == str(tmp_path / "train.py")
    assert not list((tmp_path / "temporary").iterdir()) and not marked(start.mark)


FAILS_IN_FOUR_WAYS = """
    import ctypes, os, signal, sys, threading, time
    count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
    print("start", count, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["XDS_RUN_KEY"], flush=True)
    if count == 0:
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == "1":
            print("a warning of rank 1", file=sys.stderr)
            raise ValueError("the data of rank 1 are wrong")
        dist.all_reduce(torch.ones(1))
    if rank == "0":
        open(f"started{count}", "w").close()
        time.sleep(600)
    while count and not os.path.exists(f"started{count}"):  # else rank 0 could end before its line
        time.sleep(0.01)
    if count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if count == 2:
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        def crash():
            ctypes.string_at(0)
        crash()
    print("last words")
    threading.Thread(target=time.sleep, args=(600,)).start()  # keeps the process
    sys.exit(3)
"""


def test_each_failure_is_told_once_before_the_restart_and_the_last_exit_code_is_the_runs(
    start, tmp_path
):
    """An exception whose peer fails in a collective, a signal, a crash, an exit code behind a thread."""
    options = ("--max-restarts", "3", "--nproc-per-node", "2", "--log-dir", "logs", "train.py")
    run = start(FAILS_IN_FOUR_WAYS, *options, seconds=SHORT, XDS_RUN_KEY="of the run around it")
    code, out, err = finish(run)
    assert code == 3
    starts = [line.rsplit(" ", 1) for line in out.splitlines()]
    assert [line for line, _ in starts] == [f"start {count} of 3" for count in range(4)]
    keys = {key for _, key in starts}
    assert len(keys) == 4 and {len(key) for key in keys} == {64}
    told = err.split("starting every rank again")
    assert len(told) == 4 and told[3].startswith(" (3 of 3)")
    assert all(part.count("rank 1 failed") == 1 and "rank 0" not in part for part in told)
    assert told[0].count("Traceback") == 1 and "exit code 1" in told[0]
    assert told[0].count("ValueError: the data of rank 1 are wrong") == 1
    assert "worker.py" not in told[0] and "runpy" not in told[0]  # the user's frames only
    assert "killed by SIGKILL, exit code 137" in told[1]
    assert "SIGSEGV" in told[2] and told[2].count("in crash") == 1
    assert "exit code 3" in told[3] and "| last words" in told[3]
    logs = tmp_path / "logs"
    assert {"rank0.log", "rank1.log", "rank1.error.json"} <= {file.name for file in logs.iterdir()}
    assert [line for line in (logs / "rank0.log").read_text().splitlines() if "start" in line] == (
        out.splitlines()
    )
    assert "a warning of rank 1" in (logs / "rank1.log").read_text()
    assert not list((tmp_path / "temporary").iterdir()) and not marked(start.mark)


STARTS_OTHERS = """
    import os, signal, subprocess, sys, time
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)  # as a shell's jobs
    os.system("sh -c 'sleep 600 & sleep 600 &'")  # children of nobody
    if not os.fork():  # as a worker of a data loader
        for each in (1, 2, 15):
            signal.signal(each, signal.SIG_IGN)
        time.sleep(600)
    if os.environ.get("DEAF"):
        for each in (1, 15):
            signal.signal(each, signal.SIG_IGN)
    time.sleep(0.2)
    print("rank", os.environ["RANK"])
    open(f"here{os.environ['RANK']}", "w").close()
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("name", ["SIGHUP", "SIGKILL"])
@pytest.mark.quick("SIGKILL")
def test_a_signal_to_the_launcher_ends_the_ranks_and_whatever_they_started(start, tmp_path, name):
    """SIGHUP: of a terminal that is closed, to ranks that ignore it. SIGKILL: to the whole process group."""
    master, slave = pty.openpty()
    words = ("--no-python", sys.executable, "-u", "train.py") if name == "SIGHUP" else ()
    deaf = "1" if name == "SIGHUP" else ""
    process = start(STARTS_OTHERS, *words, output=os.ttyname(slave), seconds=SHORT, DEAF=deaf)
    wait_for_two(tmp_path)
    os.close(slave)
    assert len(marked(start.mark)) > 2 * 5
    if name == "SIGHUP":
        assert os.read(master, 100) == b"rank 0\r\n"
        os.close(master)
        process.send_signal(signal.SIGHUP)  # what the kernel sends to who has it for its own
        assert process.wait(PATIENCE_SECONDS) == 129
        assert not list((tmp_path / "temporary").iterdir())
    else:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(master)
    wait_until(lambda: not marked(start.mark), "no process is left")


def test_ranks_save_when_asked_to_stop_though_nobody_reads_what_they_print(start, tmp_path):
    """As where a batch system ends `xds train.py | tee log`: tee goes first."""
    # as an engine with checkpoint.preemption_save_dir: a handler that notes, a save at the end of a step
    saves = """
        import os, signal, sys, time
        rank, asked = os.environ["RANK"], []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        open(os.environ["XDS_GRACE_FILE"], "w").write("30")
        open(f"here{rank}", "w").close()
        number = 0
        while not asked:
            number += 1
            print("step", number, file=sys.stderr if number % 2 else sys.stdout)
            time.sleep(0.005)
        print("s" * 200_000)
        open(f"saved{rank}", "w").close()
        sys.exit(143)
    """
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    process = start(saves, output=str(tmp_path / "pipe"))
    wait_for_two(tmp_path)
    os.close(reader)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 143
    wait_for_two(tmp_path, "saved")


@pytest.mark.slow
def test_machines_without_a_head_tell_one_another_of_a_failure_and_end_with_its_exit_code(start):
    """The rank that fails is not beside the store in which the machines met."""
    script = """
        import os, sys, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(600)
    """
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "static")
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    machines = [
        start(script, *options, *meeting, "--node-rank", str(number), "train.py", forked=False)
        for number in range(2)
    ]
    ended = [finish(machine) for machine in machines]
    assert [code for code, _, _ in ended] == [7, 7], ended
    assert all("rank 1 failed" in err and "exit code 7" in err for _, _, err in ended)
    assert ["another machine reports" in err for _, _, err in ended] == [True, False]


LISTENS = """
import threading, time
import pydantic
from xds.launcher.job import Rendezvous
from xds.launcher.ranks import local
from xds.launcher.ranks.network import free_port
from xds.launcher.ranks.stop import Stop
from xds.launcher.ranks.supervise import import_torch

local._POLL_SECONDS = 0.01
port = free_port()
agent = threading.Thread(target=import_torch)
with local.Peers(Rendezvous("static", f"127.0.0.1:{port}", max_nodes=2), Stop()) as peers:
    agent.start()
    agent.join()
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while peers.is_alive() and peers._store is None:
        time.sleep(0.01)
    print(peers._store is not None)
"""


@pytest.mark.slow
def test_the_agent_and_the_thread_that_listens_import_torch_at_the_same_time():
    """Python's import of a package in one thread and of its module in another raises errors in both."""
    environ = os.environ | {"TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run(
        [sys.executable, "-c", LISTENS], env=environ, capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_failure_is_published_though_the_thread_that_listens_still_tries_to_connect(monkeypatch):
    monkeypatch.delenv("XDS_RUN_KEY", raising=False)
    monkeypatch.setattr("xds.launcher.ranks.local._POLL_SECONDS", 0.01)
    monkeypatch.setattr("xds.launcher.ranks.local._DELIVERY_SECONDS", 0.0)
    place = {"run_id": "run", "max_nodes": 2, "node_rank": 0}
    meeting, store = serve(Rendezvous("static", f"127.0.0.1:{free_port()}", **place))
    peers, tries, is_over = Peers(meeting, Stop()), threading.Event(), threading.Event()
    connect = peers._connect

    def hesitate():
        if threading.current_thread() is peers:
            tries.set()
            is_over.wait()
        return connect()

    monkeypatch.setattr(peers, "_connect", hesitate)
    peers.start()
    tries.wait()
    peers.publish("rank 1 failed", 7)
    assert json.loads(store.get("xds/run/failed")) == {"text": "rank 1 failed", "exit_code": 7}
    is_over.set()
    peers.join()


def test_what_anybody_writes_as_a_failure_of_another_machine_is_ignored_or_escaped(monkeypatch):
    monkeypatch.delenv("XDS_RUN_KEY", raising=False)
    monkeypatch.setattr("xds.launcher.ranks.local._POLL_SECONDS", 0.01)
    place = {"run_id": "run", "max_nodes": 2, "node_rank": 0}
    meeting, store = serve(Rendezvous("static", f"127.0.0.1:{free_port()}", **place))
    stop = Stop()
    peers = Peers(meeting, stop)
    peers.start()
    wait_until(lambda: peers._store is not None, "it has joined the store")
    for text in ("{", '{"text": 1}', '{"text": "a", "exit_code": "b"}'):
        store.set("xds/run/failed", text)
        peers.join(0.2)
        assert peers.is_alive() and peers._store is not None and not stop.signum
    store.set("xds/run/failed", json.dumps({"text": "\x1b[31mevil\nlines", "exit_code": 256 + 7}))
    peers.join(30)
    assert peers.received == Ending("\\x1b[31mevil\nlines", 7) and stop.is_for_peer


def test_a_machine_without_rank_0_says_that_it_waits_and_where_its_output_is(
    monkeypatch, capfd, tmp_path
):
    monkeypatch.setattr("xds.launcher.ranks.local._POLL_SECONDS", 0.01)
    monkeypatch.setattr("xds.launcher.ranks.local._ARRIVAL_SECONDS", 0.0)
    folder = RunFolder(tmp_path)
    arrivals, shown = (
        Arrivals(Rendezvous("static", "a:29500", min_nodes=2, max_nodes=2), folder),
        [],
    )

    def has_said(words):
        shown.append(capfd.readouterr().err)
        return words in "".join(shown)

    with arrivals:
        wait_until(lambda: has_said("the run needs 2, and they meet at a:29500"), "it says so")
        folder.prepare([2, 3], is_first=True)
        arrivals.join(30)
    assert has_said(f"xds: output of ranks 2, 3: {tmp_path}\n")
    assert "".join(shown).count("waiting for other machines") == 1
    quiet = RunFolder(tmp_path)
    quiet.prepare([1], is_first=True)
    monkeypatch.setenv("XDS_LOG_LEVEL", "warning")
    Arrivals(Rendezvous("static", "a:29500", min_nodes=2, max_nodes=2), quiet).run()
    assert not capfd.readouterr().err


# -- a rank alone, without the launcher -----------------------------------------------------------------


def run_worker(folder, *words, **variables):
    return subprocess.run(
        [sys.executable, worker.__file__, *words],
        cwd=folder,
        env=os.environ | {"PYTHONSAFEPATH": "", **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_a_module_runs_as_by_python_m_and_those_of_xds_import_nothing_from_the_working_folder(
    tmp_path,
):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("WORD = 'relative'\n")
    (tmp_path / "package" / "go.py").write_text(
        "import sys\nfrom .part import WORD\nprint(__name__, WORD, sys.argv[1:], __package__)\n"
    )
    done = run_worker(tmp_path, "module", "package.go", "--lr", "1")
    assert (done.stdout, done.stderr) == ("__main__ relative ['--lr', '1'] package\n", "")
    for name in ("pydantic", "torch", "numpy"):  # another user's, where the folder is shared
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working folder')")
    done = run_worker(tmp_path, "module", "xds.ops.watch.config")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_keeps_its_files_to_its_user(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('secret')")
    files = {"XDS_RANK_FILES": f"{tmp_path}/rank1"}
    files["TORCHELASTIC_ERROR_FILE"] = f"{tmp_path}/rank1.error.json"
    before = os.umask(0)
    try:
        done = run_worker(tmp_path, "script", str(tmp_path / "train.py"), RANK="1", **files)
    finally:
        os.umask(before)
    assert done.returncode == 1
    written = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("rank1.*")}
    assert set(written) >= {"rank1.log", "rank1.error.json", "rank1.fault.txt"}
    assert set(written.values()) == {0o600}
