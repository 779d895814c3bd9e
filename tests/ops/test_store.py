"""What others may write into the store of a run: it is not read, waited for or shown as it is."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import TypeAdapter

from xds.ops.watch import store
from xds.ops.watch.diagnosis import RankReport, explain
from xds.ops.watch.reports import Beat, ReportExchange
from xds.ops.watch.store import Store
from xds.ops.watch.stragglers import SpeedChange
from xds.utils.sealing import RUN_KEY, new_key, seal, unseal

ESCAPE = "\x1b]0;PWNED\x07\x1b[31m"
MALFORMED = (
    "",
    "not JSON",
    b"\xff\xfe",
    "[" * 100_000,
    "{}",
    "7",
    '{"at": 1, "host": "h", "steps": [[1, 2]]}',
    '{"at": "now"}',
    '{"rank": 1, "own": [[1, 2]]}',
    '{"rank": 1, "number": "many"}',
    '{"rank": 0}',  # in the place of rank 1
)


@pytest.fixture
def raw() -> Any:
    return dist.HashStore()


@pytest.fixture
def ranks(raw: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Store]:
    """The views of two ranks of a run with a key."""
    monkeypatch.setenv(RUN_KEY, new_key())
    return Store(raw, "0", 0), Store(raw, "0", 1)


# -- with a key --------------------------------------------------------------------------------------------


def test_only_what_a_process_of_the_run_wrote_is_read_and_nobody_else_can_read_it(
    raw: Any, ranks: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = ranks
    text = "rank 1 raised ValueError: ü\udcff"
    theirs.set("xds/waits/1", text)
    assert mine.read("xds/waits/1") == text and mine.read("xds/waits/2") is None
    assert b"ValueError" not in raw.get("xds/waits/1")
    for forged in (*MALFORMED, "1 99999999999999999 text", ESCAPE):
        raw.set("xds/waits/1", forged)
        assert mine.read("xds/waits/1") is None
    monkeypatch.setenv(RUN_KEY, new_key())
    Store(raw, "0", 1).set("xds/waits/1", text)  # of another run
    assert mine.read("xds/waits/1") is None


def test_a_message_counts_for_its_name_and_its_group_alone(
    raw: Any, ranks: tuple[Store, Store]
) -> None:
    mine, theirs = ranks
    theirs.set("xds/beat/0/1", "a")
    sealed = raw.get("xds/beat/0/1")
    raw.set("xds/beat/1/1", sealed)
    raw.set("xds/preemption/0/notice", sealed)
    assert mine.read("xds/beat/1/1") is None and mine.read("xds/preemption/0/notice") is None
    assert mine.read("xds/beat/0/1") == "a" and Store(raw, "1", 0).read("xds/beat/0/1") is None


def test_an_old_message_is_not_read_again(raw: Any, ranks: tuple[Store, Store]) -> None:
    mine, theirs = ranks
    kept = []
    for text in ("1", "2", "3"):
        theirs.set("checkpoint/a/1/alive", text)
        kept.append(raw.get("checkpoint/a/1/alive"))
        assert mine.read("checkpoint/a/1/alive") == text
    for old in kept[:2]:
        raw.set("checkpoint/a/1/alive", old)
        assert mine.read("checkpoint/a/1/alive") is None
    raw.set("checkpoint/a/1/alive", kept[2])
    assert mine.read("checkpoint/a/1/alive") == "3"
    mine.set("checkpoint/a/1/alive", "4")  # each writer has a clock of its own
    assert theirs.read("checkpoint/a/1/alive") == "4"


def test_what_is_not_of_the_run_is_told_once(
    raw: Any,
    ranks: tuple[Store, Store],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "_first_warning", threading.Lock())
    with caplog.at_level(logging.WARNING, "xds"):
        for number in range(5):
            raw.set(f"{number}", ESCAPE)
            assert ranks[0].read(f"{number}") is None
    (line,) = caplog.messages
    assert line.isprintable() and "no process of the run has written it" in line


def test_a_seal_that_is_changed_anywhere_is_none() -> None:
    key = new_key()
    sealed = seal(key, "name", "text").encode()
    assert unseal(key, "name", sealed) == "text"
    for at in range(len(sealed)):
        changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        with pytest.raises(ValueError):
            unseal(key, "name", changed)
    for wrong in ((new_key(), "name", sealed), (key, "nam", b"e" + sealed), (key, "", b"")):
        with pytest.raises(ValueError):
            unseal(*wrong)


# -- without one -------------------------------------------------------------------------------------------


def test_a_malformed_message_is_ignored(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_KEY, raising=False)
    exchange = ReportExchange(Store(raw, "0", 0), 0, 2, 0)
    exchange.beat(Beat(1.0, "host", [(4, 0.5, 0.25)]))
    for text in MALFORMED:
        keys = ("waits/1", "answers/0/1", "beat/0/1", "read/0/1")
        for key in (*keys, *(["alarm/0"] if text != "7" else [])):
            raw.set(f"xds/{key}", text)
        assert exchange.beats() == {} and exchange.alarm() == 0, text
        assert exchange.silences({}).keys() == {0}
        mine = RankReport(0)
        assert exchange.collect(mine, 0.0, 1) == {0: mine}
        exchange.wait_for_readers({0: mine, 1: RankReport(1)}, 0.0, 8)


def test_a_message_that_is_deleted_while_it_is_read_is_not_waited_for(raw: Any) -> None:
    class Deleting:
        """Between the question whether a key is there and its reading it goes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(raw, name)

        def check(self, keys: list[str]) -> bool:
            there = bool(raw.check(keys))
            raw.delete_key(keys[-1])
            return there

    raw.set("a", "1")
    raw.set("b", "1")
    deleting = Store(Deleting(), "0", 0)
    raw.set_timeout(timedelta(seconds=0.1))
    assert deleting.read_all_as(TypeAdapter(int), ["a", "b"]) == []
    raw.set("b", "1")
    assert deleting.read("b") == "1" and deleting.read("c") is None


def test_what_a_report_says_cannot_control_the_terminal() -> None:
    reports = [
        RankReport(0, waits_in=ESCAPE, number=1),
        RankReport(1, raised=f"{ESCAPE}\nxds: all is well"),
    ]
    assert explain(reports, 2).isprintable()
    assert SpeedChange(1, True, 1.0, 0.1, 0.9).message(ESCAPE).isprintable()
