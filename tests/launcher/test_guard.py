"""The guard process: kills the sessions of the ranks once the launcher has ended, and nothing else."""

import os
import subprocess
import sys
import time

import pytest

from xds.launcher.ranks import guard
from xds.launcher.ranks.guard import Guard, end_sessions, members, started, still_ours

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A rank whose child outlives it.
LEAVES_A_CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


@pytest.fixture
def rank():
    """A process that leads a session, in which a child of a child is left."""
    words = [sys.executable, "-c", LEAVES_A_CHILD]
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
    child = int(process.stdout.readline())
    process.wait()
    yield process.pid, child
    process.stdout.close()
    end_sessions([process.pid], 0.0)


def start_guard():
    words = [sys.executable, "-I", "-S", guard.__file__]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def test_after_a_usual_end_nothing_is_touched(rank):
    session, child = rank
    with Guard() as ours:
        ours.watch(session)
    assert ours._process.returncode == 0 and members([session]) == [child]


def test_what_is_left_of_a_session_ends_when_the_input_does_and_signals_end_nothing(rank):
    session, child = rank
    assert members([session]) == [child] and members([]) == []
    process = start_guard()
    process.stdin.write(b"%d\n" % session)
    process.stdin.flush()
    while guard.stat(process.pid)[2] != str(process.pid):
        time.sleep(0.01)  # the group of its own comes first, then the handlers
    time.sleep(0.2)
    for signum in (1, 2, 15):
        process.send_signal(signum)
    assert members([session]) == [child]
    process.stdin.close()
    assert process.wait(60) == 0 and members([session]) == []
    assert process.stderr.read().decode() == guard.LAUNCHER_KILLED
    process.stderr.close()


def test_a_number_that_another_process_has_got_is_let_alone():
    own = os.getpid()
    assert still_ours({own: started(own)}) == [own]
    assert still_ours({own: str(int(started(own)) - 1)}) == []
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert still_ours({gone.pid: "1"}) == [gone.pid]  # what it left in its session is


def test_a_guard_that_was_killed_or_cannot_be_had_is_done_without(monkeypatch):
    with Guard() as ours:
        ours._process.kill()
        ours._process.wait()
        ours.watch(1)
    monkeypatch.setattr(guard.sys, "executable", "/no/such/program")
    with Guard() as none:
        none.watch(1)
    assert none._process is None
