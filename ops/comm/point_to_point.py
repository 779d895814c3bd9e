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
from .memory.operations import Messages
from .pairwise import Pairwise

# Works that were dropped before they were complete, as by an engine that ends after a backward. gloo handles
# the messages of a connection in order: one whose memory is gone would hold up all later ones for ever.
# Nothing says that such a work is complete, so it is kept as long as its group.
_dropped: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()

Works = list[tuple[int | None, Any]]  # each with its peer, among all ranks


def dropped_of(group: dist.ProcessGroup) -> list[Any]:
    """Takes works, and their memory, that nobody waits for."""
    return _dropped.setdefault(group, [])


def post(of: Pairwise, mark: Mark, tag: int, receives: Messages, sends: Messages) -> Works:
    """Start messages of the group `of` that gloo carries."""
    assert of.group is not None
    works: Works = []
    peer = None
    try:
        for peer, tensor in receives:
            works.append((of.members[peer], of.group.recv([tensor], peer, tag)))
        for peer, tensor in sends:
            works.append((of.members[peer], of.group.send([tensor], peer, tag)))
    except RuntimeError as error:
        raise of.failed(mark, error, peer) from error
    return works


@final
class PeerToPeer(Pairwise):
    """Collectives made of messages between all pairs of ranks, for gloo."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, part_of: PartOf | None = None
    ) -> None:
        super().__init__(group, device, part_of)
        self._dropped = dropped_of(group)

    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        works = post(self, mark, tag, receives, sends)
        return InFlight(self._watch, mark, works, finish, self._dropped)

    def _exchange(self, mark: Mark, tag: int, receives: Messages, sends: Messages) -> None:
        """The caller sleeps once."""
        light_thread.run(lambda: self._transfer(mark, tag, receives, sends).wait())
