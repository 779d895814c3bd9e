"""Text of others: cut in messages, matched by expressions, read from files, written to pipes."""

import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from xds.utils import messages, patterns, small_files
from xds.utils.errors import BuildError, ConfigError, DamagedError, PeerError, UsageError, XdsError
from xds.utils.messages import OutputWriter, always, never, write_stderr
from xds.utils.patterns import matching
from xds.utils.quoting import escaped, plain_lines, printable, quoted
from xds.utils.schema import section
from xds.utils.schema.section import Report
from xds.utils.schema.values import shown
from xds.utils.small_files import read_small_file

# colour, title, bell, new line, C1 control, reversed writing, half of a surrogate pair
HOSTILE = "a\x1b[31m\x1b]0;t\x07\nb\r\x9b\x7f\u202e\udc80z"
TOLD = "a\\x1b[31m\\x1b]0;t\\x07\\nb\\r\\x9b\\x7f\\u202e\\udc80z"


def test_every_character_is_shown_and_the_length_is_bounded():
    assert printable(HOSTILE) == TOLD == escaped(HOSTILE) and quoted(HOSTILE) == f"'{TOLD}'"
    assert printable("größer 日本 ~/a b") == "größer 日本 ~/a b"
    for make in (printable, quoted):
        for text in ("x" * 10**7, "\x1b" * 10**7):
            assert len(make(text)) == 200 and make(text).endswith("...")
            assert len(make(text, 50)) == 50
    assert printable("x" * 200) == "x" * 200
    assert plain_lines(f"one\n\t{HOSTILE}\n") == f"one\n\\t{TOLD}\n".replace("\\nb", "\nb")


def test_no_error_steers_a_terminal():
    errors = [kind(HOSTILE) for kind in (XdsError, UsageError, DamagedError, PeerError)]
    errors += [
        BuildError(HOSTILE, HOSTILE, [HOSTILE], HOSTILE),
        ConfigError([HOSTILE] * 2, HOSTILE),
    ]
    for error in errors:
        for one in (error, pickle.loads(pickle.dumps(error))):
            assert str(one) == str(error)
            assert all(line.isprintable() for line in str(one).split("\n"))


def test_a_config_error_lists_the_first_of_many_and_carries_all():
    error = ConfigError([f"key{number}" for number in range(5000)])
    assert len(error.complaints) == 5000 == len(pickle.loads(pickle.dumps(error)).complaints)
    lines = str(error).splitlines()
    assert len(lines) == 22 and "5000 problems" in lines[0] and "4980 more" in lines[-1]


def test_keys_and_values_are_cut_and_only_the_first_unknown_ones_are_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(section, "nearest", lambda key, names: compared.append(key) or [])
    report = Report()
    report.complain_unknown("fp16", "x" * 10**7, "v" * 10**7, ["enabled"])
    for number in range(1000):
        report.complain_unknown("", f"key{number}", [["v"] * 10**4], ["enabled"])
    assert len(report.complaints) == 1001 and max(map(len, report.complaints)) < 400
    assert len(compared) < 25 and max(map(len, compared)) < 100


def test_a_value_is_written_as_far_as_it_is_shown():
    assert shown({"a": [1, None]}) == '{"a": [1, null]}' and shown(True) == "true"
    assert shown("x" * 10**7) == '"' + "x" * 56 + "..." and shown(HOSTILE).isprintable()
    told = []

    class Counted(list):
        def __iter__(self):
            for each in range(10**9):
                told.append(each)
                yield each

    assert shown(Counted([1])).endswith("...") and len(told) < 100


# -- files --------------------------------------------------------------------------------------------------


def test_a_short_file_is_read_whatever_it_is_called(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to("file")
    for path in (tmp_path / "file", str(tmp_path / "link")):
        assert read_small_file(path, 1000) == b"x" * 1000
    (tmp_path / "empty").touch()
    assert read_small_file(tmp_path / "empty") == b""


def test_what_is_no_short_file_is_refused(tmp_path):
    (tmp_path / "long").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    for name, told in {
        "long": "longer than 1 MiB",
        "zero": "a device",
        ".": "Is a directory",
        "socket": "No such device",
        "none": "No such file",
    }.items():
        with pytest.raises(OSError) as error:
            read_small_file(tmp_path / name)
        assert told in error.value.strerror
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError):
            read_small_file("/dev/zero")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_read_to_its_end_and_not_waited_for_where_nobody_writes(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    data = b"x" * 300_000
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,))
    writer.start()
    assert read_small_file(tmp_path / "pipe") == data
    writer.join()
    monkeypatch.setattr(small_files, "PIPE_SECONDS", 0.2)
    for is_open in (True, False):
        descriptor = os.open(tmp_path / "pipe", os.O_RDWR) if is_open else -1
        with pytest.raises(TimeoutError) as error:
            read_small_file(tmp_path / "pipe")
        assert "received no data" in error.value.strerror
        if is_open:
            os.close(descriptor)


# -- expressions of a config --------------------------------------------------------------------------------

NAMES = ["", *"a b aa ab ba aba abab a.b a.a.b .a a. a+ [a]".split(), "a\nb"]


def test_an_expression_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(patterns, "MOST_SECONDS", 0.1)
    for text in ("(a|a)*$", "a?" * 40 + "a" * 40):
        with pytest.raises(ValueError, match="for 2 names; write one with fewer repeats"):
            matching(text, ["a" * 39 + "c", "a" * 200 + "c"])


def test_both_ways_find_the_same_and_a_plain_expression_starts_no_process(monkeypatch):
    for text in ("", "b", "a+", "[*+?|]a", "a*b", "(a|b)*", "(?i)B|A|C"):
        find = re.compile(text, re.IGNORECASE)
        for anywhere in (False, True):
            wanted = [bool((find.search if anywhere else find.match)(name)) for name in NAMES]
            assert matching(text, NAMES, anywhere=anywhere, flags=re.IGNORECASE) == wanted, text
    monkeypatch.setattr(subprocess, "run", None)
    assert matching(r".*\.o_proj\.weight$", ["h.0.o_proj.weight", "o_proj"]) == [True, False]
    with pytest.raises(TypeError):
        matching(r"(.*\.)*o_proj", ["o_proj"])


# -- streams that are not read ------------------------------------------------------------------------------

FULL_BYTES = 1 << 20  # more than a pipe holds


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.setattr(messages, "PATIENCE_SECONDS", 0.1)
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
    thread.join(3 * messages.PATIENCE_SECONDS)
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
