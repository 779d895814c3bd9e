"""Ranks that are threads of one process: `run_on_threads` needs no start, and a debugger sees all of them.

    rank 0   runs ─────┐ wait        ┌── runs      One rank runs at a time. A rank that waits for a message
    rank 1             └─ runs ─ send┘             hands over to the next one, so that every run is the same.

Messages go through queues of one `Mail`, and `ThreadBackend` carries the operations of xds with them. It sums
in rank order as the backends of processes do, so the results have the same bits. A switch also exchanges what
is one for each process: the random numbers, the default dtype, the compiler's stance, the process groups.

Not here: a rank that dies, real sockets, memory that ranks share, `xds.zero.Init`, DTensor, and what else
belongs to a process (signals, the current folder, environment variables). These need `run_processes` or
`run_new_ranks` of helpers.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import random
import sys
import threading
import time
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from helpers import TIMEOUT_SECONDS
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from xds.engine.checkpoint.saver import Saver
from xds.engine.optim import loss_scale
from xds.ops.comm import opening
from xds.ops.comm.handles import Handle, Messages
from xds.ops.comm.point_to_point import PointToPointBackend, transfer
from xds.ops.comm.threads import ThreadJob

IDLE_SECONDS = 60
BACKEND = "threads"
NUMPY_BYTES = 4 * (624 + 1)  # the words of MT19937 and the place in them


class Stopped(BaseException):
    """Another rank has failed. No test catches this."""


class Baton:
    """Lets one rank run at a time. A rank that waits hands over to the next one that can go on."""

    def __init__(self, world_size: int) -> None:
        self._lock = threading.Lock()
        self._turns = [threading.Condition(self._lock) for _ in range(world_size)]
        self._others = threading.Condition(self._lock)  # threads that ranks have started
        self._kept = [_process_state() for _ in range(world_size)]
        # what each rank waits for; nothing of one that can run. A rank that has ended is not in it
        self._waits: dict[int, Callable[[], bool]] = {rank: _nothing for rank in range(world_size)}
        self._running: int | None = None
        self._changed_seconds = time.monotonic()
        self.has_failed = False

    def begin(self, rank: int) -> None:
        with self._lock:
            if self._running is None and rank == 0:
                self._choose(after=-1)
            self._wait_for_turn(rank)

    def end(self, rank: int) -> None:
        with self._lock:
            del self._waits[rank]
            self._running = None
            self._choose(after=rank)

    def fail(self) -> None:
        """Stop all other ranks."""
        with self._lock:
            self.has_failed = True
            for condition in (*self._turns, self._others):
                condition.notify_all()

    def wait_until(self, rank: int | None, is_done: Callable[[], bool]) -> None:
        """rank: None in a thread that a rank has started, which runs beside the ranks."""
        with self._lock:
            if is_done():
                return
            if rank is None:
                if not self._others.wait_for(lambda: is_done() or self.has_failed, TIMEOUT_SECONDS):
                    raise RuntimeError(f"no message within {TIMEOUT_SECONDS} s")
            else:
                self._waits[rank], self._kept[rank] = is_done, _process_state()
                self._running = None
                self._choose(after=rank)
                self._wait_for_turn(rank)
            if self.has_failed:
                raise Stopped

    def changed(self) -> None:
        """Somebody has sent something."""
        with self._lock:
            self._changed_seconds = time.monotonic()
            self._others.notify_all()
            if self._running is None:  # a thread that a rank has started has sent it
                self._choose(after=-1)

    def _choose(self, after: int) -> None:
        """Let the next rank run that can; none where all wait."""
        ranks = sorted(self._waits, key=lambda rank: (rank <= after, rank))
        self._running = next((rank for rank in ranks if self._waits[rank]()), None)
        if self._running is not None:
            _restore(self._kept[self._running])
            self._turns[self._running].notify_all()

    def _wait_for_turn(self, rank: int) -> None:
        while self._running != rank and not self.has_failed:
            self._turns[rank].wait(IDLE_SECONDS)
            idle_seconds = time.monotonic() - self._changed_seconds
            if self._running is None and idle_seconds > IDLE_SECONDS and not self.has_failed:
                raise RuntimeError(f"all ranks wait for messages since {IDLE_SECONDS} s")
        self._waits[rank] = _nothing


def _nothing() -> bool:
    return True


def _process_state() -> dict[str, Any]:
    return {
        "numbers": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": ctypes.string_at(_numpy_state(), NUMPY_BYTES),
        "dtype": torch.get_default_dtype(),
        "backward passes": list(loss_scale._passes),
        "stance": _compiler()._stance if _compiler() else None,
    }


def _restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["numbers"])
    random.setstate(state["random"])
    ctypes.memmove(_numpy_state(), state["numpy"], NUMPY_BYTES)
    torch.set_default_dtype(state["dtype"])
    loss_scale._passes[:] = state["backward passes"]
    if _compiler():  # it may have been loaded since
        _compiler()._stance = state["stance"] or _compiler().DynamoStance()


def _numpy_state() -> int:
    """Where numpy has the words of its global generator. `get_state` takes longer than the rest of a switch."""
    address: int = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    return address


def _compiler() -> Any:
    """torch's compiler, where it is loaded. Its stance is one for all threads."""
    return sys.modules.get("torch._dynamo.eval_frame")


class Mail:
    """The messages between the ranks of one run, by group, sender, receiver and tag, in order."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton
        self._queues: dict[tuple[object, ...], deque[Any]] = defaultdict(deque)

    def post(self, address: tuple[object, ...], message: Any) -> None:
        self._queues[address].append(message)
        self.baton.changed()

    def take(self, address: tuple[object, ...]) -> Any:
        queue = self._queues[address]
        self.baton.wait_until(_rank(), lambda: bool(queue))
        return queue.popleft()


class Receiving:
    """A message on its way. `tensor` is filled in `wait`, or in that of a later one of the same tag."""

    def __init__(self, pending: deque[Receiving], tensor: Tensor, take: Callable[[], Any]) -> None:
        self._pending, self._tensor, self._take, self._is_done = pending, tensor, take, False
        pending.append(self)

    def wait(self, timeout: object = None) -> bool:
        while not self._is_done:
            first = self._pending[0]
            message = first._take()
            assert message.numel() == first._tensor.numel(), "the received size differs"
            with torch.no_grad():
                first._tensor.detach().copy_(message.view(first._tensor.shape))
            first._is_done = True
            self._pending.popleft()
        return True

    def is_completed(self) -> bool:
        return self._is_done


class Sent:
    """Complete at once: a message is a copy."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ThreadGroup(dist.ProcessGroup):
    """A process group whose ranks are threads. torch.distributed calls its methods."""

    def __init__(self, rank: int, world_size: int, key: str) -> None:
        super().__init__(rank, world_size)
        self._key, self._own, self._num_ranks = key, rank, world_size
        self._mail = _mail()
        self._pending: dict[tuple[int, int], deque[Receiving]] = defaultdict(deque)
        self._num_calls = 0

    def size(self) -> int:
        return self._num_ranks

    def rank(self) -> int:
        return self._own

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> ThreadGroup:
        return self  # for torch 2.15's batch_isend_irecv

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    @property
    def pg_name(self) -> str:
        return c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def get_group_store(self) -> dist.Store:
        return c10d._world.pg_map[self][1]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Sent:
        self._mail.post((self._key, self._own, peer, tag), tensors[0].detach().clone())
        return Sent()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Receiving:
        address = (self._key, peer, self._own, tag)
        return Receiving(self._pending[peer, tag], tensors[0], lambda: self._mail.take(address))

    def _table(self, mine: Any) -> list[Any]:
        """What every rank gives, in rank order."""
        self._num_calls += 1
        for peer in range(self._num_ranks):
            if peer != self._own:
                self._mail.post((self._key, self._own, peer, "call", self._num_calls), mine)
        return [
            mine
            if peer == self._own
            else self._mail.take((self._key, peer, self._own, "call", self._num_calls))
            for peer in range(self._num_ranks)
        ]

    def _copies(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        return self._table([tensor.detach().clone() for tensor in tensors])

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Sent:
        op = getattr(opts, "reduceOp", None) or dist.ReduceOp.SUM
        for tensor, *values in zip(tensors, *self._copies(tensors), strict=True):
            tensor.detach().copy_(_reduced(values, op))
        return Sent()

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> Sent:
        self._table(None)
        return Sent()

    @torch.no_grad()
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Sent:
        values = self._copies(tensors)[opts.rootRank]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.detach().copy_(value)
        return Sent()

    @torch.no_grad()
    def allgather(self, outs: list[list[Tensor]], mine: list[Tensor], opts: Any = None) -> Sent:
        for out, (value,) in zip(outs[0], self._copies(mine), strict=True):
            out.detach().copy_(value)
        return Sent()

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Sent:
        return self.allgather([list(out.chunk(self._num_ranks))], [mine])

    _allgather_base = all_gather_single

    @torch.no_grad()
    def gather(self, outs: list[list[Tensor]], mine: list[Tensor], opts: Any) -> Sent:
        values = self._copies(mine)
        if outs:
            for out, (value,) in zip(outs[0], values, strict=True):
                out.copy_(value)
        return Sent()

    @torch.no_grad()
    def scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> Sent:
        values = self._copies(parts[0] if parts else [])[opts.rootRank]
        outs[0].detach().copy_(values[self._own])
        return Sent()

    @torch.no_grad()
    def reduce_scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> Sent:
        values = [parts[self._own] for parts in self._copies(parts[0])]
        op = getattr(opts, "reduceOp", None) or dist.ReduceOp.SUM
        outs[0].detach().copy_(_reduced(values, op))
        return Sent()

    def reduce_scatter_single(self, out: Tensor, flat: Tensor, opts: Any = None) -> Sent:
        return self.reduce_scatter([out], [list(flat.chunk(self._num_ranks))], opts)

    _reduce_scatter_base = reduce_scatter_single

    @torch.no_grad()
    def alltoall(self, outs: list[Tensor], parts: list[Tensor], opts: Any = None) -> Sent:
        for out, theirs in zip(outs, self._copies(parts), strict=True):
            out.copy_(theirs[self._own])
        return Sent()

    def alltoall_base(
        self, out: Tensor, flat: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Sent:
        outs = out.split(out_sizes) if out_sizes else out.chunk(self._num_ranks)
        parts = flat.split(sizes) if sizes else flat.chunk(self._num_ranks)
        return self.alltoall(list(outs), list(parts))

    all_to_all_single = alltoall_base


def _reduced(values: list[Tensor], op: Any) -> Tensor:
    found = values[0].clone()
    for value in values[1:]:
        if op == dist.ReduceOp.MAX:
            found = torch.maximum(found, value)
        elif op == dist.ReduceOp.MIN:
            found = torch.minimum(found, value)
        elif op == dist.ReduceOp.PRODUCT:
            found *= value
        elif op == dist.ReduceOp.BOR:
            found |= value
        else:
            found += value
    return found / len(values) if op == dist.ReduceOp.AVG else found


class ThreadBackend(PointToPointBackend):
    """Carries the operations of xds by messages of a `ThreadGroup`."""

    def _transfer(
        self,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        return transfer(self, tag, receives, sends, finish)


class World(c10d._World):
    """What torch.distributed keeps for each process. Torch keeps the fields below for all worlds together."""

    pg_map = pg_names = pg_group_ranks = pg_backend_config = None
    tags_to_pg = pg_to_tag = group_count = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.group_count = 0


class _Worlds:
    """What torch.distributed keeps for each process, here for each rank: `c10d._world`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own_world(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_own_world(), name, value)


def _own_world() -> Any:
    return getattr(threading.current_thread(), "xds_world", None) or _outside[0]


def _mail() -> Mail:
    mail: Mail = threading.current_thread().xds_mail  # type: ignore[attr-defined]
    return mail


def _rank() -> int | None:
    """The rank that this thread is; None in a thread that a rank has started."""
    return getattr(threading.current_thread(), "xds_rank", None)


_outside = [c10d._world]
_start = threading.Thread.start


def _start_with_world(thread: threading.Thread) -> None:
    parent = threading.current_thread()
    for name in ("xds_world", "xds_mail"):
        if hasattr(parent, name) and not hasattr(thread, name):
            setattr(thread, name, getattr(parent, name))
    _start(thread)


def _create(store: dist.Store, rank: int, world_size: int, timeout: object) -> ThreadGroup:
    thread = threading.current_thread()
    ranks = tuple(thread.xds_next_ranks or range(world_size))  # type: ignore[attr-defined]
    count = thread.xds_counts[ranks]  # type: ignore[attr-defined]
    thread.xds_counts[ranks] += 1  # type: ignore[attr-defined]
    return ThreadGroup(rank, world_size, f"{ranks} {count}")


def _new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    thread = threading.current_thread()
    thread.xds_next_ranks = ranks  # type: ignore[attr-defined]
    try:
        return _torchs_new_group(ranks, *args, **(kwargs | {"backend": BACKEND}))
    finally:
        thread.xds_next_ranks = None  # type: ignore[attr-defined]


_torchs_new_group = dist.new_group
dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


_wait_for_save = Saver.wait


def _wait_while_others_run(saver: Saver, *recovery: Any) -> None:
    """`Saver.wait`: another rank may still have to start the same save."""
    thread, rank = saver._thread, _rank()
    if rank is not None and thread is not None:
        baton: Baton = threading.current_thread().xds_mail.baton  # type: ignore[attr-defined]

        def tell() -> None:
            thread.join()
            baton.changed()

        threading.Thread(target=tell).start()
        baton.wait_until(rank, lambda: not thread.is_alive())
    _wait_for_save(saver)


_join_job = ThreadJob.join


def _join_while_others_run(job: ThreadJob) -> None:
    """`ThreadJob.join`: another rank may still have to send what the job waits for."""
    rank = _rank()
    if rank is not None and not job.wait(0):
        baton: Baton = threading.current_thread().xds_mail.baton  # type: ignore[attr-defined]

        def tell() -> None:
            job.wait(TIMEOUT_SECONDS)
            baton.changed()

        threading.Thread(target=tell, daemon=True).start()
        baton.wait_until(rank, lambda: job.wait(0))
    _join_job(job)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    with (
        mock.patch.object(c10d, "_world", _Worlds()),
        mock.patch.object(threading.Thread, "start", _start_with_world),
        # what xds opens for a group of torch whose backend is not gloo
        mock.patch.object(opening, "NcclBackend", ThreadBackend),
        mock.patch.object(Saver, "wait", _wait_while_others_run),
        mock.patch.object(ThreadJob, "join", _join_while_others_run),
        mock.patch.object(dist, "new_group", _new_group),
        mock.patch.object(c10d, "new_group", _new_group),
    ):
        isolate(True)
        try:
            yield
        finally:
            isolate(False)


@contextlib.contextmanager
def _as_a_new_process() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("xds")
    level, handlers = logger.level, list(logger.handlers)
    try:
        with warnings.catch_warnings():  # warnings of a rank are no errors, as in a process
            warnings.simplefilter("default")
            yield
    finally:
        torch.set_num_threads(num_threads)
        logger.setLevel(level)
        logger.handlers[:] = handlers


def run_on_threads(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks; the results, by rank.

    An exception on any rank is raised here with that rank's traceback; the others stop.
    """
    baton = Baton(world_size)
    mail, store = Mail(baton), dist.HashStore()
    results: list[Any] = [None] * world_size
    failures: list[str] = []

    def main(rank: int) -> None:
        thread: Any = threading.current_thread()
        thread.xds_world, thread.xds_mail, thread.xds_rank = World(), mail, rank
        thread.xds_counts, thread.xds_next_ranks = defaultdict(int), None
        baton.begin(rank)
        torch.manual_seed(0)
        random.seed(0)
        try:
            if baton.has_failed:
                return
            dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=store)
            results[rank] = function(*args)
            dist.barrier()
        except Stopped:
            pass
        except BaseException:
            failures.append(f"rank {rank}:\n{traceback.format_exc()}")
            baton.fail()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            baton.end(rank)

    before = _process_state()
    with _patched(), _as_a_new_process():
        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
    _restore(before)
    if failures:
        raise AssertionError(failures[0])
    return results
