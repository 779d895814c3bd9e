"""Measures time on the device: contestants, including a plain copy, alternate between two events each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from harness import Row, ratio_row

COPY = "copy"
COPY_BYTES = 1 << 32  # read and written by one turn of the copy


@dataclass
class Clock:
    """Alternates contestants. Overwrites the L2 before each turn, so the host also runs ahead of the device."""

    deadline: float
    rounds: int = 11
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))

    def __post_init__(self) -> None:
        self._flush = torch.empty(1 << 28, dtype=torch.uint8, device=self.device)
        self._from = torch.randint(
            0, 255, (COPY_BYTES // 2,), dtype=torch.uint8, device=self.device
        )
        self._to = torch.empty_like(self._from)
        self.rates: list[float] = []

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def turns(self, contestants: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Milliseconds of each turn of each contestant and of the copy, round by round."""
        everybody = {**contestants, COPY: lambda: self._to.copy_(self._from)}
        for run in everybody.values():
            for _ in range(2):
                run()
        names, events = list(everybody), {name: [] for name in everybody}
        for turn in range(self.rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                self._flush.fill_(turn)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                everybody[name]()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
        times = {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}
        self.rates += [COPY_BYTES / ms / 1e6 for ms in times[COPY]]
        return times

    def against_copy(
        self, name: str, times: dict[str, list[float]], who: str, size_bytes: float, share: float
    ) -> Row:
        """The time relative to copying as many bytes: at most 1 / share."""
        floor = [ms * size_bytes / COPY_BYTES for ms in times[COPY]]
        row = ratio_row(f"{name}: {who} / copy", times[who], floor, must=1 / share)
        ms = statistics.median(times[who])
        row.note = f"{1 / row.value:.0%} of copy; {ms:.2f} ms, {size_bytes / ms / 1e6:.0f} GB/s"
        row.samples = {who: times[who], COPY: times[COPY]}
        return row

    @property
    def gb_per_second(self) -> float:
        """The copy's median rate so far, reading and writing counted."""
        return statistics.median(self.rates)
