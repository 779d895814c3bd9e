"""Tests of the detection of a stuck device queue: with a replacement of torch.cuda, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from xds.ops.watch.device import Probe


class Event:
    """Completes when the test sets it."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


def test_an_event_that_is_not_passed_says_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def record(self: Probe) -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(Probe, "_record", record)
    probe = Probe(torch.device("cuda", 0))
    assert not probe.is_stuck()  # the first look records
    assert probe.is_stuck() and probe.is_stuck() and probe.count == 1
    events[0].is_passed = True
    assert not probe.is_stuck() and probe.count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_device_is_stuck_until_it_is_through() -> None:
    probe = Probe(torch.device("cuda", 0))
    torch.cuda._sleep(2_000_000_000)
    assert not probe.is_stuck()
    assert probe.is_stuck()
    torch.cuda.synchronize()
    assert not probe.is_stuck()
