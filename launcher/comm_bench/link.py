"""Measures the speed of the link between two ranks: the upper bound of any collective in one direction.

CPU ranks: a TCP connection on the interface that gloo uses, without gloo. GPUs: a copy to the other rank's
GPU if this process can access it, else one NCCL message; with one rank a copy within its GPU.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from ...ops.comm import raw_collectives as raw
from ...ops.comm.collectives import Collectives
from ...ops.comm.hosts import host_numbers
from ...ops.comm.json_values import exchange
from ..environment.probes.network import ipv4
from ..ranks.network import address_towards
from .plan import Link

_BLOCK_BYTES = 1 << 20
_ROUND_SECONDS = 0.4
_WARM_BYTES = 32 << 20  # warm-up, until the TCP window has grown
_ROUNDS = 3
_PINGS = 200
_TIMEOUT_SECONDS = 30.0
_COPY_BYTES = 256 << 20
_COPIES = 20


def measure(collectives: Collectives, group: Any) -> Link | None:
    """Measure the link. All ranks call this and get the same result. None: there is nothing to measure."""
    peer = _farthest(collectives)
    found: Link | None
    if collectives.device.type == "cuda":
        found = (
            _copied(collectives)
            if collectives.world_size == 1
            else _between_gpus(collectives, group, peer)
        )
    elif collectives.world_size == 1:
        return None
    else:
        found = _tcp(collectives, peer)
    return _shared(collectives, found)


def _farthest(collectives: Collectives) -> int:
    """The first rank on a different machine than rank 0, else rank 1."""
    numbers = host_numbers(collectives)
    others = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    return others[0] if others else min(1, collectives.world_size - 1)


def _shared(collectives: Collectives, found: Link | None) -> Link | None:
    """Rank 0's result, on every rank."""
    values = [found.bytes_per_second, found.latency_seconds] if found else [0.0, 0.0]
    table = collectives.gather_small(
        torch.tensor(values, dtype=torch.float64, device=collectives.device)
    )
    speed, latency = table[0].tolist()
    if not speed:
        return None
    return Link(found.what if found else "rank 0's link", speed, latency)


# -- CPU ranks ----------------------------------------------------------------------------------------------


def _tcp(collectives: Collectives, peer: int) -> Link | None:
    """Rank 0 listens and receives, `peer` sends; all others wait."""
    found = None
    try:
        found = _tcp_ends(collectives, peer)
    except OSError as error:  # for example a firewall; the collectives may use another route
        print(f"xds bench comm: the link cannot be measured: {error}", file=sys.stderr, flush=True)
    collectives.barrier()
    return found


def _tcp_ends(collectives: Collectives, peer: int) -> Link | None:
    with ExitStack() as stack:
        mine: tuple[str, int] | None = None
        with suppress(OSError):
            if collectives.rank == 0:
                server = stack.enter_context(socket.create_server((_own_address(), 0)))
                mine = server.getsockname()[:2]
        address = exchange(collectives, mine, "the address of the link")[0]
        if address is None:
            raise OSError("rank 0 cannot listen on its address")
        if collectives.rank == 0:
            server.settimeout(_TIMEOUT_SECONDS)
            connection, _ = server.accept()
            with connection:
                return receive(connection, f"TCP over {_interface()}{address[0]}")
        if collectives.rank == peer:
            with socket.create_connection(tuple(address), _TIMEOUT_SECONDS) as connection:
                send(connection)
    return None


def _interface() -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return f"{name}, " if name else ""


def _own_address() -> str:
    """The address of the interface in GLOO_SOCKET_IFNAME, else of the one on the route to the others."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = ipv4(name) if name else ""
    return address or address_towards(os.environ.get("MASTER_ADDR", "")) or "127.0.0.1"


def receive(connection: socket.socket, what: str) -> Link:
    """The receiving end: exchanges single bytes for the latency, then counts bytes; best of a few rounds."""
    connection.settimeout(_TIMEOUT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        connection.sendall(b"?")
        _exactly(connection, 1)
        seconds.append((time.perf_counter() - start) / 2)
    buffer = bytearray(_BLOCK_BYTES)
    speeds = []
    for _ in range(_ROUNDS):
        connection.sendall(b"!")
        _exactly(connection, _WARM_BYTES, buffer)
        start, num_bytes = time.perf_counter(), 0
        while time.perf_counter() < start + _ROUND_SECONDS:
            num_bytes += _exactly(connection, _BLOCK_BYTES, buffer)
        speeds.append(num_bytes / (time.perf_counter() - start))
        connection.sendall(b".")
        while _exactly(connection, _BLOCK_BYTES, buffer) and buffer[0] == 0:
            pass  # discard data in flight; a block that begins with 1 is the last
    return Link(what, max(speeds), statistics.median(seconds))


def send(connection: socket.socket) -> None:
    """The sending end: sends blocks from each "!" to the next "."."""
    connection.settimeout(_TIMEOUT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(_PINGS):
        _exactly(connection, 1)
        connection.sendall(b"?")
    block, last = bytes(_BLOCK_BYTES), b"\x01" + bytes(_BLOCK_BYTES - 1)
    for _ in range(_ROUNDS):
        _exactly(connection, 1)
        while not _has_received(connection):
            connection.sendall(block)
        connection.sendall(last)


def _has_received(connection: socket.socket) -> bool:
    """Whether a byte has arrived; the byte is consumed."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(_TIMEOUT_SECONDS)


def _exactly(connection: socket.socket, num_bytes: int, buffer: bytearray | None = None) -> int:
    """Receive `num_bytes` bytes; `buffer` is overwritten repeatedly if it is smaller."""
    view = memoryview(buffer if buffer is not None else bytearray(num_bytes))
    left = num_bytes
    while left:
        context = (num_bytes - left) % len(view)
        received = connection.recv_into(view[context : context + min(left, len(view) - context)])
        if not received:
            raise ConnectionError("the other rank closed the connection that measures the link")
        left -= received
    return num_bytes


# -- GPUs ---------------------------------------------------------------------------------------------------


def _copied(collectives: Collectives) -> Link:
    """A copy within one GPU, which reads and writes its memory."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=collectives.device)
    target = torch.empty_like(source)
    seconds = on_gpu(lambda: target.copy_(source))
    return Link("copy within one GPU", _COPY_BYTES / seconds)


def _between_gpus(collectives: Collectives, group: Any, peer: int) -> Link:
    """One NCCL message, which works both within and between machines; or a faster direct copy."""
    tensor = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=collectives.device)
    seconds = on_gpu(lambda: raw.send_to(group, tensor, 0, peer))
    found = Link(f"NCCL message from rank 0 to rank {peer}", _COPY_BYTES / seconds)
    numbers = host_numbers(collectives)
    other = peer % torch.cuda.device_count()
    if collectives.rank or numbers[peer] != numbers[0] or other == collectives.device.index:
        return found
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=torch.device("cuda", other))
    copied = _COPY_BYTES / on_gpu(lambda: target.copy_(tensor))
    if copied < found.bytes_per_second:  # no peer access: the copy went through host memory
        return found
    return Link(f"copy from GPU {collectives.device.index} to GPU {other}", copied)


def on_gpu(call: Callable[[], object]) -> float:
    """The mean time in seconds of one of many consecutive calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_COPIES):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / _COPIES
