"""Hosts of a run are lost, cut off or come back: namespaces with an sshd each, and one xds at the head."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_busy_machines
from real_hosts import Hosts, why_not
from test_recovery import found_by, one_copy_config, plain

from xds.launcher.ranks.guard import LAUNCHER_KILLED
from xds.launcher.remote.holding import HOLD_SECONDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made"),
]
SCRIPT = Path(__file__).with_name("training.py")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path) -> Iterator[Start]:
    """A function that starts the script on hosts with so many slots. In the end nothing is left on them."""
    begun = []

    def begin(
        slots: Sequence[int], more: Sequence[str] = (), script: Path = SCRIPT, **environ: Any
    ) -> subprocess.Popen[str]:
        file = hosts.hostfile(slots, hosts.names[: len(slots)], file=tmp_path.name)
        lines = file.read_text().splitlines()
        with_words = zip_longest(lines, more, fillvalue="")
        file.write_text("".join(f"{line} {word}\n" for line, word in with_words))
        environ = {"OUT": tmp_path, "DEATHS": "{}", "OMP_NUM_THREADS": 1, **environ}
        lines = [f"{key}={value}\n" for key, value in environ.items()]
        (tmp_path / ".xds_env").write_text("".join(lines))
        words = [sys.executable, "-m", "xds.launcher.cli", "--recover", "--hostfile", str(file)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        own = {"PYTHONSAFEPATH": ""}
        begun.append(hosts.popen([*words, str(script)], own, cwd=tmp_path, **pipes))
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    hosts.wait_until_empty(on_busy_machines(30))
    left = [file for name in hosts.names for file in hosts.left_files(name)]
    assert [file for file in left if "xds-states" in file] == []


def ended(process: "subprocess.Popen[str]") -> str:
    _, err = process.communicate(timeout=on_busy_machines(120))
    assert process.returncode == 0, err
    return err


def wait_for(holds: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + on_busy_machines(90)
    while not holds():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def kill(hosts: Hosts, name: str) -> None:
    """All processes of a host end at once."""
    for pid in hosts.processes(name):
        with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
            os.kill(pid, signal.SIGKILL)


def remove_memory(hosts: Hosts, name: str) -> None:
    """Copies of states in the memory of a host are lost with it."""
    for path in hosts.left_files(name):
        if "xds-states" in path:
            shutil.rmtree(path, ignore_errors=True)


def check(folder: Path, ranks: Sequence[int], steps: int, num_units: int) -> None:
    """The ranks that are left have the losses, values and samples of a run without a failure."""
    losses, values = plain(steps, num_units)
    for rank, unit in enumerate(ranks):
        found = json.loads((folder / f"unit{unit}.json").read_text())
        torch.testing.assert_close(torch.tensor(found["values"]), values, rtol=1e-4, atol=1e-5)
        assert found["losses"] == pytest.approx(losses, rel=1e-4)
        assert found["samples"] == steps * 4 * num_units
        assert found["ranks"] == [rank, len(ranks)]


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_the_other_hosts_go_on_in_one_generation(
    hosts: Hosts, start: Start, tmp_path: Path, how: str
) -> None:
    process = start([1, 2], PAUSE=0.05, STEPS=30)
    wait_for((tmp_path / "step8").exists, process)
    if how == "killed":
        kill(hosts, "host1")
    else:
        hosts.cut("host1")
    try:
        err = ended(process)
        hosts.wait_until_empty(on_busy_machines(30), ["host1"])  # though nobody reaches it
    finally:
        hosts.mend("host1")
    why = "the connection ended" if how == "killed" else "no message for 2 s"
    assert f"xds: host host1 was lost ({why}); ranks 0 go on (generation 1)" in err
    assert "generation 2" not in err
    check(tmp_path, [0], 30, 3)


def test_a_spare_host_takes_the_ranks_of_the_first_one(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    process = start([2, 1, 2], ["", "", "spare"], WAITS=1, STEPS=60, PAUSE=0.01)
    wait_for((tmp_path / "step4").exists, process)
    kill(hosts, "host0")
    err = ended(process)
    assert "xds: host host0 was lost (the connection ended); ranks 2 go on (generation 1)" in err
    assert "rank 0 is there again" in err and "rank 1 is there again" in err
    check(tmp_path, [0, 1, 2], 60, 3)
    logs = list(hosts.cache("host2").glob("xds/runs/*/rank1.log"))
    assert logs, "rank 1 is on host2"


def test_a_spare_host_gets_the_only_states_of_a_lost_one_from_the_next_host(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    """Ranks 0 and 1 are lost with their memory; rank 2 is the buddy of both."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    ended(start_one_copy(start, whole, *WITH_SPARE))
    process = start_one_copy(start, lost, *WITH_SPARE, PAUSE=0.2)
    wait_for(lambda: has_taken(lost, 4), process)
    kill(hosts, "host0")
    remove_memory(hosts, "host0")
    err = ended(process)
    assert "xds: host host0 was lost (the connection ended); the other ranks wait for new" in err
    assert "new processes of ranks 0, 1 take part (generation 1)" in err
    assert found_by(lost, 3) == found_by(whole, 3)


WITH_SPARE = [2, 1, 2], ["", "", "spare"]  # slots, and words after them


def start_one_copy(
    start: Start, out: Path, slots: Sequence[int], more: Sequence[str] = (), **environ: Any
) -> "subprocess.Popen[str]":
    """Start the script whose ranks have one copy of the states. It writes into `out`."""
    out.mkdir(exist_ok=True)
    config = one_copy_config({"zero_optimization": {"stage": 1}})
    environ |= {"OUT": out, "CONFIG": config, "DEATHS": "[]"}
    return start(slots, more, SCRIPT.with_name("one_copy.py"), **environ)


def has_taken(out: Path, step: int) -> bool:
    """Rank 0 has ended this step."""
    path = out / "rank0.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def head_of(keeper: "subprocess.Popen[str]") -> int:
    """The process below `xds` that decides."""
    return int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0])


def test_another_head_goes_on_where_the_newest_states_are(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    """Ranks 0 and 1 have moved to the spare host when the head is killed, and host0 is there again."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended(start_one_copy(start, whole, *WITH_SPARE))
    process = start_one_copy(start, killed, *WITH_SPARE, PAUSE=0.3)
    wait_for(lambda: has_taken(killed, 3), process)
    kill(hosts, "host0")
    wait_for(lambda: has_taken(killed, 6), process)
    os.kill(head_of(process), signal.SIGKILL)
    err = ended(process)
    assert "host host0 was lost (the connection ended); the other ranks wait for new" in err
    assert "xds: the launcher was ended by SIGKILL: another one starts, and new ranks" in err
    assert "new processes of ranks 0, 1, 2 take part (generation 1)" in err
    assert found_by(killed, 3) == found_by(whole, 3)
    assert len(list(hosts.cache("host2").glob("xds/runs/*/rank1.log"))) >= 2
    lines = (killed / "rank0.jsonl").read_text().splitlines()
    steps = [json.loads(line).get("step") for line in lines]
    assert len(steps) - len(set(steps)) <= 4  # two of each failure


def test_states_that_no_head_takes_over_are_removed(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    process = start_one_copy(start, tmp_path, [1, 1], PAUSE=0.2)
    wait_for(lambda: has_taken(tmp_path, 3), process)
    process.kill()  # the keeper, and the kernel kills its head
    process.wait()

    def held(name: str) -> bool:
        return any(path.endswith("-versions/held") for path in hosts.left_files(name))

    deadline = time.monotonic() + on_busy_machines(20)
    while not all(map(held, hosts.names[:2])):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    hosts.wait_until_empty(HOLD_SECONDS + on_busy_machines(20))  # what is left: see `start`


def test_without_states_in_memory_a_killed_head_ends_the_run(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    process = start([1, 1], PAUSE=0.05, STEPS=1000)
    wait_for((tmp_path / "step8").exists, process)
    os.kill(head_of(process), signal.SIGKILL)
    _, err = process.communicate(timeout=on_busy_machines(60))
    assert process.returncode == 128 + signal.SIGKILL
    assert LAUNCHER_KILLED in err and "another one starts" not in err
    hosts.wait_until_empty(on_busy_machines(20))  # at once


def test_a_host_that_was_cut_off_is_refused_by_name(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    """Its node part is stopped, so that it does not end its rank."""
    process = start([2, 1], PAUSE=0.1, STEPS=200)
    wait_for((tmp_path / "step8").exists, process)
    (node,) = (pid for pid, words in hosts.processes("host1").items() if "remote.node" in words)
    os.kill(node, signal.SIGSTOP)
    hosts.cut("host1")
    try:
        wait_for((tmp_path / "step20").exists, process)
    finally:
        hosts.mend("host1")

    def log() -> str:
        found = hosts.cache("host1").glob("xds/runs/*/rank2.log")
        return "".join(path.read_text() for path in found)

    refused = (
        "rank 2 is not in generation 1 of this run, because it did not answer (host host1 was lost"
    )
    wait_for(lambda: refused in log(), process)
    os.kill(node, signal.SIGCONT)  # it finds that nobody has spoken to it
    wait_for(lambda: node not in hosts.processes("host1"), process)
    err = ended(process)
    assert "xds: host host1 is there again" in err and "rank 2 is there again (generation 2)" in err
    check(tmp_path, [0, 1, 2], 200, 3)


def test_a_run_needs_as_many_spare_hosts_as_its_config_says(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "changed.py"
    text = SCRIPT.read_text().replace('"enabled": True', '"enabled": True, "spare_hosts": 2')
    script.write_text(text)
    process = start([1, 1, 1], ["", "", "spare"], script=script)
    _, err = process.communicate(timeout=on_busy_machines(120))
    assert process.returncode == 1
    assert "recovery.spare_hosts = 2: the launcher reaches 1; write `spare` after the slots" in err


def test_a_group_whose_host_is_lost_is_left_out_and_comes_back(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    """Two sites. The group of the second one has ranks on two hosts, and meets there."""
    script = Path(__file__).parents[1] / "outer" / "groups.py"
    outer = {"groups": 2, "steps": 2, "window_seconds": 100.0, "private_network": True}
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    environ = {"OUTER": json.dumps(outer), "OPTIMIZER": json.dumps(adam), "STAGE": 1, "STEPS": 8}
    process = start(
        [2, 1, 1],
        ["site=a", "site=b", "site=b"],
        script,
        **environ,
        WAITS=1,
        PAUSES=json.dumps({0: 0.1}),
    )

    def version(rank: int) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((tmp_path / f"version{rank}").read_text())
        return 0

    wait_for(lambda: version(0) >= 2 and version(3) >= 2, process)
    kill(hosts, "host2")
    err = ended(process)
    assert "xds: host host2 was lost (the connection ended); ranks 0, 1 go on (generation 1)" in err
    assert "group 1 is gone (host host2 was lost (the connection ended)): groups 0 have held" in err
    assert "ranks 2, 3 are there again (generation 2)" in err
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert found[2]["started"] > 2 and found[3]["started"] > 2
    # after the last meeting of both groups they have the same outer parameters
    both = [
        {version: digest for _, version, _, digest in found[rank]["history"]} for rank in (0, 2)
    ]
    newest = max(both[0].keys() & both[1].keys())
    assert newest > 3 and both[0][newest] == both[1][newest]


TAIL = """
import os, time
from pathlib import Path
import torch, xds
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": int(os.environ["STAGE"])},
    "recovery": {"enabled": True},
}
engine = xds.initialize(torch.nn.Linear(4, 4), config, training_data=torch.randn(24, 4))
while engine.global_steps < 4:
    for x in engine.training_dataloader:
        engine.backward(engine(x).square().mean())
        engine.step()
        if engine.global_steps == 4:
            break
(Path(os.environ["OUT"]) / f"tail{engine.global_rank}").touch()
time.sleep(4 if os.environ["RANK"] == "0" else 60)
"""


@pytest.mark.parametrize(("stage", "num_spare"), [(0, 0), (2, 1)])
def test_what_a_lost_host_had_to_do_after_the_last_step_fails_the_run(
    hosts: Hosts, start: Start, tmp_path: Path, stage: int, num_spare: int
) -> None:
    script = tmp_path / "tail.py"
    script.write_text(TAIL)
    process = start(
        [1, 1, *[1] * num_spare], ["", "", "spare"][: 2 + num_spare], script, STAGE=stage
    )
    wait_for(lambda: all((tmp_path / f"tail{rank}").exists() for rank in (0, 1)), process)
    kill(hosts, "host1")
    remove_memory(hosts, "host1")
    _, err = process.communicate(timeout=on_busy_machines(60))
    assert process.returncode, err
    assert "nobody did what rank 1 had still to do" in err and "host1" in err
