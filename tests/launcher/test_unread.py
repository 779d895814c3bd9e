"""A signal to a run whose output has no reader: the ranks still save, and the exit code is the same."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="terminals and pipes as Linux has")

PATIENCE_SECONDS = 60.0

# As an engine with checkpoint.preemption_save_dir: a handler that notes, a save at the end of a step.
SAVES = """
    import os, signal, sys, time
    rank, asked = os.environ["RANK"], []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    open(os.environ["XDS_GRACE_FILE"], "w").write("30")
    open(f"here{rank}", "w").close()
    number = 0
    while not asked:
        number += 1
        print("step", number, file=sys.stderr if number % 2 else sys.stdout)
        time.sleep(0.005)
    print("s" * 200_000)
    open(f"saved{rank}", "w").close()
    sys.exit(143)
"""


def start(tmp_path, script, output):
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"XDS_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        # nohup around the tests would have it ignored
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    wait_until(lambda: all((tmp_path / f"here{rank}").exists() for rank in (0, 1)), process)
    return process


def wait_until(condition, process):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)


def have_saved(tmp_path):
    return [(tmp_path / f"saved{rank}").exists() for rank in (0, 1)]


def code_of(process):
    try:
        return process.wait(PATIENCE_SECONDS)
    finally:
        process.kill()


def test_ranks_save_though_the_reader_has_gone(tmp_path):
    """As where a batch system ends `xds train.py | tee log`: tee goes first."""
    reader, writer = os.pipe()
    process = start(tmp_path, SAVES, writer)
    os.close(writer)
    os.close(reader)
    process.terminate()
    assert code_of(process) == 143 and have_saved(tmp_path) == [True, True]


@pytest.mark.slow
def test_ranks_save_though_nobody_reads_a_full_pipe(tmp_path):
    reader, writer = os.pipe()
    process = start(tmp_path, SAVES, writer)
    os.set_blocking(writer, False)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:  # rank 0 comes to wait for room, too
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            time.sleep(0.01)
    os.set_blocking(writer, True)
    process.terminate()
    assert code_of(process) == 143 and have_saved(tmp_path) == [True, True]
    os.close(reader)
    os.close(writer)


def test_a_closed_terminal_ends_all_ranks_with_129(tmp_path):
    master, slave = pty.openpty()
    process = start(tmp_path, SAVES.replace("SIGTERM", "SIGUSR2"), slave)
    os.close(slave)
    os.close(master)
    process.send_signal(signal.SIGHUP)  # what the kernel sends to who has it for its own
    assert code_of(process) == 129


@pytest.mark.slow
def test_a_failure_that_nobody_reads_of_keeps_its_exit_code(tmp_path):
    reader, writer = os.pipe()
    fails = """
        import os, sys, time
        rank = os.environ["RANK"]
        open(f"here{rank}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        sys.exit(7 if rank == "1" else 0)
    """
    process = start(tmp_path, fails, writer)
    os.close(writer)
    os.close(reader)
    (tmp_path / "go").touch()
    assert code_of(process) == 7
