"""The real pdsh and mpirun on hosts in network namespaces, each with an sshd: no process remains."""

import os
import signal
import subprocess
import sys
import time

import pytest
from real_hosts import Hosts, why_not

from xds.launcher.remote.backends import BACKENDS
from xds.utils.errors import UsageError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

END_SECONDS = 15.0
PATIENCE_SECONDS = 120.0
XDS = [sys.executable, "-m", "xds.launcher.cli"]
SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("on purpose")
while True:
    time.sleep(0.1)
"""
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def why_no(launcher):
    """Why its program cannot be used here; "" where it can."""
    try:
        BACKENDS[launcher].check()
    except UsageError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def hosts():
    with Hosts(2) as made:
        yield made


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
@pytest.mark.slow
def test_a_failure_and_a_signal_end_the_ranks_of_every_host(launcher, hosts, tmp_path):
    why = why_no(launcher)
    if why:
        pytest.skip(why)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [*XDS, "--hostfile", str(hosts.hostfile(1)), "--launcher", launcher, "train.py"]
    environ = {"PYTHONSAFEPATH": "", "OMP_NUM_THREADS": "1", **ROOT}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    done = hosts.run([*words, "fail"], environ, cwd=tmp_path, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("ValueError: on purpose") == 1, done.stderr
    assert "rank 1 failed on host1" in done.stderr
    hosts.wait_until_empty(END_SECONDS)

    process = hosts.popen(words, environ, cwd=tmp_path, **pipes)
    assert process.stdout.readline() == "rank 0 on host0\n"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any("train.py" in line for line in hosts.processes("host1").values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, err
    hosts.wait_until_empty(END_SECONDS)
