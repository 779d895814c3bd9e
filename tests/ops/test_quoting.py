"""Tests of escaping and cutting text in messages, and of reading or refusing files that should be short."""

import os
import pickle
import socket
import threading

import pytest

from xds.utils import small_files
from xds.utils.errors import BuildError, ConfigError, DamagedError, PeerError, UsageError, XdsError
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


@pytest.mark.parametrize(
    "error",
    [
        XdsError(HOSTILE),
        UsageError(HOSTILE),
        DamagedError(HOSTILE),
        PeerError(HOSTILE),
        BuildError(HOSTILE, HOSTILE, [HOSTILE], HOSTILE),
        ConfigError([HOSTILE, HOSTILE], HOSTILE),
    ],
)
def test_no_error_steers_a_terminal(error):
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


@pytest.mark.parametrize("is_open", [True, False])
def test_a_pipe_into_which_nobody_writes_is_not_waited_for(tmp_path, monkeypatch, is_open):
    monkeypatch.setattr(small_files, "PIPE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR) if is_open else -1
    with pytest.raises(TimeoutError) as error:
        read_small_file(tmp_path / "pipe")
    assert "received no data" in error.value.strerror
    if is_open:
        os.close(writer)


def test_a_pipe_with_a_writer_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    data = b"x" * 300_000

    def write():
        with open(tmp_path / "pipe", "wb") as file:
            file.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_small_file(tmp_path / "pipe") == data
    writer.join()
