"""Rank 0's output is shown live and logged: real processes, on terminals and on pipes."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
from pathlib import Path

import pytest

from xds.launcher.ranks.rank_zero import RankZero

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="terminals as Linux has them")

PATIENCE_SECONDS = 60.0

TAKE_STREAMS = """
import os, sys
opened = {}
for number, name in ((1, "XDS_RANK_OUT"), (2, "XDS_RANK_ERR")):
    path = os.environ.get(name)
    if path:
        if path not in opened:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
            opened[path] = os.open(path, flags)
        os.dup2(opened[path], number)
for descriptor in opened.values():
    os.close(descriptor)
"""

LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from xds.launcher.ranks.rank_zero import RankZero

TAKE_STREAMS = {take!r}
folder = Path({folder!r})

def rank(script, tee):
    words = [sys.executable, "-u", "-c", TAKE_STREAMS + script]
    return subprocess.Popen(words, env=os.environ | tee.environment)

with RankZero(folder, folder / "rank0.log") as tee:
{body}
print("launcher ends", flush=True)
"""


def launcher(tmp_path, body, **settings):
    """A process that runs `body` with `tee` and `rank(script, tee)` at hand."""
    text = LAUNCHER.format(
        take=TAKE_STREAMS, folder=str(tmp_path), body=textwrap.indent(textwrap.dedent(body), "    ")
    )
    return subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, **settings)


def read_terminal(master):
    """Everything that comes out of a terminal until nobody has it open."""
    got = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:
            return got
        if not data:
            return got
        got += data


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def test_pipes_get_each_stream_and_the_log_gets_both(tmp_path):
    body = """
    code = '''
    sys.stdout.write("out" * 50_000); sys.stdout.flush()
    sys.stderr.write("err"); sys.exit(3)
    '''.replace("\\n    ", "\\n")
    assert rank(code, tee).wait() == 3
    assert tee.drain(10)
    """
    process = launcher(tmp_path, body, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, b"err")
    assert out == b"out" * 50_000 + b"launcher ends\n"
    log = (tmp_path / "rank0.log").read_bytes()
    assert log.replace(b"err", b"", 1) == b"out" * 50_000  # somewhere between
    assert [file.name for file in tmp_path.iterdir()] == ["rank0.log"]


def test_streams_of_one_place_keep_their_order_and_a_second_start_goes_the_same_way(tmp_path):
    body = """
    code = "for number in range(300): os.write(1 + number % 2, b'%d ' % number)"
    rank(code, tee).wait()
    for number in range(3):
        rank(f"print('start {number}', end=' ')", tee).wait()
        if number != 1:
            assert tee.drain(10)
    """
    process = launcher(tmp_path, body, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    wanted = "".join(f"{number} " for number in range(300)) + "start 0 start 1 start 2 "
    assert out.decode() == wanted + "launcher ends\n"
    assert (tmp_path / "rank0.log").read_text() == wanted


def test_a_terminal_stays_one_of_its_present_size_and_bytes_are_unchanged(tmp_path):
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # so that the test sees the bytes that were written
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    body = r"""
    code = "print(os.isatty(1), os.isatty(2), os.get_terminal_size(1), end='\\n\\r\\x1b[1m\\t', flush=True)\n"
    code += "import time; os.open('ready', os.O_CREAT)\n"
    code += "while os.get_terminal_size(1).columns != 55: time.sleep(0.02)\n"
    assert rank(code, tee).wait() == 0
    tee.drain(10)
    """
    process = launcher(tmp_path, body, stdout=slave, stderr=slave)
    wait_until((tmp_path / "ready").exists, "rank 0 waits for the size")
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 20, 55, 0, 0))
    process.send_signal(signal.SIGWINCH)  # the kernel's, for a launcher in the foreground
    os.close(slave)
    got = read_terminal(master)
    os.close(master)
    assert process.wait(PATIENCE_SECONDS) == 0
    told = b"True True os.terminal_size(columns=77, lines=33)\n\r\x1b[1m\t"
    assert got == told + b"launcher ends\n"
    assert (tmp_path / "rank0.log").read_bytes() == told


def test_what_still_writes_does_not_hold_up_the_end(tmp_path):
    body = """
    import signal
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    rank(code, tee).wait()
    assert not tee.drain(0.1)
    assert not tee.drain(0.1)
    rank("print('another start')", tee).wait()
    assert not tee.drain(0.1)
    """
    process = launcher(tmp_path, body, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    lines = out.split()
    os.kill(int(lines[0]), signal.SIGKILL)
    assert process.returncode == 0 and lines[1:] == [*b"another start launcher ends".split()]


def test_a_slow_reader_is_waited_for_until_there_is_a_signal(tmp_path):
    body = """
    rank("os.write(1, b'x' * 60_000); os.write(1, b'y' * 60_000)", tee).wait()
    asked = []
    def is_hurried():
        asked.append(1)
        if len(asked) == 4:
            os.open("waited", os.O_CREAT)
        return Path("signal").exists()
    ended = tee.drain(0.1, is_hurried)
    os.write(2, str(ended).encode())
    """
    for is_read in (True, False):
        folder = tmp_path / str(is_read)
        folder.mkdir()
        process = launcher(folder, body, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until((folder / "waited").exists, "the reader is waited for")
        (folder / "signal").touch() if not is_read else None
        told = process.stderr.read(5) if not is_read else b""
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert told + err == (b"True" if is_read else b"False")
        if is_read:
            assert out == b"x" * 60_000 + b"y" * 60_000 + b"launcher ends\n"


def test_a_reader_that_goes_away_shows_to_rank_zero(tmp_path):
    body = """
    endless = "while True: os.write(1, b'line\\\\n')"
    first = rank(endless, tee).wait()
    tee.drain(5)
    second = rank("print('not shown'); sys.exit(7)", tee).wait()
    os.write(2, f"{first} {second}".encode())
    os._exit(0)
    """
    process = launcher(tmp_path, body, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(PATIENCE_SECONDS) == 0
    assert b"BrokenPipeError" in err and err.endswith(b"1 7")  # as without us, then the log alone
    assert (tmp_path / "rank0.log").read_bytes().endswith(b"not shown\n")


def test_output_can_go_elsewhere_and_a_refusal_counts_as_a_reader_that_went(tmp_path):
    taken = []

    def write(descriptor, data):
        taken.append((descriptor, data))
        if len(taken) > 1:
            raise OSError("gone")

    with RankZero(tmp_path, tmp_path / "rank0.log", write) as tee:
        words = [sys.executable, "-c", TAKE_STREAMS + "os.write(2, b'told')"]
        subprocess.run(words, env=os.environ | tee.environment, check=True)
        assert tee.drain(PATIENCE_SECONDS)
        words[-1] = TAKE_STREAMS + "while True: os.write(2, b'more')"
        again = subprocess.run(words, env=os.environ | tee.environment, capture_output=True)
        assert again.returncode != 0
        assert tee.drain(PATIENCE_SECONDS)
    assert [data for _, data in taken][0] == b"told" and len(taken) == 2


def test_a_log_that_cannot_be_written_does_not_stop_the_output_and_nothing_is_left_open(
    tmp_path, capfd
):
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for log in (Path("/dev/full"), tmp_path / "rank0.log"):
        with RankZero(tmp_path, log) as tee:
            words = [sys.executable, "-c", TAKE_STREAMS + "print('shown')"]
            subprocess.run(words, env=os.environ | tee.environment, check=True)
            assert tee.drain(PATIENCE_SECONDS)
        assert capfd.readouterr().out == "shown\n"
    del tee  # its log
    wait_until(lambda: threading.active_count() == before[1], "the threads have ended")
    assert sorted(os.listdir("/proc/self/fd")) == before[0]
    assert [file.name for file in tmp_path.iterdir()] == ["rank0.log"]
