"""Ranks whose processes differ in what no message may depend on: imports, environment, time, memory, cores.

`Servers.run` is as `run_new_ranks`. Each surrounding has one process that imports what belongs to it and then
forks a rank for each call. A rank of a kept process has imported what the last test needed, so it cannot serve.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 90.0  # of a rank that waits for another one
ANSWER_SECONDS = 400.0


@dataclass(frozen=True)
class Surrounding:
    """What one process has. free_bytes: of host memory, as the system seems to say."""

    name: str
    imports: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    collects_after: int | None = None  # objects; 0: never
    num_cores: int | None = None
    num_threads: int = 1
    free_bytes: int | None = None
    longest_pause_seconds: float = 0.0  # before a message


_MODELS = tuple(
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gpt2")
)
BARE = Surrounding("bare")
COMPILER = Surrounding(
    "compiler",
    (*_MODELS, "torch._dynamo"),
    {"PYTHONHASHSEED": "1", "XDS_LOG_LEVEL": "debug"},
    collects_after=0,
)
LIBRARIES = Surrounding(
    "libraries",
    (*_MODELS, "torch._dynamo", "xds.compression", "xds.pipe", "xds.engine.deepspeed"),
    {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2", "XDS_DEFAULT_THREADS": "1"},
    collects_after=50,
    num_threads=2,
)
POOR = Surrounding(
    "poor",
    (*_MODELS, "torch._dynamo"),
    environment={"PYTHONHASHSEED": "3", "XDS_CPU_ISA": "baseline", "XDS_RANK_CORES": "0"},
    num_cores=1,
    free_bytes=1 << 20,
    longest_pause_seconds=2e-3,
)
ALL = (COMPILER, BARE, LIBRARIES, POOR)


class Servers:
    """One process for each surrounding; rank r of a call gets that of number `first` + r."""

    def __init__(self, surroundings: Sequence[Surrounding] = ALL) -> None:
        self._surroundings = surroundings
        self._servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self.first = 0

    def __enter__(self) -> Servers:
        for surrounding in self._surroundings:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            words = [sys.executable, __file__, str(theirs.fileno())]
            process = subprocess.Popen(
                [*words, json.dumps(asdict(surrounding))],
                env=os.environ | {"OMP_NUM_THREADS": "1"} | surrounding.environment,
                pass_fds=(theirs.fileno(),),
            )
            theirs.close()
            self._servers.append((process, mine))
        return self

    def __exit__(self, *exception: object) -> None:
        for process, connection in self._servers:
            connection.close()
            process.wait()

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """`function(*args)` on each rank; the results, by rank."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes = []
        for rank in range(world_size):
            here, there = socket.socketpair()
            at = (self.first + rank) % len(self._servers)
            call = (function, rank, world_size, port, args)
            socket.send_fds(self._servers[at][1], [pickle.dumps(call)], [there.fileno()])
            there.close()
            pipes.append(Connection(here.detach()))
        answers = [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        failures = [text for ok, text in answers if not ok]
        if failures:
            raise AssertionError(min(failures, key=lambda text: "PeerError" in text))
        return [value for _, value in answers]


def _answer(rank: int, pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(ANSWER_SECONDS):
        return False, f"rank {rank} gave no answer within {ANSWER_SECONDS:.0f} s"
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
        return answer
    except EOFError:
        return False, f"rank {rank} died"


# -- in the servers and their ranks --------------------------------------------------------------------------


def _serve(requests: socket.socket, surrounding: Surrounding) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if surrounding.free_bytes is not None:
        from xds.utils import host_memory

        host_memory.free_host_bytes = lambda: surrounding.free_bytes
    importlib.import_module("xds.engine.initialize")
    for name in surrounding.imports:
        importlib.import_module(name)
    while True:
        call, files, _, _ = socket.recv_fds(requests, 1 << 17, 1)
        if not call:
            return
        if os.fork() == 0:
            requests.close()
            _run(surrounding, Connection(files[0]), *pickle.loads(call))
            os._exit(0)
        os.close(files[0])


def _run(
    surrounding: Surrounding,
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: Any,
) -> None:
    import torch
    import torch.distributed as dist
    from helpers import SMALL_NUMEL

    from xds.zero.core import grad_bucket

    grad_bucket.SMALL_NUMEL = SMALL_NUMEL
    torch.set_num_threads(surrounding.num_threads)
    torch.manual_seed(0)
    random.seed(0)
    if surrounding.num_cores is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: surrounding.num_cores])
    if surrounding.collects_after is not None:
        gc.set_threshold(surrounding.collects_after, 5, 5)
    if surrounding.longest_pause_seconds:
        _pause(surrounding.longest_pause_seconds)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        pipe.send_bytes(pickle.dumps((True, function(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
    with suppress(Exception):
        dist.barrier()  # rank 0 has the store


def _pause(longest_seconds: float) -> None:
    """Sleep before each message."""
    from xds.ops.watch.watch import Watch

    start, dice = Watch.start, random.Random(5)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(dice.random() * longest_seconds)
        return start(*args, **kwargs)

    Watch.start = late  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from fuzz import surroundings

    given = json.loads(sys.argv[2])
    surroundings._serve(
        socket.socket(fileno=int(sys.argv[1])),
        surroundings.Surrounding(**{**given, "imports": tuple(given["imports"])}),
    )
