"""Collectives made of messages that gloo carries: `PeerToPeer` for CPUs, `Staged` for several ranks on one GPU.

See pairwise.py for what is sent, and shared_memory.py for CPU ranks of one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch import Mark
from .handles import Handle, InFlight
from .light_thread import light_thread
from .memory.operations import Messages
from .pairwise import Pairwise

# Works that were dropped before they were complete, as by an engine that ends after a backward. gloo handles
# the messages of a connection in order: one whose memory is gone would hold up all later ones for ever.
# Nothing says that such a work is complete, so it is kept as long as its group.
_dropped: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()

Works = list[tuple[int | None, Any]]  # each with its peer, among all ranks


def dropped_of(group: dist.ProcessGroup | None) -> list[Any]:
    """Takes works, and their memory, that nobody waits for."""
    assert group is not None
    return _dropped.setdefault(group, [])


@final
class Lost(RuntimeError):
    """A rank does not take part. rank: which, among all ranks, if it is known."""

    def __init__(self, reason: str, rank: int | None) -> None:
        super().__init__(reason)
        self.rank = rank


def post(of: Pairwise, works: Works, tag: int, receives: Messages, sends: Messages) -> None:
    """Start messages of the group `of` that gloo carries, and add them to `works`. Raises Lost."""
    assert of.group is not None
    for start, messages in ((of.group.recv, receives), (of.group.send, sends)):
        for peer, tensor in messages:
            try:
                works.append((of.members[peer], start([tensor], peer, tag)))
            except RuntimeError as error:
                raise Lost(str(error), of.members[peer]) from error


def transfer(
    of: Pairwise,
    mark: Mark,
    tag: int,
    receives: Messages,
    sends: Messages,
    finish: Callable[[], None] | None,
) -> Handle:
    """As `Pairwise._transfer`, with messages that gloo carries."""
    works: Works = []
    try:
        post(of, works, tag, receives, sends)
    except Lost as error:
        raise of.watch.failed(mark, error, error.rank) from error
    return InFlight(of.watch, mark, works, finish, dropped_of(of.group))


@final
class PeerToPeer(Pairwise):
    """Collectives made of messages between all pairs of ranks, for gloo."""

    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        return transfer(self, mark, tag, receives, sends, finish)

    def _exchange(self, mark: Mark, tag: int, receives: Messages, sends: Messages) -> None:
        """The caller sleeps once."""
        light_thread.run(lambda: self._transfer(mark, tag, receives, sends).wait())


@final
class Staged(Pairwise):
    """The same for tensors of a CUDA device. gloo reads and writes host memory only.

    sender      device ── copy ──> host   the call returns when the copy is complete
    receiver    host ── copy ──> device   `wait` starts the copy on its current stream

    The host memory is page-locked. torch keeps it for later messages, once the copies out of it are complete.
    """

    @torch.no_grad()
    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        arriving = [(peer, _on_host(target)) for peer, target in receives]
        sources = {id(tensor): tensor for _, tensor in sends}  # one copy for all receivers
        copies = {
            key: _on_host(tensor).copy_(tensor, non_blocking=True)
            for key, tensor in sources.items()
        }
        started = torch.cuda.Event()  # type: ignore[no-untyped-call]
        started.record(torch.cuda.current_stream(self.device))
        if copies:
            started.synchronize()  # gloo's thread reads the copies at once

        @torch.no_grad()
        def arrive() -> None:
            # the stream of the start may still use the targets
            torch.cuda.current_stream(self.device).wait_event(started)
            for (_, target), (_, host) in zip(receives, arriving, strict=True):
                target.copy_(host, non_blocking=True)
            if finish is not None:
                finish()

        leaving = [(peer, copies[id(tensor)]) for peer, tensor in sends]
        return transfer(self, mark, tag, arriving, leaving, arrive)


def _on_host(tensor: Tensor) -> Tensor:
    """Page-locked memory of the same shape and dtype, undefined."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
