"""Addresses and cores of this host."""

import os
import socket
import sys

import pytest

from xds.launcher.ranks.elastic import share_cores
from xds.launcher.ranks.network import address_towards, free_port, interface_towards, split_endpoint
from xds.utils.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's interfaces and affinity")


@pytest.mark.parametrize(
    "endpoint, expected",
    [
        ("h1:29500", ("h1", 29500)),
        ("h1", ("h1", 0)),
        ("[::1]:80", ("::1", 80)),
        ("::1", ("::1", 0)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("h1:port", ("h1:port", 0)),
    ],
)
def test_an_endpoint_comes_apart(endpoint, expected):
    assert split_endpoint(endpoint) == expected


def test_the_interface_that_leads_to_this_machine_is_the_loopback():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1:29500") == "lo"
    assert interface_towards("no-such-host.invalid:1") == ""


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize("text", ["a", "0-", "-1", "1;2", "0 1", "3-1"])
def test_what_is_no_list_of_cores_is_refused(text):
    with pytest.raises(UsageError, match="cores as in 0-3,8"):
        share_cores(text, 1)


def test_cores_are_shared_in_equal_slices(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert share_cores("", 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert share_cores("1-5", 2) == [[1, 2], [3, 4]]
    assert share_cores("2,1,7,2", 1) == [[1, 2, 7]]
    with pytest.raises(UsageError, match="this process may not use core 9"):
        share_cores("0,9", 1)
    with pytest.raises(UsageError, match="3 ranks need at least as many cores, there are 2"):
        share_cores("0-1", 3)
