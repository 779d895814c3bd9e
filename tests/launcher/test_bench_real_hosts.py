"""`xds bench comm --hostfile` on hosts in network namespaces, each with an sshd."""

import json
import sys

import pytest
from real_hosts import Hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

XDS = [sys.executable, "-m", "xds.launcher.cli"]


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        yield made


@pytest.mark.slow
def test_collectives_are_timed_between_hosts_over_their_link(hosts):
    file = hosts.hostfile(1, hosts.names[:2], file="bench")
    words = ["bench", "comm", "--hostfile", str(file), "--op", "all_reduce", "--max-size", "4KiB"]
    done = hosts.run([*XDS, *words, "--trials", "2", "--json"], {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["world_size"], told["num_hosts"]) == (2, 2)
    assert told["link_bytes_per_second"] > 0
    assert {row["by"] for row in told["rows"]} == {"xds", "torch"}
    hosts.wait_until_empty(10)
