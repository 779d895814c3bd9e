"""Tests of writing to streams that are not read: it never fails, and never blocks once it is urgent."""

import os
import sys
import threading
import time

import pytest

from xds.utils.messages import PATIENCE_SECONDS, OutputWriter, always, never, write_stderr

FULL_BYTES = 1 << 20  # more than a pipe holds


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    yield ends
    for descriptor in ends:
        os.close(descriptor)


def fill(descriptor):
    os.set_blocking(descriptor, False)
    try:
        while True:
            os.write(descriptor, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(descriptor, True)


def test_a_message_is_written_whole(pipe, monkeypatch):
    reader, writer = pipe
    monkeypatch.setattr(sys, "stderr", open(writer, "w", closefd=False))
    got = []
    thread = threading.Thread(target=lambda: got.append(os.read(reader, FULL_BYTES)))
    thread.start()
    write_stderr("größer\n", never)
    thread.join()
    assert got == ["größer\n".encode()]


def test_a_message_for_nobody_fails_not(pipe, monkeypatch):
    reader, writer = pipe
    monkeypatch.setattr(sys, "stderr", open(writer, "w", closefd=False))
    os.close(reader)
    pipe[0] = os.dup(writer)
    write_stderr("lost\n", never)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        write_stderr("lost\n", never)
    write_stderr("closed\n", never)
    monkeypatch.setattr(sys, "stderr", None)
    write_stderr("none\n", never)


def test_a_message_for_a_full_pipe_is_dropped_only_when_urgent(pipe, monkeypatch):
    reader, writer = pipe
    fill(writer)
    monkeypatch.setattr(sys, "stderr", open(writer, "w", closefd=False))
    write_stderr("not yet\n", always)
    asked = []

    def is_urgent():
        asked.append(1)
        return len(asked) > 5

    write_stderr("not yet\n", is_urgent)
    assert len(asked) > 5
    os.read(reader, FULL_BYTES)
    wait_until(lambda: not any(t.name == "xds-message" for t in threading.enumerate()))
    assert os.read(reader, FULL_BYTES).endswith(b"not yet\nnot yet\n")


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_an_output_writer_waits_for_a_slow_reader_and_drops_the_rest_when_urgent(pipe):
    reader, writer = pipe
    is_urgent = threading.Event()
    output = OutputWriter(is_urgent.is_set)
    begun = threading.Event()
    thread = threading.Thread(
        target=lambda: (begun.set(), output.write(writer, b"y" * FULL_BYTES)), daemon=True
    )
    thread.start()
    begun.wait()
    thread.join(2 * PATIENCE_SECONDS)
    assert thread.is_alive()  # as a plain write would
    is_urgent.set()
    thread.join()
    output.write(writer, b"dropped")
    got = b""
    while len(got) < FULL_BYTES:
        got += os.read(reader, FULL_BYTES)
    output.close()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    assert got == b"y" * FULL_BYTES


def test_an_output_writer_reports_a_closed_reader_and_keeps_streams_apart(pipe):
    reader, writer = pipe
    other_reader, other_writer = os.pipe()
    output = OutputWriter(never)
    os.close(other_reader)
    with pytest.raises(BrokenPipeError):
        output.write(other_writer, b"lost")
    output.write(writer, b"kept")
    assert os.read(reader, 10) == b"kept"
    os.close(other_writer)
    output.close()
