"""Hands on what ranks of this host have in memory from one head of a run to the next, if the first is killed.

    head is killed    node part: kills its ranks, notes whose versions it holds ── nobody comes: removes them
    another head      node part: renames their folder, says whose they are      ── gets the order to go on

The name of the folder has the process id of its node part (recovery/slots.py). So a rename gives it to one
other node part only, and the former one sees that it is gone. Ranks of two heads never run at a time: a folder
is free when all processes of its ranks have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import final

from ...recovery import slots
from ..job import Order
from ..ranks.guard import Guard, stat

HOLD_SECONDS = 30.0  # that versions are held for another head
_END_SECONDS = 20.0  # that another head's ranks have for their end
_TICK_SECONDS = 0.05
_RUN, _HELD, _PARTIAL = "run", "held", ".partial"

# By rank: the number of the head of its last process, and the number of that process. The greater one is newer
Held = dict[int, tuple[int, int]]


@final
class Holding:
    """The folders of states of one node part, as a context: for a run with recovery."""

    def __init__(self, run: str, host: str, head: int) -> None:
        """run: the same for all heads of the run. host: the name of this one. head: its number, from 0."""
        self._owner, self._head = f"{run} {host}", head
        self._newest: Held = {}  # of ranks that run here, or have run here
        self._own = slots.versions_of(os.getpid())
        self._guard = Guard()

    def __enter__(self) -> Holding:
        self._guard.__enter__()
        self._guard.remove(slots.all_folders(os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
        self._guard.__exit__(None, None, None)

    # -- from a head before -----------------------------------------------------------------------------

    def take_over(self) -> Held:
        """Take what node parts of heads before have left on this host. Returns whose it is.

        A host that comes back to the same head has lost its places, so the first head removes what is there.
        """
        deadline = time.monotonic() + _END_SECONDS
        while self._head and time.monotonic() < deadline:
            if not any(held is None and _is_alive(other) for other, held in self._others()):
                break
            time.sleep(_TICK_SECONDS)
        for other, held in sorted(self._others(), key=_age):
            if held is None and _is_alive(other):
                continue
            self.remove()
            with contextlib.suppress(OSError):  # another one was first
                slots.take_over(other)
                self._newest = held or {}  # nothing counts of one that was killed with its guard
        if not self._head or not self._newest:
            self.remove()
        return self._newest

    def _others(self) -> Iterator[tuple[int, Held | None]]:
        """Other node parts of this host and run: their process ids, and what they hold."""
        for launcher in slots.launchers_with_versions():
            folder = slots.versions_of(launcher)
            with contextlib.suppress(OSError):
                is_own = folder.stat().st_uid == os.geteuid() and launcher != os.getpid()
                if is_own and (folder / _RUN).read_text() == self._owner:
                    yield launcher, _held_in(folder)

    # -- of an order ------------------------------------------------------------------------------------

    def begin(self, order: Order) -> None:
        """Ranks begin here. Only the versions from which they go on are kept."""
        place = order.rendezvous.node_rank
        first = 0 if place is None else sum(order.counts[:place])
        ranks = range(first, first + order.counts[place]) if place is not None else ()
        if not order.takes_over or self._newest.keys() != set(ranks):
            self.remove()
        self._own.mkdir(0o700, exist_ok=True)
        (self._own / _HELD).unlink(missing_ok=True)
        (self._own / _RUN).write_text(self._owner)
        if not order.takes_over:
            self._newest = dict.fromkeys(ranks, (self._head, 0))

    # -- after the ranks --------------------------------------------------------------------------------

    def note(self, attempts: Mapping[int, int]) -> None:
        """New processes have run here. attempts: by rank, the number of the last one."""
        self._newest |= {rank: (self._head, number) for rank, number in attempts.items()}

    def hold(self) -> None:
        """Keep versions for another head, for a limited time. All ranks of this host have ended."""
        if not self._newest or not slots.has_versions(os.getpid()):
            return
        if not (self._own / _HELD).exists():
            partial = self._own / f"{_HELD}{_PARTIAL}"
            partial.write_text(json.dumps(list(self._newest.items())))
            partial.rename(self._own / _HELD)
        deadline = time.monotonic() + HOLD_SECONDS
        while self._own.exists() and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)

    def remove(self) -> None:
        """Nothing of ranks of this node part is needed any more."""
        with contextlib.suppress(OSError):  # first: another one may take it over
            self._own.rename(f"{self._own}-ended")
        for path in glob(slots.all_folders(os.getpid())):
            shutil.rmtree(path, ignore_errors=True)
        self._newest = {}


def _held_in(folder: Path) -> Held | None:
    """Whose versions are there; None: their ranks may run."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads((folder / _HELD).read_text())
        return {int(rank): (int(head), int(number)) for rank, (head, number) in told}
    return None


def _age(other: tuple[int, Held | None]) -> tuple[int, int]:
    return max((other[1] or {}).values(), default=(-1, 0))


def _is_alive(launcher: int) -> bool:
    return stat(launcher)[:1] not in ([], ["Z"], ["X"])


__all__ = ["HOLD_SECONDS", "Held", "Holding"]
