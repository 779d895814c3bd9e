"""Links of hosts made of namespaces can be limited to a rate, without ssh."""

import subprocess
import sys

import pytest
from real_hosts import Hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not(False)), reason=why_not(False) or "hosts can be made")

SEND = """
import socket, sys, time
begin = time.monotonic()
with socket.create_connection((sys.argv[1], 4000)) as connection:
    connection.sendall(bytes(600_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - begin)
"""
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 4000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as connection:
        while connection.recv(1 << 16):
            pass
"""


@pytest.mark.parametrize("limited", [0, 1])
def test_a_limited_link_takes_at_least_the_time_of_its_rate(limited):
    """What a host sends is limited, and what it receives."""
    with Hosts(2, has_ssh=False) as hosts:
        reason = hosts.limit(hosts.names[limited], 16)
        if reason:
            pytest.skip(reason)
        address = hosts.address("host0")
        words = [sys.executable, "-c", RECEIVE, address]
        server = hosts.popen(words, place="host0", stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        sent = hosts.run([sys.executable, "-c", SEND, address], place="host1")
        assert server.wait(10) == 0
        # 600 kB at 2 MB/s are 0.3 s, less what a link that was idle sends at once
        assert float(sent.stdout) > 0.25
