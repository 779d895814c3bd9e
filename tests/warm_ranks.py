"""Helper for tests with slow imports: ranks that keep running and execute one function after another.

`run_new_ranks` starts new processes for each call; importing transformers takes each of them several seconds.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from helpers import TIMEOUT_SECONDS
from helpers import _context as context


class WarmRanks:
    """`world_size` gloo processes; `run` calls a module-level function on all of them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank; an exception on any rank is raised here, and the ranks start anew."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = [self._answer(rank, pipe) for rank, (_, pipe) in enumerate(self._ranks)]
        failures = [text for ok, text in answers if not ok]
        if failures:
            self.stop()
            raise AssertionError(min(failures, key=lambda text: "Connection closed" in text))
        return [value for _, value in answers]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.world_size):
            here, there = context.Pipe()
            where = (f"{self._folder.name}/rendezvous", port)
            args = (rank, self.world_size, where, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def _answer(self, rank: int, pipe: Any) -> tuple[bool, Any]:
        if not pipe.poll(TIMEOUT_SECONDS):
            return False, f"rank {rank} gave no answer"
        try:
            answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
            return answer
        except EOFError:
            return False, f"rank {rank} died"

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.join(5)
            process.kill()
            process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()


@cache
def warm(world_size: int) -> WarmRanks:
    """The same ranks for every test of a run; they end with it."""
    ranks = WarmRanks(world_size)
    _all.append(ranks)
    return ranks


_all: list[WarmRanks] = []


def stop_all() -> None:
    """End the ranks of every size."""
    for ranks in _all:
        ranks.stop()


def _serve(rank: int, world_size: int, where: tuple[str, int], pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    path, port = where
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    gc.freeze()  # a collection between two tests looks at what these tests made
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[bool, Any] = (True, function(*args))
        except BaseException:
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        _forget_attentions()
        pipe.send_bytes(pickle.dumps(answer))
        if not answer[0]:
            os._exit(1)


def _forget_attentions() -> None:
    """Take back what a test has entered in transformers' table of attentions, which the next test would use."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        table = modeling.ALL_ATTENTION_FUNCTIONS
        for name in [name for name in table._local_mapping if name in _attentions()]:
            table._local_mapping[name] = _attentions()[name]


@cache
def _attentions() -> dict[str, Any]:
    modeling = sys.modules["transformers.modeling_utils"]
    return dict(modeling.AttentionInterface._global_mapping)
