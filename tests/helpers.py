"""Test helper: `run_ranks` runs a function in gloo processes, which come from one preloaded forkserver."""

from __future__ import annotations

import gc
import logging
import multiprocessing as mp
import os
import pickle
import random
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIMEOUT_SECONDS = (
    600  # only what hangs takes so long, also on a machine where 30 processes want each core
)
# gradients of so many elements are copied at once, smaller ones in one call: tiny models go both ways
SMALL_NUMEL = 64


def on_busy_machines(seconds: float) -> float:
    """A timeout that is meant to pass: more where so many processes want each core that ranks begin late."""
    return seconds * max(1.0, os.getloadavg()[0] / (4 * (os.cpu_count() or 1)))


_context = mp.get_context("forkserver")
# the last one is what the first optimizer imports: most of a second for each rank
_PRELOADED = ["torch", "torch.distributed", "xds.engine.initialize", "torch._dynamo"]
# a run of many files: else each rank of some would import it
if "PYTEST_XDIST_WORKER" in os.environ:
    _PRELOADED += ["transformers.modeling_utils", "transformers.models.llama.modeling_llama"]
_context.set_forkserver_preload(_PRELOADED)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    small_numel: int | None = SMALL_NUMEL,
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks of one group; the results, by rank.

    The ranks are threads of this process, see thread_ranks.py: no start, and a debugger sees all of them.
    `function` asks torch.distributed for its rank. An exception on any rank is raised here with that rank's
    traceback. `small_numel` takes the place of the engine's own SMALL_NUMEL, 16 Ki elements; None leaves it.

    What belongs to a process (memory that ranks share, gloo itself, `xds.zero.Init`) needs `run_processes`.
    """
    from thread_ranks import run_on_threads

    from xds.zero.core import grad_bucket

    own = grad_bucket.SMALL_NUMEL
    grad_bucket.SMALL_NUMEL = own if small_numel is None else small_numel
    try:
        return run_on_threads(function, world_size, *args)
    finally:
        grad_bucket.SMALL_NUMEL = own


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    small_numel: int | None = SMALL_NUMEL,
) -> list[Any]:
    """As `run_ranks`, in processes of one gloo group. `function` must be importable (module level).

    The processes are those of the last call, seeded anew: starting them takes longer than most tests.
    A function that changes its process, or ends it, needs `run_new_ranks`.
    """
    from warm_ranks import warm

    return warm(world_size).run(_call_again, small_numel, function, *args)


def run_new_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
    small_numel: int | None = SMALL_NUMEL,
) -> list[Any]:
    """The same in new processes, which end with the call.

    timeout_seconds: of the group, once all have started.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            here, there = _context.Pipe(duplex=False)
            call = (
                function,
                rank,
                world_size,
                f"{folder}/rendezvous",
                there,
                args,
                timeout_seconds,
                small_numel,
            )
            process = _context.Process(target=_rank_main, args=call)
            process.start()
            there.close()
            ranks.append((process, here))
        answers = [_answer(rank, process, here) for rank, (process, here) in enumerate(ranks)]
        for process, _ in ranks:
            process.join(TIMEOUT_SECONDS)
    failures = [text for ok, text in answers if not ok]
    if failures:
        # a rank that only lost its peer is never the reason
        raise AssertionError(min(failures, key=lambda text: "Connection closed" in text))
    return [value for _, value in answers]


def _call_again(small_numel: int | None, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` as in a new process: with its seeds and nothing left of the last call."""
    import torch

    from xds.ops.comm import exchange
    from xds.zero.core import grad_bucket

    gc.collect()
    logger = logging.getLogger("xds")  # its level is that of the last engine's config
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
    os.environ.pop("XDS_LOG_LEVEL", None)
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    own = grad_bucket.SMALL_NUMEL
    grad_bucket.SMALL_NUMEL = own if small_numel is None else small_numel
    try:
        result = function(*args)
    finally:
        grad_bucket.SMALL_NUMEL = own
    assert exchange._host_id.__module__ == exchange.__name__, (
        "the next call would be on other machines"
    )
    return result


def _answer(rank: int, process: Any, pipe: Any) -> tuple[bool, Any]:
    if not pipe.poll(TIMEOUT_SECONDS):
        process.kill()
        return False, f"rank {rank} gave no answer within {TIMEOUT_SECONDS} s"
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
        return answer
    except EOFError:
        process.join()
        return False, f"rank {rank} died with exit code {process.exitcode}"


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    path: str,
    pipe: Any,
    args: Any,
    timeout_seconds: float,
    small_numel: int | None,
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from xds.zero.core import grad_bucket

    gc.freeze()  # a collection looks at what this rank makes, not at all of torch
    if small_numel is not None:
        grad_bucket.SMALL_NUMEL = small_numel
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    dist.barrier()
    assert dist.group.WORLD is not None
    c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), dist.group.WORLD)
    try:
        # plain pickle: the pipe itself would hand tensors over in shared memory that dies with the rank
        pipe.send_bytes(pickle.dumps((True, function(*args))))
        dist.barrier()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
        os._exit(1)
    dist.destroy_process_group()
