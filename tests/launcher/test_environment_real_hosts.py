"""`xds env --hostfile` and `xds bench comm --hostfile` on hosts in network namespaces, each with an sshd."""

import json
import sys

import pytest
from real_hosts import NOWHERE, Hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

XDS = [sys.executable, "-m", "xds.launcher.cli"]


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        yield made


@pytest.mark.slow
def test_hosts_are_asked_over_ssh_and_the_one_that_differs_is_named(hosts):
    with hosts.hidden("host2", torch_folder()):
        file = hosts.hostfile(1, [*hosts.names, NOWHERE], file="env")
        asked = hosts.run([*XDS, "env", "--hostfile", str(file), "--json"])
        shown = hosts.run([*XDS, "env", "--hostfile", str(file)])
    assert asked.returncode == shown.returncode == 1, asked.stderr
    told = json.loads(asked.stdout)
    assert set(told["hosts"]) == set(hosts.names)
    names = {line["value"] for lines in told["hosts"].values() for line in lines[:3]}
    assert names >= set(hosts.names)  # hostnames vary, and are no difference
    assert "hostname" not in told["differences"] and "xds" not in told["differences"]
    assert [group["hosts"] for group in told["differences"]["torch"]] == [
        ["host0", "host1"],
        ["host2"],
    ]
    assert "ssh: connect to host nowhere" in told["not_reached"][NOWHERE]
    assert "2 of 3 hosts: torch" in shown.stdout
    assert "; host2: torch cannot be imported" in shown.stdout
    assert hosts.all_processes() == {}


def torch_folder():
    import torch

    return torch.__path__[0]


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
