"""Collectives made of messages that gloo carries, for CPUs.

See pairwise.py for what is sent, and shared_memory.py for ranks of one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..watch import Mark
from .collectives import PartOf
from .handles import Handle, InFlight
from .light_thread import light_thread
from .pairwise import Messages, Pairwise

# Works that were dropped before they were complete, as by an engine that ends after a backward. gloo handles
# the messages of a connection in order: one whose memory is gone would hold up all later ones for ever.
# Nothing says that such a work is complete, so it is kept as long as its group.
_dropped: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()


@final
class PeerToPeer(Pairwise):
    """Collectives made of messages between all pairs of ranks, for gloo."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, part_of: PartOf | None = None
    ) -> None:
        super().__init__(group, device, part_of)
        self._dropped = _dropped.setdefault(group, [])

    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        assert self.group is not None
        works: list[tuple[int | None, Any]] = []
        peer = None
        try:
            for peer, tensor in receives:
                works.append((self._ranks[peer], self.group.recv([tensor], peer, tag)))
            for peer, tensor in sends:
                works.append((self._ranks[peer], self.group.send([tensor], peer, tag)))
        except RuntimeError as error:
            place = None if peer is None else self._ranks[peer]
            raise self._watch.failed(mark, error, place) from error
        return InFlight(self._watch, mark, works, finish, self._dropped)

    def _exchange(self, mark: Mark, tag: int, receives: Messages, sends: Messages) -> None:
        """The caller sleeps once."""
        light_thread.run(lambda: self._transfer(mark, tag, receives, sends).wait())
