"""Tests of wall_clock_breakdown and memory_breakdown: the lines, where they are, and their numbers."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from helpers import run_new_ranks
from models import build, micro_batch

import xds
import xds.deepspeed as deepspeed

NUMBER = r"\d+\.\d\d"
TIMES = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
MEMORY = (
    rf" \| MA {NUMBER} GB \| Max_MA {NUMBER} GB \| CA {NUMBER} GB \| Max_CA {NUMBER} GB "
    rf"\| CPU Virtual Memory: used = {NUMBER} GB, percent = \d+\.\d%"
)
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 2,
}


class Lines(logging.Handler):
    """The messages of xds's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @classmethod
    def of_xds(cls) -> Lines:
        lines = cls()
        logging.getLogger("xds").addHandler(lines)
        logging.getLogger("xds").setLevel(logging.INFO)
        return lines


def train(engine: Any, num_steps: int) -> None:
    for step in range(num_steps):
        for micro_step in range(2):
            engine.backward(engine(micro_batch(step, 2 * micro_step + engine.global_rank)))
            engine.step()


def lines_of(more: dict[str, Any]) -> list[str]:
    seen = Lines.of_xds()
    engine = xds.initialize(build("plain"), {**CONFIG, **more})
    seen.lines.clear()  # of the start
    train(engine, 4)
    return seen.lines


def test_lines_of_printed_steps() -> None:
    more = {"wall_clock_breakdown": True, "memory_breakdown": True}
    first, second = run_new_ranks(lines_of, 2, more)
    assert second == []
    points = [
        f"Engine {at} {of}" for of in ("forward", "backward", "step") for at in ("before", "after")
    ]
    want = [
        r"step \d+, .*",
        r"time \(ms\)" + "".join(rf" \| {name}_microstep: {NUMBER}" for name in TIMES),
        r"time \(ms\)" + "".join(rf" \| {name}: {NUMBER}" for name in TIMES),
        *(point + MEMORY for point in points),
    ]
    assert len(first) == 2 * len(want)
    for line, pattern in zip(first, want + want, strict=True):
        assert re.fullmatch(pattern, line), line
    step = dict(part.split(": ") for part in first[2].split(" | ")[1:])
    both = float(step["bwd_inner"]) + float(step["bwd_allreduce"])
    assert float(step["bwd"]) == pytest.approx(both, abs=0.02)


def test_no_lines_without_the_keys() -> None:
    (first,) = run_new_ranks(lines_of, 1, {})
    assert [line.partition(",")[0] for line in first] == ["step 2", "step 4"]


def test_see_memory_usage(caplog: pytest.LogCaptureFixture) -> None:
    see_memory_usage = deepspeed.runtime.utils.see_memory_usage
    with caplog.at_level(logging.INFO, "xds"):
        see_memory_usage("quiet")
        see_memory_usage("after the model", force=True)
    assert [bool(re.search("after the model" + MEMORY, text)) for text in caplog.messages] == [True]
