"""How the ranks of a group find out that they share memory, and map each other's segments.

    every rank   its host, process, file, token    ──small gather──> those of all
                 maps the files of the others, and finds their tokens in them
                 "I have mapped all of them"       ──small gather──> all have, or nobody uses it

The token is what decides: ranks in different containers may have one host id, and process numbers of their own.
The system lets only the same user, or root, open a file through /proc.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_void_p
from typing import final

import torch

from ..collectives import Collectives
from ..exchange import host_key
from .segment import NoSegment, Segment, segment

MAX_RANKS = 256  # as in segment.h
_WHAT = "shared memory"
_FINE, _NOT_OPENED, _NO_SEGMENT = range(3)


@final
class Neighbours:
    """The ranks of a group on this machine, whose segments this process has mapped. Closed with the object.

    ranks: The ranks on this machine, with this one. hosts: For each rank, the lowest rank on its machine.
    """

    def __init__(
        self, segment: Segment, ranks: Sequence[int], hosts: Sequence[int], handle: int
    ) -> None:
        self.segment = segment
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.handle = handle
        weakref.finalize(self, _close, segment, handle).atexit = False


def connect(collectives: Collectives) -> tuple[Neighbours | None, str]:
    """Find the ranks that share memory with this one. **Collective.** If any rank fails, all ranks get None.

    Returns: The neighbours; and the reason why there are none, on the one rank that logs it.
    """
    own_segment, why = None, ""
    try:
        own_segment = segment()
    except NoSegment as error:
        why = str(error)
    handles: list[int | None] = [None] * collectives.world_size
    neighbours = None
    try:
        neighbours, why = _connect(collectives, own_segment, why, handles)
    finally:
        if neighbours is None and own_segment is not None:
            for peer in filter(None, handles):
                own_segment.native.release_peer(peer)
    return neighbours, why


def _connect(
    collectives: Collectives,
    own_segment: Segment | None,
    why: str,
    handles: list[int | None],
) -> tuple[Neighbours | None, str]:
    """As `connect`. `handles` gets the peers that are mapped, by rank."""
    rank, size = collectives.rank, collectives.world_size
    token = own_segment.token if own_segment is not None else (0, 0)
    own_row = [host_key(), os.getpid(), own_segment.fd if own_segment else -1, *map(_signed, token)]
    own_row += [
        own_segment.size_bytes if own_segment else 0,
        _signed(int.from_bytes(os.urandom(8), "big")),
        os.getuid(),
    ]
    table = collectives.gather_small(torch.tensor(own_row), what=_WHAT).tolist()
    hosts = [
        next(first for first, other in enumerate(table) if other[0] == row[0]) for row in table
    ]
    ranks = [peer for peer in range(size) if hosts[peer] == hosts[rank]]
    if len(set(hosts)) == size:
        return None, ""
    if own_segment is not None and size <= MAX_RANKS:
        for peer in ranks:
            if peer != rank and not why:
                try:
                    handles[peer] = _open(own_segment, table[peer], table[rank][7])
                except NoSegment as error:
                    why = f"rank {peer} is on this machine, but {error}"
    elif own_segment is not None:
        why = f"the group has {size} ranks, more than {MAX_RANKS}"
    state = _FINE if not why else _NO_SEGMENT if own_segment is None else _NOT_OPENED
    states = collectives.gather_small(torch.tensor([state]), what=_WHAT).flatten().tolist()
    if any(states):
        # a rank without a segment knows more than one that does not find it
        teller = states.index(max(states))
        on = f"on rank {rank}: " if rank else ""
        return None, on + why if rank == teller else ""
    assert own_segment is not None
    identity = _unsigned(table[0][6])
    group = own_segment.native.open_group(identity, rank, size, (c_void_p * size)(*handles))
    return Neighbours(own_segment, ranks, hosts, group), ""


def _close(of: Segment, group: int) -> None:
    if os.getpid() == of.pid:  # a forked child has no part in it
        of.native.close_group(group)


def _open(segment: Segment, row: Sequence[int], uid: int) -> int:
    """Map the peer's segment. row: What the peer has sent. Raises NoSegment."""
    _, pid, fd, first, second, size_bytes, _, their_uid = row
    token = _unsigned(first), _unsigned(second)
    native = segment.native
    known = native.find_peer(*token)
    if known is not None:
        return int(known)
    if fd < 0:
        raise NoSegment("has no shared memory")
    pidfd = _pidfd(pid)  # first: that of the process whose file is opened after it
    try:
        return _map(segment, row, pidfd, _file_of(row, uid))
    except NoSegment:
        if pidfd >= 0:
            os.close(pidfd)
        raise


def _file_of(row: Sequence[int], uid: int) -> int:
    _, pid, fd, _, _, _, _, their_uid = row
    try:
        # whatever this is, in another container: neither wait for it nor let it become the terminal
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        return os.open(f"/proc/{pid}/fd/{fd}", flags)
    except OSError as error:
        of_user = f", of user {their_uid} and not {uid}" if uid != their_uid else ""
        raise NoSegment(
            f"its memory cannot be opened (process {pid}{of_user}: {error.strerror})"
        ) from error


def _map(segment: Segment, row: Sequence[int], pidfd: int, file: int) -> int:
    """Map the peer's segment from its file, which is closed then."""
    _, pid, _, first, second, size_bytes, _, _ = row
    native, data_bytes = segment.native, size_bytes - segment.control_bytes
    try:
        if os.fstat(file).st_size != size_bytes or segment.size_bytes != size_bytes:
            raise NoSegment(f"process {pid} here is another one (a container of its own)")
        # the last argument: whether this process may write there
        control = native.map(file, 0, segment.control_bytes, True)
        data = native.map(file, segment.control_bytes, data_bytes, False)
    finally:
        os.close(file)
    peer = None
    if control and data:
        token = _unsigned(first), _unsigned(second)
        peer = native.open_peer(control, data, data_bytes, pid, pidfd, *token)
    if peer is not None:
        return int(peer)
    for address, length in ((control, segment.control_bytes), (data, data_bytes)):
        if address:
            native.unmap(address, length)
    if not control or not data:
        raise NoSegment("its memory cannot be mapped (ulimit -v)")
    raise NoSegment(f"process {pid} here is another one (a container of its own)")


def _pidfd(pid: int) -> int:
    """A file that tells when a process ends; -1 where this system has none."""
    with suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return -1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _unsigned(value: int) -> int:
    return value % (1 << 64)


__all__ = ["Neighbours", "connect"]
