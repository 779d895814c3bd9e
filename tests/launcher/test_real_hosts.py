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
from real_hosts import HEAD, NOWHERE, Hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

PATIENCE_SECONDS = 150.0  # generous: the machine may be busy
END_SECONDS = 10.0
XDS = [sys.executable, "-m", "xds.launcher.cli"]

# Every script: `here("name")` leaves a file that the test waits for, `until("name")` waits for the test.
BEGIN = """
import os, signal, socket, sys, time
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
    here(f"there{{RANK}}", os.getpid())
    while True:
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        yield made


@pytest.fixture
def two(hosts):
    """host0 with two slots, host1 with one: ranks 0 and 1, and rank 2."""
    yield hosts.hostfile([2, 1], hosts.names[:2], file="two")
    hosts.wait_until_empty(END_SECONDS)
    assert [file for name in hosts.names for file in hosts.left_files(name)] == []


@pytest.fixture
def start(hosts, tmp_path):
    """A function that starts xds on the text of a script, with the shared folder tmp_path/shared."""
    shared = tmp_path / "shared"
    shared.mkdir()
    begun = []

    def begin(script, *options, name="train.py", args=(), env=None, folder=tmp_path):
        (folder / name).write_text(BEGIN.format(shared=str(shared)) + textwrap.dedent(script))
        process = hosts.popen(
            [*XDS, *options, name, *args],
            {"PYTHONSAFEPATH": "", "OMP_NUM_THREADS": "1", **(env or {})},
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
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out, err


def wait_for(*paths):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"none of {paths} in time"
        time.sleep(0.01)
    return [path.read_text() for path in paths]


def all_there(shared, count=3):
    """Wait for that many ranks to be in `for_ever`; their pids on their hosts."""
    return [int(text) for text in wait_for(*(shared / f"there{rank}" for rank in range(count)))]


@pytest.mark.slow
def test_ranks_count_over_hosts_and_rank_0_is_heard_live(hosts, two, start, tmp_path):
    process = start(
        """
        import json
        keys = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
        here(f"rank{RANK}", json.dumps([socket.gethostname(), *(os.environ[key] for key in keys)]))
        print("hello of rank", RANK, flush=True)
        print("trouble of rank", RANK, file=sys.stderr, flush=True)
        until("go")
        """,
        *("--hostfile", str(two)),
    )
    assert process.stdout.readline() == "hello of rank 0\n"  # it has not ended
    told = wait_for(*(tmp_path / "shared" / f"rank{rank}" for rank in range(3)))
    (tmp_path / "shared" / "go").touch()
    address = hosts.address("host0")
    assert [json.loads(text) for text in told] == [
        ["host0", "0", "3", "2", "0", address],
        ["host0", "1", "3", "2", "0", address],
        ["host1", "0", "3", "1", "1", address],
    ]
    code, out, err = end(process)
    assert (code, out, err) == (0, "", "trouble of rank 0\n")
    for rank, name in ((1, "host0"), (2, "host1")):
        (log,) = hosts.cache(name).glob(f"xds/runs/*/rank{rank}.log")
        assert log.read_text() == f"hello of rank {rank}\ntrouble of rank {rank}\n"


def test_ranks_of_several_hosts_form_one_group(two, start):
    process = start(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(RANK)])
        dist.all_reduce(total)
        if RANK == 0:
            print(total.item(), flush=True)
        """,
        *("--hostfile", str(two)),
    )
    assert end(process) == (0, "3.0\n", "")


FAILURES = {
    "exit": ("print('last words', flush=True); sys.exit(3)", 3, "| last words"),
    "raise": ("raise ValueError('out of spoons')", 1, "ValueError: out of spoons"),
    "kill": ("print('last words', flush=True); os.kill(os.getpid(), 9)", 137, "| last words"),
    "segfault": ("import ctypes; ctypes.string_at(0)", 139, "Segmentation fault"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_on_another_host_is_told_once_and_ends_every_rank(how, hosts, two, start):
    act, code, words = FAILURES[how]
    process = start(
        f"""
        if RANK == 2:
            until("there1")
            until("there0")
            {act}
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # worst manners
        for_ever()
        """,
        *("--hostfile", str(two)),
    )
    got, out, err = end(process)
    hosts.wait_until_empty(5.0)
    assert (got, out) == (code, "")
    assert err.count("xds: rank 2 failed on host1:") == err.count("failed on") == 1, err
    assert f"exit code {code}" in err
    assert err.count(words) == 1, err


@pytest.mark.slow
def test_a_rank_that_lost_its_peer_is_not_the_reason(two, start):
    process = start(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if RANK == 2:
            time.sleep(0.2)
            os.kill(os.getpid(), 9)
        dist.barrier()
        """,
        *("--hostfile", str(two)),
    )
    code, _, err = end(process)
    assert code == 137
    assert "rank 2 failed on host1: killed by SIGKILL" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_head_leaves_no_process_anywhere(name, hosts, two, start, tmp_path):
    process = start("for_ever()", "--hostfile", str(two))
    all_there(tmp_path / "shared")
    signum = getattr(signal, name)
    if name == "SIGINT":  # as a terminal does: to the whole group
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    code, _, err = end(process)
    assert code == 128 + signum
    assert f"{name}: stopping every rank" in err and "failed" not in err
    hosts.wait_until_empty(5.0, [*hosts.names, HEAD])


@pytest.mark.slow
def test_kill_of_the_head_ends_every_rank(hosts, two, start, tmp_path):
    process = start("for_ever()", "--hostfile", str(two))
    all_there(tmp_path / "shared")
    process.kill()
    process.wait()
    hosts.wait_until_empty(END_SECONDS, [*hosts.names, HEAD])


@pytest.mark.slow
def test_kill_of_a_connection_ends_the_run_and_names_the_host(hosts, two, start, tmp_path):
    process = start("for_ever()", "--hostfile", str(two))
    all_there(tmp_path / "shared")
    found = hosts.processes(HEAD).items()
    (client,) = [pid for pid, words in found if words.startswith("ssh ") and " host1 " in words]
    os.kill(client, signal.SIGKILL)
    code, _, err = end(process)
    assert code != 0
    assert "host host1 was lost" in err
    hosts.wait_until_empty(END_SECONDS)


@pytest.mark.slow
def test_kill_of_a_node_part_ends_the_run_and_its_ranks(hosts, two, start, tmp_path):
    process = start("for_ever()", "--hostfile", str(two))
    all_there(tmp_path / "shared")
    found = hosts.processes("host1").items()
    nodes = [
        pid
        for pid, words in found
        if "xds.launcher.remote.node" in words and "python" in words[:60]
    ]
    os.kill(min(nodes), signal.SIGKILL)
    code, _, err = end(process)
    assert code != 0
    assert "host host1 was lost" in err
    hosts.wait_until_empty(END_SECONDS)


@pytest.mark.slow
def test_a_cut_link_ends_the_run_on_both_sides(hosts, two, start, tmp_path):
    process = start("for_ever()", "--hostfile", str(two), env={"XDS_HEARTBEAT_SECONDS": "2"})
    all_there(tmp_path / "shared")
    hosts.cut("host1")
    try:
        hosts.wait_until_empty(END_SECONDS)  # host1 as well, which nobody reaches
        code, _, err = end(process)
    finally:
        hosts.mend("host1")
    assert code != 0
    assert "host host1 was lost" in err


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_named_and_nothing_is_started(hosts, start, tmp_path):
    file = hosts.hostfile(1, ["host0", NOWHERE, "host1"], file="nowhere")
    code, _, err = end(start("here(f'began{RANK}')", "--hostfile", str(file)))
    assert code != 0
    assert f"host {NOWHERE} cannot be reached" in err and "No route to host" in err, err
    assert list((tmp_path / "shared").iterdir()) == []
    hosts.wait_until_empty(END_SECONDS, [*hosts.names, HEAD])


@pytest.mark.slow
def test_a_host_that_lets_nobody_in_is_named_with_the_reason(hosts, two, start, tmp_path):
    with hosts.locked("host1"):
        code, _, err = end(start("here(f'began{RANK}')", "--hostfile", str(two)))
    assert code == 255
    assert "host host1 cannot be reached" in err and "Permission denied" in err, err
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_a_host_without_the_interpreter_is_named(hosts, two, start, tmp_path):
    folder = Path(sys.executable).parent
    if str(tmp_path).startswith(str(folder)) or folder in (Path("/usr/bin"), Path("/bin")):
        pytest.skip("the interpreter shares its folder with what a host needs")
    with hosts.hidden("host1", folder):
        code, _, err = end(start("here(f'began{RANK}')", "--hostfile", str(two)))
    assert code in (126, 127)
    assert "host host1 cannot be reached" in err and sys.executable in err, err
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_folder_script_and_arguments_arrive_literally(two, start, tmp_path):
    folder = tmp_path / "we ird'$(touch pwned)`touch pwned`;\n\"&"
    folder.mkdir()
    args = [
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
    process = start(
        """
        import json
        here(f"told{RANK}", json.dumps([os.getcwd(), sys.argv]))
        """,
        *("--hostfile", str(two)),
        name="tr ain';$(touch pwned).py",
        args=args,
        folder=folder,
    )
    assert end(process)[0] == 0
    told = wait_for(*(tmp_path / "shared" / f"told{rank}" for rank in range(3)))
    assert [json.loads(text) for text in told] == [
        [str(folder), ["tr ain';$(touch pwned).py", *args]]
    ] * 3
    assert not list(tmp_path.rglob("pwned"))
    assert not (Path.home() / "pwned").exists()


@pytest.mark.slow
def test_a_restart_starts_every_rank_again_and_tells_why(two, start, tmp_path):
    process = start(
        """
        here(f"began{AGAIN}.{RANK}", os.environ["WORLD_SIZE"])
        if AGAIN == 0:
            if RANK == 2:
                until("began0.0")
                until("began0.1")
                sys.exit(3)
            for_ever()
        """,
        *("--hostfile", str(two), "--max-restarts", "2"),
    )
    code, _, err = end(process)
    assert code == 0
    assert err.count("rank 2 failed on host1: exit code 3") == 1
    names = {path.name for path in (tmp_path / "shared").glob("began*")}
    assert names == {f"began{again}.{rank}" for again in (0, 1) for rank in range(3)}


@pytest.mark.slow
def test_failures_beyond_the_restarts_end_the_run_with_the_code(two, start, tmp_path):
    script = 'here(f"began{AGAIN}")\nif RANK == 2: sys.exit(7)\nuntil("never")'
    code, _, err = end(start(script, "--hostfile", str(two), "--max-restarts", "1"))
    assert code == 7
    assert err.count("rank 2 failed on host1: exit code 7") == 2
    assert sorted(path.name for path in (tmp_path / "shared").glob("began*")) == [
        "began0",
        "began1",
    ]


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_fewer_hosts_and_grows_again(hosts, start, tmp_path):
    file = hosts.hostfile(1, file="three")
    process = start(
        """
        size = os.environ["WORLD_SIZE"]
        here(f"began{AGAIN}.{size}.{RANK}")
        until("done")
        """,
        *("--hostfile", str(file), "--min-elastic-nodes", "2", "--max-restarts", "3"),
        env={"XDS_HEARTBEAT_SECONDS": "2"},
    )
    shared = tmp_path / "shared"
    wait_for(*(shared / f"began0.3.{rank}" for rank in range(3)))
    hosts.cut("host2")
    try:
        wait_for(shared / "began1.2.0", shared / "began1.2.1")
    finally:
        hosts.mend("host2")
    wait_for(*(shared / f"began2.3.{rank}" for rank in range(3)))
    (shared / "done").touch()
    code, _, err = end(process)
    assert code == 0
    assert err.count("host host2 was lost") == 1
    hosts.wait_until_empty(END_SECONDS)
