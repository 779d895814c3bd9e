"""The ranks of stress.py: random collectives in shared memory, of which every element is checked.

    order "open" ──> a group ── rounds until one rank is told to stop, or a PeerError ──> report ──> next order

All ranks draw the operations of a round from one sequence of random numbers; in which order a rank starts them
and waits, whether its tensors are in shared memory, and when it drops a handle, from one of its own.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUMELS = (1, 7, 300, 5_000, 20_000, 70_000)  # of a shard: copied when it is sent, and read in place
GARBAGE = 77.0  # what a rank writes over its tensors as soon as a wait has failed


class Wrong(Exception):
    """A wrong value, or something left over."""


class Operation:
    """One collective: `start` it, wait for its handles, `check` what came."""

    def __init__(
        self, start: Callable[[], list[Any]], check: Callable[[], bool], text: str, rounds: int = 1
    ) -> None:
        self.start = start
        self.check = check
        self.text = text
        self.rounds = rounds  # of messages: the second one begins in the wait
        self.handles: list[Any] = []


class Player:
    """One rank in one group."""

    def __init__(self, collectives: Any, seed: int) -> None:
        self.collectives = collectives
        self.rank, self.world = collectives.rank, collectives.world_size
        self.common = random.Random(seed)
        self.own = random.Random(1000 * seed + self.rank)
        self.round = 0
        self.held: list[Any] = []  # tensors of the operations in flight
        self.checked = 0

    # -- values -----------------------------------------------------------------------------------------

    def values(self, key: int, rank: int, numel: int, dtype: Any) -> Any:
        import torch

        return torch.arange(numel).mul_(7 + key % 5).add_(31 * rank + key).remainder_(251).to(dtype)

    def tensor(self, numel: int, dtype: Any, values: Any = None) -> Any:
        import torch

        is_near = self.own.random() < 0.5
        found = self.collectives.empty(numel, dtype) if is_near else torch.empty(numel, dtype=dtype)
        self.held.append(found)
        return found.fill_(-5) if values is None else found.copy_(values)

    def total(self, key: int, numel: int, dtype: Any, out: Any) -> Any:
        """The sum in rank order, each addition rounded to `out`."""
        found = self.values(key, 0, numel, dtype).to(out)
        for rank in range(1, self.world):
            found = found + self.values(key, rank, numel, dtype).to(out)
        return found

    def part(self, flat: Any, rank: int) -> Any:
        return self.collectives.shard_of(flat, rank)

    # -- operations -------------------------------------------------------------------------------------

    def draw(self, buffer: int) -> Operation:
        """The next operation. The same on all ranks but for the places of tensors."""
        import torch

        kinds = (
            self.reduce_scatter,
            self.reduce_scatter,
            self.all_gather,
            self.all_gather,
            self.all_reduce,
            self.all_to_all,
            self.send_right,
            self.broadcast,
            self.gather_small,
        )
        kind, key = self.common.choice(kinds), self.common.randrange(1 << 20)
        numel = self.common.choice(NUMELS)
        dtype = self.common.choice((torch.float32, torch.bfloat16))
        operation = kind(buffer, key, numel, dtype)
        operation.text = f"{kind.__name__} of {numel} {dtype}, round {self.round}"
        return operation

    def reduce_scatter(self, buffer: int, key: int, numel: int, dtype: Any) -> Operation:
        import torch

        add, widens = self.common.random() < 0.5, self.common.random() < 0.5
        out_dtype = torch.float32 if widens else dtype
        whole = numel * self.world
        flat = self.tensor(whole, dtype, self.values(key, self.rank, whole, dtype))
        out = self.tensor(numel, out_dtype, torch.full((numel,), 3.0))
        shared = self.collectives

        def start() -> list[Any]:
            return [shared.reduce_scatter(flat, out, add=add, buffer=buffer, kind="sum")]

        def check() -> bool:
            want = self.part(self.total(key, whole, dtype, out_dtype), self.rank)
            return bool(out.equal(want + 3 if add else want))

        return Operation(start, check, "")

    def all_gather(self, buffer: int, key: int, numel: int, dtype: Any) -> Operation:
        flat = self.tensor(numel * self.world, dtype)
        mine = self.values(key, self.rank, numel, dtype)
        shared = self.collectives
        in_place = self.common.random() < 0.5
        shard = (
            self.part(flat, self.rank).copy_(mine) if in_place else self.tensor(numel, dtype, mine)
        )

        def check() -> bool:
            parts = [self.values(key, rank, numel, dtype) for rank in range(self.world)]
            return all(self.part(flat, rank).equal(part) for rank, part in enumerate(parts))

        return Operation(
            lambda: [shared.all_gather(flat, shard, buffer=buffer, kind="gather")], check, ""
        )

    def all_reduce(self, buffer: int, key: int, numel: int, dtype: Any) -> Operation:
        tensor = self.tensor(numel, dtype, self.values(key, self.rank, numel, dtype))
        shared = self.collectives
        return Operation(
            lambda: [shared.all_reduce(tensor, what="a sum", kind="sum", buffer=buffer)],
            lambda: bool(tensor.equal(self.total(key, numel, dtype, dtype))),
            "",
            rounds=2,
        )

    def all_to_all(self, buffer: int, key: int, numel: int, dtype: Any) -> Operation:
        sizes = [numel * (1 + (rank + key) % 2) - numel % (rank + 1) for rank in range(self.world)]
        parts = [
            self.tensor(size, dtype, self.values(key + to, self.rank, size, dtype))
            for to, size in enumerate(sizes)
        ]
        outs = [self.tensor(sizes[self.rank], dtype) for _ in sizes]
        shared = self.collectives

        def check() -> bool:
            size = sizes[self.rank]
            wants = [self.values(key + self.rank, r, size, dtype) for r in range(self.world)]
            return all(out.equal(want) for out, want in zip(outs, wants, strict=True))

        return Operation(
            lambda: [shared.all_to_all(outs, parts, what="parts", kind="part", buffer=buffer)],
            check,
            "",
        )

    def send_right(self, buffer: int, key: int, numel: int, dtype: Any) -> Operation:
        right, left = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        mine = self.tensor(numel, dtype, self.values(key, self.rank, numel, dtype))
        came = self.tensor(numel, dtype)
        shared, number = self.collectives, key % 100

        def start() -> list[Any]:
            receive = shared.receive(came, left, number=number, what="a message")
            return [receive, shared.send(mine, right, number=number, what="a message", kind="p")]

        return Operation(start, lambda: bool(came.equal(self.values(key, left, numel, dtype))), "")

    def broadcast(self, buffer: int, key: int, numel: int, dtype: Any) -> Operation:
        source = key % self.world
        mine = self.values(key, source, numel, dtype) if self.rank == source else None
        tensor = self.tensor(numel, dtype, mine)

        def start() -> list[Any]:
            self.collectives.broadcast(tensor, source)
            return []

        return Operation(
            start, lambda: bool(tensor.equal(self.values(key, source, numel, dtype))), ""
        )

    def gather_small(self, buffer: int, key: int, numel: int, dtype: Any) -> Operation:
        count, tables = 1 + key % 16, []

        def start() -> list[Any]:
            tables.append(self.collectives.gather_small(self.values(key, self.rank, count, dtype)))
            return []

        def check() -> bool:
            wants = [self.values(key, rank, count, dtype) for rank in range(self.world)]
            return all(row.equal(want) for row, want in zip(tables[0], wants, strict=True))

        return Operation(start, check, "")

    # -- rounds -----------------------------------------------------------------------------------------

    def play(self, should_stop: Callable[[], bool]) -> None:
        """Rounds until a rank should stop. Raises PeerError, Wrong."""
        import torch

        while True:
            self.round += 1
            mine = torch.tensor([self.round, self.rank, int(should_stop())])
            table = self.collectives.gather_small(mine).tolist()
            if [row[:2] for row in table] != [[self.round, rank] for rank in range(self.world)]:
                raise Wrong(f"the table of round {self.round} is {table}")
            if any(row[2] for row in table):
                return
            self.play_round()
            self.held.clear()

    def play_round(self) -> None:
        operations = [self.draw(buffer) for buffer in range(self.common.randint(1, 6))]
        blocking = (self.broadcast.__name__, self.gather_small.__name__)
        for operation in operations:
            operation.handles = operation.start()
            if self.own.random() < 0.1:
                time.sleep(self.own.random() * 0.003)  # it computes
        # of sums in two rounds all ranks wait in one order
        firm = [operation for operation in operations if operation.rounds == 2]
        order = self.own.sample(operations, len(operations))
        places = iter(firm)
        order = [next(places) if one.rounds == 2 else one for one in order]
        for operation in order:
            is_blocking = operation.text.startswith(blocking)
            if operation.rounds == 1 and not is_blocking and self.own.random() < 0.03:
                operation.handles.clear()  # dropped: peers get what they wait for
                continue
            for handle in operation.handles:
                handle.wait()
            if not operation.check():
                raise Wrong(f"a wrong value in {operation.text} on rank {self.rank}")
            self.checked += 1

    def spoil(self) -> None:
        """A wait has failed: the memory is the caller's again. No peer may take it for the message."""
        for tensor in self.held:
            tensor.fill_(GARBAGE)


# -- one process --------------------------------------------------------------------------------------------


def serve(rank: int, world: int, pipe: Connection, timeout_seconds: float, patience: float) -> None:
    """Follow orders ("open", path, seed), ("stop",) of a group, and ("end",)."""
    os.setpgid(0, 0)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    import torch

    torch.set_num_threads(1)
    from xds.ops.watch import watch

    watch.PATIENCE_SECONDS = patience
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            os._exit(0)
        if order[0] == "stop":  # of the last group
            continue
        if order[0] == "end":
            pipe.send(("ended", {}))
            return  # as a script: with exit handlers
        try:
            answer = take_part(rank, world, pipe, order[1], order[2], timeout_seconds)
        except Wrong as error:
            answer = ("wrong", {"text": str(error)})
        except BaseException:
            answer = ("broken", {"text": traceback.format_exc()})
        pipe.send(answer)


def take_part(
    rank: int, world: int, pipe: Connection, path: str, seed: int, timeout_seconds: float
) -> tuple[str, dict[str, Any]]:
    """One group, until a failure or the order to stop."""
    import torch.distributed as dist

    descriptors = len(os.listdir("/proc/self/fd"))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=30),
    )
    try:
        return _take_part(pipe, seed, timeout_seconds, descriptors)
    finally:
        gc.collect()
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _take_part(
    pipe: Connection, seed: int, timeout_seconds: float, descriptors: int
) -> tuple[str, dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from xds.ops.comm.collectives import _instances
    from xds.ops.comm.opening import open_collectives
    from xds.ops.comm.shared_memory import SharedMemory
    from xds.utils.errors import PeerError

    _instances.clear()  # the new process counts from zero as well
    collectives = open_collectives(dist.group.WORLD, torch.device("cpu"))
    if not isinstance(collectives, SharedMemory):
        raise Wrong("no shared memory")
    collectives._memory._timeout_seconds = timeout_seconds
    noticed: list[float] = []
    explain = collectives._watch.failed

    def failed(*arguments: Any) -> Exception:
        noticed.append(time.monotonic())
        return explain(*arguments)

    collectives._watch.failed = failed  # type: ignore[method-assign]
    _look_for_leftovers(collectives.world_size)
    pipe.send(("opened", {"descriptors": descriptors}))
    player = Player(collectives, seed)
    try:
        player.play(pipe.poll)
    except PeerError as error:
        raised = time.monotonic()
        player.spoil()
        text = str(error)
        begin = time.monotonic()
        try:
            collectives.barrier()
            raise Wrong("a group went on after a failure")
        except PeerError:
            again = time.monotonic() - begin
        found = {"noticed": noticed[0], "raised": raised, "text": text, "again": again}
        return "failed", {**found, "checked": player.checked}
    return "stopped", {"checked": player.checked}


def _look_for_leftovers(world: int) -> None:
    """Only the segments and the descriptors of this group's processes are there."""
    mapped = {
        line.split()[4]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:xds" in line
    }
    if len(mapped) != world:
        raise Wrong(f"{len(mapped)} segments are mapped in a group of {world}")
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    watched = sum("pidfd" in link for link in links)
    if watched != world - 1:
        raise Wrong(f"{watched} processes are watched in a group of {world}")
