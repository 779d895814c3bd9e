"""The simulated hosts of other tests: isolated, connected by ssh, and removed with the test."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_hosts import HEAD, Hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

LIVES = "import sys; sys.path.insert(0, sys.argv[1]); from real_hosts import Hosts"
HOLD = f"{LIVES}\nwith Hosts(1) as h:\n    print(h.folder, h._first['host0'].pid, flush=True)\n    input()"


@pytest.fixture(scope="module")
def hosts():
    with Hosts(2) as made:
        yield made


def ssh(hosts, name, command, *options):
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", *options, name, command]
    return hosts.run(words, timeout=20)


def test_each_host_answers_ssh_under_its_own_name_and_address(hosts):
    for name in hosts.names:
        said = ssh(hosts, name, "hostname; echo $TMPDIR; echo $SSH_CONNECTION")
        assert said.returncode == 0, said.stderr
        hostname, temporary, connection = said.stdout.splitlines()
        assert hostname == name
        assert temporary == str(hosts.folder / name / "tmp")
        assert connection.split()[0] == hosts.address(HEAD)
        assert connection.split()[2] == hosts.address(name)


def test_hosts_reach_one_another_and_nothing_else(hosts):
    first, second = hosts.names
    ask = f"import socket; socket.create_connection(({hosts.address(second)!r}, 22), 2)"
    assert hosts.run([sys.executable, "-c", ask], place=first).returncode == 0
    routes = hosts.run(["ip", "route", "show", "default"], place=first)
    assert routes.stdout == ""


def test_a_signal_to_a_process_started_at_the_head_reaches_it(hosts):
    sleeper = hosts.popen(["sleep", "100"])
    while "sleep 100" not in hosts.processes(HEAD).values():
        time.sleep(0.01)
    assert hosts.processes(HEAD)[sleeper.pid] == "sleep 100"
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait(5) == -signal.SIGTERM


def test_processes_of_a_host_are_found_and_killed_by_the_pid_they_know(hosts):
    name = hosts.names[0]
    begun = hosts.popen(["ssh", name, "echo $$; exec sleep 100"], stdout=subprocess.PIPE, text=True)
    pid = int(begun.stdout.readline())
    here = hosts.pid_here(name, pid)
    while hosts.processes(name).get(here) != "sleep 100":
        time.sleep(0.01)
    assert hosts.processes(hosts.names[1]) == {}
    hosts.kill(name, pid)
    hosts.wait_until_empty(5)
    assert begun.wait(5) != 0


def test_ctrl_c_is_not_ignored_on_a_host(hosts):
    said = ssh(hosts, hosts.names[0], "grep SigIgn /proc/self/status")
    assert int(said.stdout.split()[1], 16) & (1 << (signal.SIGINT - 1)) == 0


@pytest.mark.slow
def test_a_cut_link_carries_nothing_until_it_is_mended(hosts):
    name = hosts.names[1]
    hosts.cut(name)
    assert ssh(hosts, name, "true").returncode == 255
    assert ssh(hosts, hosts.names[0], "true").returncode == 0
    hosts.mend(name)
    assert ssh(hosts, name, "true", "-o", "ConnectionAttempts=5").returncode == 0


def test_a_delay_is_seen_or_its_reason_told(hosts):
    reason = hosts.delay(hosts.names[0], 100)
    if reason:
        pytest.skip(reason)
    begin = time.monotonic()
    assert ssh(hosts, hosts.names[0], "true").returncode == 0
    assert time.monotonic() - begin > 0.2


def test_files_in_shared_memory_are_one_hosts_own(hosts):
    first, second = hosts.names
    assert ssh(hosts, first, "touch /dev/shm/mine; touch $TMPDIR/too").returncode == 0
    assert [Path(path).name for path in hosts.left_files(first)] == ["mine", "too"]
    assert hosts.left_files(second) == []
    assert not os.path.exists("/dev/shm/mine")


def test_hosts_vanish_with_a_test_that_is_killed(tmp_path):
    words = [sys.executable, "-c", HOLD, str(Path(__file__).parents[1])]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        folder, first = holder.stdout.readline().split()
        holder.kill()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{first}") and Path(f"/proc/{first}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with Hosts(0):  # clears what the other left
        assert not os.path.exists(folder)
