"""A ledger of time: each microsecond of a rank is in one class, so the sums are exactly the wall clock.

class        from                                              to
-----------  ------------------------------------------------  ---------------------------------------------
start        the start of the process; a load                  the first forward
step         a forward with gradients                          the end of the optimizer step
data         the engine's loader, or train_batch, waits for a  there it is
             batch
evaluation   a forward without gradients; generation           the next step, save or batch
save         save_checkpoint                                   its return
stall        recovery has noticed a failure                    the ranks go on
repeated     the forward of a step that recovery has dropped   its failure is noticed
other        the end of a step                                 the next class: code of the script

`xds report` adds `restart`, between two processes, and takes steps that a later process has repeated for
`repeated`. What the ledger has counted since the line before is in each line of a step: see record.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

# of a region of a step, with gradients and without
_CLASSES = {"forward": ("step", "evaluation")}
_IN_A_STEP = ("step", "step")


@final
class Ledger:
    """The time of one engine's rank since its process has started."""

    def __init__(self) -> None:
        self.is_written = False  # this rank writes the record of the run
        self._at = _now()  # until here all is counted
        self._class = "start"
        self._counted: dict[str, int] = {"start": _process_age()}  # microseconds
        self._outer: list[str] = []  # classes around the `with` blocks that run
        self._blocks: dict[str, _Block] = {}

    def turn(self, name: str) -> None:
        """From now on time is of the class `name`."""
        if name == self._class:
            return
        now = _now()
        self._counted[self._class] = self._counted.get(self._class, 0) + now - self._at
        self._class, self._at = name, now

    def region(self, name: str, *, trains: bool) -> None:
        """A region of a step begins: forward, backward, reduce or step."""
        self.turn(_CLASSES.get(name, _IN_A_STEP)[not trains])

    def spending(self, name: str) -> _Block:
        """A `with` block of the class `name`. Afterwards the class is the one before."""
        if name not in self._blocks:
            self._blocks[name] = _Block(self, name)
        return self._blocks[name]

    def waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches. The time in which they are made is of the class data."""
        block = self.spending("data")
        while True:
            with block:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def drop(self) -> int:
        """The step that runs is dropped: its time is of the class repeated. Returns its microseconds."""
        self._count()
        lost = sum(self._counted.pop(name, 0) for name in ("step", "data"))
        self._counted["repeated"] = self._counted.get("repeated", 0) + lost
        return lost

    def take(self, then: str = "other") -> dict[str, int]:
        """Microseconds by class since the last call. What follows is of the class `then`."""
        self._count()
        taken, self._counted = self._counted, {}
        self._class = then
        return {name: spent for name, spent in taken.items() if spent}

    def _count(self) -> None:
        now = _now()
        self._counted[self._class] = self._counted.get(self._class, 0) + now - self._at
        self._at = now

    def enter(self, name: str) -> None:
        """See `spending`."""
        self._outer.append(self._class)
        self.turn(name)

    def leave(self) -> None:
        """See `spending`."""
        self.turn(self._outer.pop())


@final
class _Block:
    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger, self._name = ledger, name

    def __enter__(self) -> None:
        self._ledger.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._ledger.leave()


def in_seconds(spent: dict[str, int]) -> dict[str, float]:
    """For a line of the record; exact to the microsecond."""
    return {name: round(count / 1e6, 6) for name, count in spent.items()}


def _now() -> int:
    return time.monotonic_ns() // 1000


def _process_age() -> int:
    """Microseconds since this process has started; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_seconds = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started_seconds
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
    return max(0, int(1e6 * age_seconds))


__all__ = ["Ledger", "in_seconds"]
