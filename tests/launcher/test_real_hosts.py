"""`xds --hostfile` on hosts in network namespaces, each with an sshd: ranks, failures, signals, restarts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import stuck
from real_hosts import HEAD, NOWHERE, Hosts, why_not

from xds.launcher.remote.backends import BACKENDS
from xds.utils.errors import UsageError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

PATIENCE_SECONDS = 150.0  # generous: the machine may be busy
END_SECONDS = 60.0  # generous, too
XDS = [sys.executable, "-m", "xds.launcher.cli"]
OF_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# Every script: `here("name")` leaves a file that the test waits for, `until("name")` waits for the test.
BEGIN = """
import json, os, signal, socket, sys, time
from pathlib import Path
SHARED = Path({shared!r})
RANK, AGAIN = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def here(name, text=""):
    part = SHARED / f".{{name}}.{{RANK}}"
    part.write_text(str(text))
    part.rename(SHARED / name)
def until(name):
    while not (SHARED / name).exists():
        time.sleep(0.01)
def for_ever():
    here(f"there{{RANK}}")
    while True:
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        yield made


@pytest.fixture
def two(hosts):
    """host0 with two slots, host1 with one: ranks 0 and 1, and rank 2. In the end nothing is left on them."""
    yield str(hosts.hostfile([2, 1], hosts.names[:2], file="two"))
    hosts.wait_until_empty(END_SECONDS)
    assert [file for name in hosts.names for file in hosts.left_files(name)] == []


@pytest.fixture
def start(hosts, tmp_path):
    """A function that starts xds on the text of a script, with the shared folder tmp_path/shared."""
    shared = tmp_path / "shared"
    shared.mkdir()
    begun = []

    def begin(script, *options, name="train.py", args=(), env=None, folder=tmp_path):
        for file in shared.iterdir():
            file.unlink()
        (folder / name).write_text(BEGIN.format(shared=str(shared)) + textwrap.dedent(script))
        process = hosts.popen(
            [*XDS, *options, name, *args],
            {
                "PYTHONSAFEPATH": "",
                "OMP_NUM_THREADS": "1",
                **OF_ROOT,
                **stuck.STACKS_ON_ABORT,
                **(env or {}),
            },
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end(process):
    """Its exit code and what it printed."""
    return stuck.finish(process, PATIENCE_SECONDS)


def wait_for(shared, *names):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all((shared / name).exists() for name in names):
        assert time.monotonic() < deadline, f"not all of {names} in time"
        time.sleep(0.01)
    return [(shared / name).read_text() for name in names]


def all_there(shared):
    """Wait for three ranks to be in `for_ever`."""
    wait_for(shared, "there0", "there1", "there2")


HOSTILE = [
    "a b",
    "$HOME",
    "$(touch pwned)",
    "`touch pwned`",
    "it's",
    '"',
    "x\ny",
    ";&|<>*?",
    "\\",
    "",
]


@pytest.mark.slow
def test_ranks_of_two_hosts_form_one_group_with_literal_words_and_rank_0_is_heard_live(
    hosts, start, tmp_path
):
    folder = tmp_path / "we ird'$(touch pwned)`touch pwned`;\n\"&"
    folder.mkdir()
    name = "tr ain';$(touch pwned).py"
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(RANK)])
        dist.all_reduce(total)
        keys = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
        place = [socket.gethostname(), *(os.environ[key] for key in keys)]
        here(f"told{RANK}", json.dumps([place, os.getcwd(), sys.argv]))
        print(total.item(), "of rank", RANK, flush=True)
        print("trouble of rank", RANK, file=sys.stderr, flush=True)
        until("go")
    """
    file = str(hosts.hostfile(1, hosts.names[:2]))
    process = start(script, "--hostfile", file, name=name, args=HOSTILE, folder=folder)
    assert process.stdout.readline() == "1.0 of rank 0\n"  # it has not ended
    told = wait_for(tmp_path / "shared", "told0", "told1")
    (tmp_path / "shared" / "go").touch()
    address = hosts.address("host0")
    assert [json.loads(text) for text in told] == [
        [place, str(folder), [name, *HOSTILE]]
        for place in (
            ["host0", "0", "2", "1", "0", address],
            ["host1", "0", "2", "1", "1", address],
        )
    ]
    assert end(process) == (0, "", "trouble of rank 0\n")
    (log,) = hosts.cache("host1").glob("xds/runs/*/rank1.log")
    assert log.read_text() == "1.0 of rank 1\ntrouble of rank 1\n"
    hosts.wait_until_empty(END_SECONDS)
    assert [left for name in hosts.names for left in hosts.left_files(name)] == []
    assert not list(tmp_path.rglob("pwned")) and not (Path.home() / "pwned").exists()


@pytest.mark.slow
def test_every_failure_on_another_host_is_told_once_and_starts_every_rank_again(
    two, start, tmp_path
):
    """The ranks on the first host ignore the request to end, or lose their peer in a collective."""
    process = start(
        """
        here(f"began{AGAIN}.{RANK}")
        if RANK == 2:
            until(f"began{AGAIN}.0")
            until(f"began{AGAIN}.1")
        if AGAIN == 0:
            import torch.distributed as dist
            dist.init_process_group("gloo")
            dist.barrier()
            if RANK == 2:
                raise ValueError("out of spoons")
            dist.barrier()
        if RANK != 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for_ever()
        if AGAIN == 1:
            import ctypes, resource
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        print("last words", flush=True)
        sys.exit(3)
        """,
        *("--hostfile", two, "--max-restarts", "2"),
    )
    code, out, err = end(process)
    assert (code, out) == (3, "")
    told = err.split("starting every rank again")
    assert len(told) == 3, err
    for part, words in zip(
        told, ("ValueError: out of spoons", "Segmentation", "| last words"), strict=True
    ):
        assert part.count("xds: rank 2 failed on host1:") == part.count("failed on") == 1, err
        assert part.count(words) == 1, err
    names = {path.name for path in (tmp_path / "shared").glob("began*")}
    assert names == {f"began{again}.{rank}" for again in range(3) for rank in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["connection", "link"])
def test_a_host_that_is_lost_is_named_and_ends_the_run_on_both_sides(
    what, hosts, two, start, tmp_path
):
    process = start("for_ever()", "--hostfile", two, env={"XDS_HEARTBEAT_SECONDS": "5"})
    all_there(tmp_path / "shared")
    if what == "link":
        hosts.cut("host1")
    else:
        found = hosts.processes(HEAD).items()
        os.kill(
            min(pid for pid, words in found if words.startswith("ssh ") and " host1 " in words),
            signal.SIGKILL,
        )
    try:
        hosts.wait_until_empty(END_SECONDS)  # host1 as well, which nobody may reach
        code, _, err = end(process)
    finally:
        hosts.mend("host1")
    assert code != 0 and "host host1 was lost" in err


@pytest.mark.slow
def test_a_head_that_is_killed_leaves_no_process_anywhere(hosts, two, start, tmp_path):
    process = start("for_ever()", "--hostfile", two)
    all_there(tmp_path / "shared")
    process.kill()
    process.wait()
    hosts.wait_until_empty(END_SECONDS, [*hosts.names, HEAD])


@pytest.mark.slow
def test_a_host_that_cannot_be_used_is_named_with_the_reason_and_nothing_is_started(
    hosts, two, start, tmp_path
):
    began = "here(f'began{RANK}')"
    file = hosts.hostfile(1, ["host0", NOWHERE, "host1"], file="nowhere")
    code, _, err = end(start(began, "--hostfile", str(file)))
    assert code != 0
    assert f"host {NOWHERE} cannot be reached" in err and "No route to host" in err, err
    assert list((tmp_path / "shared").iterdir()) == []

    with hosts.locked("host1"):
        code, _, err = end(start(began, "--hostfile", two))
    assert code == 255
    assert "host host1 cannot be reached" in err and "Permission denied" in err, err
    assert list((tmp_path / "shared").iterdir()) == []

    folder = Path(sys.executable).parent
    if str(tmp_path).startswith(str(folder)) or folder in (Path("/usr/bin"), Path("/bin")):
        return  # the interpreter shares its folder with what a host needs
    with hosts.hidden("host1", folder):
        code, _, err = end(start(began, "--hostfile", two))
    assert code in (126, 127)
    assert "host host1 cannot be reached" in err and sys.executable in err, err
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_fewer_hosts_and_grows_again(hosts, start, tmp_path):
    process = start(
        """
        here(f"began{AGAIN}.{os.environ['WORLD_SIZE']}.{RANK}")
        until("done")
        """,
        *("--hostfile", str(hosts.hostfile(1, file="three"))),
        *("--min-elastic-nodes", "2", "--max-restarts", "3"),
        env={"XDS_HEARTBEAT_SECONDS": "5"},
    )
    shared = tmp_path / "shared"
    wait_for(shared, *(f"began0.3.{rank}" for rank in range(3)))
    hosts.cut("host2")
    try:
        wait_for(shared, "began1.2.0", "began1.2.1")
    finally:
        hosts.mend("host2")
    wait_for(shared, *(f"began2.3.{rank}" for rank in range(3)))
    (shared / "done").touch()
    code, _, err = end(process)
    assert code == 0 and err.count("host host2 was lost") == 1
    hosts.wait_until_empty(END_SECONDS)


def why_no(launcher):
    """Why its program cannot be used here; "" where it can."""
    try:
        BACKENDS[launcher].check()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_the_real_mpirun_ends_with_a_failure_and_with_a_signal(hosts, start, tmp_path):
    try:
        BACKENDS["openmpi"].check()
    except UsageError as error:
        pytest.skip(str(error))
    options = ("--hostfile", str(hosts.hostfile(1, hosts.names[:2])), "--launcher", "openmpi")
    script = """
        if RANK == 1:
            raise ValueError("on purpose")
        for_ever()
        """
    code, _, err = end(start(script, *options))
    assert code == 1 and err.count("ValueError: on purpose") == 1, err
    assert "rank 1 failed on host1" in err
    hosts.wait_until_empty(END_SECONDS)

    process = start("for_ever()", *options)
    wait_for(tmp_path / "shared", "there0", "there1")
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = end(process)
    assert code == 128 + signal.SIGTERM, err
    hosts.wait_until_empty(END_SECONDS)
