"""Restarts after a failure, on one machine and on machines without a head process."""

import json
import os
import subprocess
import sys

import pytest

from xds.launcher.job import Rendezvous
from xds.launcher.ranks.local import Ending, Peers
from xds.launcher.ranks.network import free_port
from xds.launcher.ranks.rendezvous_store import serve
from xds.launcher.ranks.stop import Stop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

GIVES_UP_ONCE = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("start", count, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and not os.path.exists("failed"):
    open("failed", "w").close()
    raise ValueError("the first time")
dist.all_reduce(torch.ones(1))
"""
FAILS = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == os.environ["FAILS"]:
    sys.exit(7)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts xds on the text of a script, in tmp_path; it ends with the test."""
    begun = []

    def begin(script, *options, **environment):
        (tmp_path / "train.py").write_text(script)
        environment = os.environ | {"XDS_CACHE_DIR": str(tmp_path / "cache"), **environment}
        command = [sys.executable, "-m", "xds.launcher.cli", *options, "train.py"]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment | {"PYTHONSAFEPATH": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_all_ranks_start_again_after_the_failure_is_told(start, tmp_path):
    code, out, err = finish(start(GIVES_UP_ONCE, "--max-restarts", "2"))
    assert (code, out) == (0, "start 0 of 2\nstart 1 of 2\n")
    assert err.count("ValueError: the first time") == 1 and err.count("Traceback") == 1
    assert "rank 1 failed" in err and "starting every rank again (1 of 2)" in err
    (run,) = (tmp_path / "cache" / "runs").iterdir()
    log = (run / "rank0.log").read_text()  # of both starts, with rank 0's own error
    assert [line for line in log.splitlines() if line.startswith("start")] == out.splitlines()
    assert "ValueError: the first time" in (run / "rank1.log").read_text()


def test_each_start_has_a_key_of_its_own(start, tmp_path):
    tell = 'import os\nprint(os.environ["XDS_RUN_KEY"], flush=True)\nraise SystemExit(3)'
    code, out, _ = finish(
        start(tell, "--max-restarts", "1", "--nproc-per-node", "1", XDS_RUN_KEY="x")
    )
    one, two = out.split()
    assert code == 3 and len(one) == len(two) == 64 and one != two


def test_what_anybody_writes_as_a_failure_of_another_machine_is_ignored_or_escaped(monkeypatch):
    monkeypatch.delenv("XDS_RUN_KEY", raising=False)
    monkeypatch.setattr("xds.launcher.ranks.local._POLL_SECONDS", 0.01)
    place = {"run_id": "run", "max_nodes": 2, "node_rank": 0}
    meeting, store = serve(Rendezvous("static", f"127.0.0.1:{free_port()}", **place))
    stop = Stop()
    peers = Peers(meeting, stop)
    peers.start()
    for text in ("{", '{"text": 1}', '{"text": "a", "exit_code": "b"}'):
        store.set("xds/run/failed", text)
        peers.join(0.5)
        assert peers.is_alive() and peers._store is not None and not stop.signum
    store.set("xds/run/failed", json.dumps({"text": "\x1b[31mevil\nlines", "exit_code": 256 + 7}))
    peers.join(30)
    assert peers.received == Ending("\\x1b[31mevil\nlines", 7) and stop.is_for_peer


def test_restarts_end_and_the_last_failure_is_the_runs(start):
    code, _, err = finish(start("raise SystemExit(5)", "--max-restarts", "1"))
    assert code == 5 and err.count("exit code 5") == 2 and err.count("again (1 of 1)") == 1


def test_one_machine_takes_as_many_ranks_as_fit_the_elasticity_section(start, tmp_path):
    config = {
        "elasticity": {
            **{"enabled": True, "version": 0.1, "max_train_batch_size": 4},
            **{"micro_batch_sizes": [2], "min_gpus": 1, "max_gpus": 4},
        }
    }
    (tmp_path / "elastic.json").write_text(json.dumps(config))
    options = ("--elastic-config", "elastic.json", "--nproc-per-node", "3")
    code, out, err = finish(start("import os; print(os.environ['WORLD_SIZE'])", *options))
    assert (code, out) == (0, "2\n"), err


@pytest.mark.slow
def test_machines_without_a_head_tell_one_another_of_a_failure_and_end_with_its_exit_code(start):
    """The rank that fails is once beside the store in which the machines met, and once not."""
    for rank in ("0", "1"):
        options = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0")
        meeting = ("--rdzv-backend", "static", "--master-addr", "127.0.0.1")
        meeting += ("--master-port", str(free_port()))
        machines = [
            start(FAILS, *options, *meeting, "--node-rank", str(number), FAILS=rank)
            for number in range(2)
        ]
        ended = [finish(machine) for machine in machines]
        assert [code for code, _, _ in ended] == [7, 7], ended
        for number, (_, _, err) in enumerate(ended):
            assert f"rank {rank} failed" in err and "exit code 7" in err
            assert ("another machine reports" in err) == (str(number) != rank)
