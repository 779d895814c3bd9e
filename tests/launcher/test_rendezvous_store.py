"""Where the rendezvous store listens: on the loopback for one machine, on the used address for several."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from xds.launcher.job import Rendezvous
from xds.launcher.ranks import rendezvous_store
from xds.launcher.ranks.network import address_towards
from xds.launcher.ranks.rendezvous_store import serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OUTSIDE = address_towards("192.0.2.1")  # an address that leads nowhere; nothing is sent
needs_network = pytest.mark.skipif(not OUTSIDE, reason="this machine has no address but its own")
FREE = "127.0.0.1:0"


def listening(*pids):
    """The addresses, each with its port, at which processes listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(entry))
            except OSError:  # the one that lists the folder
                continue
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                raw = bytes.fromhex(address)
                swapped = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.append((socket.inet_ntop(family, swapped), int(port, 16)))
    return found


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def run(tmp_path, *options):
    script = """
        import os, time
        from pathlib import Path
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        Path(f"pids{dist.get_rank()}").write_text(f"{os.getpid()} {os.getppid()}")
        while not os.path.exists("go"):
            time.sleep(0.02)
        dist.barrier()
        print(os.environ["MASTER_ADDR"])
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    return subprocess.Popen(
        [sys.executable, "-m", "xds.launcher.cli", *options, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"XDS_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def where_they_listen(tmp_path, processes):
    """The addresses of two ranks and what started them, and what all of that printed."""
    files = [tmp_path / f"pids{rank}" for rank in (0, 1)]
    while not all(file.exists() and file.read_text().count(" ") for file in files):
        assert all(process.poll() is None for process in processes), processes[0].stdout.read()
    pids = {int(pid) for file in files for pid in file.read_text().split()}
    found = listening(*pids)
    (tmp_path / "go").touch()
    out = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), out
    return {address for address, _ in found}, out[0].split()


@pytest.mark.slow
def test_nothing_of_a_run_on_one_machine_listens_to_the_network(tmp_path):
    process = run(tmp_path, "--nproc-per-node", "2")
    addresses, out = where_they_listen(tmp_path, [process])
    assert addresses == {"127.0.0.1"} and out == ["127.0.0.1"]


@pytest.mark.slow
@needs_network
def test_machines_that_find_one_another_listen_on_the_network_in_use(tmp_path):
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{OUTSIDE}:{free_port()}")
    options = ("--nnodes", "2", "--nproc-per-node", "1", *meeting, "--rdzv-id", "one")
    processes = [run(tmp_path, *options) for _ in range(2)]
    addresses, _ = where_they_listen(tmp_path, processes)
    assert addresses == {OUTSIDE}


@pytest.mark.parametrize("kind", ["static", "c10d"])
@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "no.such.host.invalid"])
def test_one_machine_meets_on_the_loopback_whatever_it_was_told(kind, host):
    port = free_port()
    meeting, store = serve(Rendezvous(kind, f"{host}:{port}"))
    assert (meeting.kind, meeting.endpoint, meeting.node_rank) == ("static", f"127.0.0.1:{port}", 0)
    assert ("127.0.0.1", port) in listening("self") and store.port == port


@needs_network
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_several_machines_meet_at_the_address_that_is_given(kind):
    port = free_port()
    place = {"node_rank": 0} if kind == "static" else {}
    given = Rendezvous(kind, f"{OUTSIDE}:{port}", min_nodes=2, max_nodes=2, **place)
    meeting, store = serve(given)
    assert meeting.endpoint == given.endpoint and store.port == port
    assert [address for address, at in listening("self") if at == port] == [OUTSIDE]
    again, none = serve(given)  # a second agent of this machine: torch joins the first
    assert (again, none) == (meeting, None)


@pytest.mark.parametrize(
    "changed",
    [
        {"endpoint": "192.0.2.77:29400"},  # another machine's, or a service's
        {"endpoint": "no.such.host.invalid:29400"},
        {"kind": "static", "node_rank": 1},
        {"settings": {"is_host": "0"}},
        {"kind": "etcd"},
    ],
)
def test_what_is_not_served_from_here_is_left_to_torch(changed):
    given = {"kind": "c10d", "endpoint": f"127.0.0.1:{free_port()}", "max_nodes": 2} | changed
    before = listening("self")
    assert serve(Rendezvous(**given))[1] is None and listening("self") == before


def test_a_name_that_means_the_loopback_here_alone_binds_nothing(monkeypatch):
    """As on machines whose own name is 127.0.1.1: the others know it by another address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert rendezvous_store._listening("node-1", free_port()) is None
    kept = rendezvous_store._listening("localhost", 0)
    assert kept is not None
    kept.close()


def test_a_port_that_is_taken_is_left_to_torch_which_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meeting, store = serve(Rendezvous("static", f"127.0.0.1:{port}"))
    assert meeting.endpoint == f"127.0.0.1:{port}" and store is None
