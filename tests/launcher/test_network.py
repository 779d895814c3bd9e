"""Addresses, ports and cores of this host, and where the rendezvous store listens."""

import os
import socket
import sys
from pathlib import Path

import pytest

from xds.launcher.job import Rendezvous
from xds.launcher.ranks import rendezvous_store
from xds.launcher.ranks.elastic import share_cores
from xds.launcher.ranks.network import address_towards, free_port, interface_towards, split_endpoint
from xds.launcher.ranks.rendezvous_store import serve
from xds.utils.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's interfaces and affinity")


def test_an_endpoint_comes_apart():
    ends = {"h1:29500": ("h1", 29500), "h1": ("h1", 0), "[::1]:80": ("::1", 80), "::1": ("::1", 0)}
    ends |= {"10.0.0.1:0": ("10.0.0.1", 0), "h1:port": ("h1:port", 0)}
    assert {endpoint: split_endpoint(endpoint) for endpoint in ends} == ends


def test_the_interface_that_leads_to_this_machine_is_the_loopback():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1:29500") == "lo"
    assert interface_towards("no-such-host.invalid:1") == ""


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_cores_are_shared_in_equal_slices(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert share_cores("", 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert share_cores("1-5", 2) == [[1, 2], [3, 4]]
    assert share_cores("2,1,7,2", 1) == [[1, 2, 7]]
    with pytest.raises(UsageError, match="this process may not use core 9"):
        share_cores("0,9", 1)
    with pytest.raises(UsageError, match="3 ranks need at least as many cores, there are 2"):
        share_cores("0-1", 3)
    for text in ("a", "0-", "-1", "1;2", "0 1", "3-1"):
        with pytest.raises(UsageError, match="cores as in 0-3,8"):
            share_cores(text, 1)


# -- where the rendezvous store listens -----------------------------------------------------------------

OUTSIDE = address_towards("192.0.2.1")  # an address that leads nowhere; nothing is sent


def listening():
    """The addresses, each with its port, at which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
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


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_one_machine_meets_on_the_loopback_and_several_at_the_address_that_is_given(kind):
    for host in ("127.0.0.1", "no.such.host.invalid"):
        port = free_port()
        meeting, store = serve(Rendezvous(kind, f"{host}:{port}"))
        assert (meeting.kind, meeting.endpoint) == ("static", f"127.0.0.1:{port}")
        assert meeting.node_rank == 0 and store.port == port
        assert [address for address, at in listening() if at == port] == ["127.0.0.1"]
    if OUTSIDE:
        port = free_port()
        place = {"node_rank": 0} if kind == "static" else {}
        given = Rendezvous(kind, f"{OUTSIDE}:{port}", min_nodes=2, max_nodes=2, **place)
        meeting, store = serve(given)
        assert meeting.endpoint == given.endpoint and store.port == port
        assert [address for address, at in listening() if at == port] == [OUTSIDE]
        assert serve(given) == (meeting, None)  # a second agent here: torch joins the first


def test_what_is_not_served_from_here_is_left_to_torch(monkeypatch):
    before = listening()
    for changed in (
        {"endpoint": "192.0.2.77:29400"},  # another machine's, or a service's
        {"kind": "static", "node_rank": 1},
        {"settings": {"is_host": "0"}},
        {"kind": "etcd"},
    ):
        given = {"kind": "c10d", "endpoint": f"127.0.0.1:{free_port()}", "max_nodes": 2} | changed
        assert serve(Rendezvous(**given))[1] is None and listening() == before
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        meeting, store = serve(Rendezvous("static", endpoint))
        assert meeting.endpoint == endpoint and store is None  # torch says so
    # the others know a machine whose own name is 127.0.1.1 by another address
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert rendezvous_store._listening("node-1", free_port()) is None
