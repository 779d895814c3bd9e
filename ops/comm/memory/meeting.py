"""How the ranks of a group find out that they share memory, and map each other's segments.

    every rank   its host, process, file, token    ──small gather──> those of all
                 maps the files of the others, and finds their tokens in them
                 "I have mapped all of them"       ──small gather──> all have, or nobody uses it

The token is what decides: ranks in different containers may have one host id, and process numbers of their own.
The system lets only the same user, or root, open a file through /proc.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_void_p
from typing import NamedTuple, final

import torch
from torch import Tensor

from ..hosts import host_key
from .library import Native
from .segment import NoSegment, Segment, segment

Gather = Callable[[Tensor, str], Tensor]  # [n] int64 and a subject for messages -> [world_size, n]

MAX_RANKS = 256  # as in segment.h
_WHAT = "shared memory"


@final
class Neighbours:
    """A group of which this process has mapped the segments: the ranks on its machine.

    ranks: those on this machine, this one too. hosts: for each rank, the lowest rank on its machine.
    """

    def __init__(
        self, found: Segment, ranks: Sequence[int], hosts: Sequence[int], handle: int
    ) -> None:
        self.segment = found
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.handle = handle


@final
class _Mapped(NamedTuple):
    """The segment of a peer. peer: of the native library."""

    peer: int
    control: int
    data: int
    size_bytes: int  # of both
    pidfd: int

    def unmap(self, native: Native) -> None:
        """For one that no group uses."""
        native.unmap(self.control, native.control_bytes())
        native.unmap(self.data, self.size_bytes - native.control_bytes())
        if self.pidfd >= 0:
            os.close(self.pidfd)


_peers: dict[tuple[int, int], _Mapped] = {}  # by token

_FINE, _NOT_OPENED, _NO_SEGMENT = range(3)


def meet(rank: int, size: int, gather: Gather) -> tuple[Neighbours | None, str]:
    """For all ranks of a group: whom this one shares memory with. Where any rank fails, all get None.

    Returns: the neighbours; and why there are none, on the one rank that is to tell it.
    """
    own, why, state = None, "", _FINE
    try:
        own = segment()
    except NoSegment as error:
        why, state = str(error), _NO_SEGMENT
    token = own.token if own is not None else (0, 0)
    mine = [host_key(), os.getpid(), own.fd if own else -1, *map(_signed, token)]
    mine += [
        own.size_bytes if own else 0,
        _signed(int.from_bytes(os.urandom(8), "big")),
        os.getuid(),
    ]
    table = gather(torch.tensor(mine), _WHAT).tolist()
    hosts = [next(at for at, row in enumerate(table) if row[0] == one[0]) for one in table]
    ranks = [at for at in range(size) if hosts[at] == hosts[rank]]
    if len(set(hosts)) == size:
        return None, ""
    known = set(_peers)
    handles: list[int | None] = [None] * size
    if own is not None and size > MAX_RANKS:
        why, state = f"the group has {size} ranks, more than {MAX_RANKS}", _NOT_OPENED
    elif own is not None:
        for peer in ranks:
            if peer != rank and not why:
                try:
                    handles[peer] = _open(own, table[peer], table[rank][7])
                except NoSegment as error:
                    why, state = f"rank {peer} is on this machine, but {error}", _NOT_OPENED
    states = gather(torch.tensor([state]), _WHAT).flatten().tolist()
    if any(states):
        for token in set(_peers) - known:  # as little as possible of what `ulimit -v` leaves
            _peers.pop(token).unmap(segment().native)
        teller = states.index(
            max(states)
        )  # without a segment it knows more than who does not find it
        on = f"on rank {rank}: " if rank else ""
        return None, on + why if rank == teller else ""
    assert own is not None
    identity = _unsigned(table[0][6])
    array = (c_void_p * size)(*handles)
    return Neighbours(own, ranks, hosts, own.native.open_group(identity, rank, size, array)), ""


def _open(own: Segment, row: Sequence[int], uid: int) -> int:
    """The peer's segment, mapped. row: what the peer sent. Raises NoSegment."""
    _, pid, fd, first, second, size_bytes, _, their_uid = row
    token = _unsigned(first), _unsigned(second)
    if token in _peers:
        return _peers[token].peer
    if fd < 0:
        raise NoSegment("has no shared memory")
    try:
        # whatever this is, in another container: neither wait for it nor let it become the terminal
        file = os.open(
            f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        )
    except OSError as error:
        of_user = f", of user {their_uid} and not {uid}" if uid != their_uid else ""
        raise NoSegment(
            f"its memory cannot be opened (process {pid}{of_user}: {error.strerror})"
        ) from error
    native = own.native
    data_bytes = size_bytes - own.control_bytes
    try:
        if os.fstat(file).st_size != size_bytes or own.size_bytes != size_bytes:
            raise NoSegment(f"process {pid} here is another one (a container of its own)")
        control = native.map(file, 0, own.control_bytes, True)
        data = native.map(file, own.control_bytes, data_bytes, False)
    finally:
        os.close(file)
    if control and not data:
        native.unmap(control, own.control_bytes)
    if not control or not data:
        raise NoSegment("its memory cannot be mapped (ulimit -v)")
    pidfd = -1
    with suppress(AttributeError, OSError):
        pidfd = os.pidfd_open(pid)
    peer = native.open_peer(control, data, pidfd, *token)
    mapped = _Mapped(int(peer or 0), control, data, size_bytes, pidfd)
    if peer is None:
        mapped.unmap(native)
        raise NoSegment(f"process {pid} here is another one (a container of its own)")
    _peers[token] = mapped
    return mapped.peer


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _unsigned(value: int) -> int:
    return value % (1 << 64)


__all__ = ["Neighbours", "meet"]
