"""Helper for tests with many ranks: `run_threads` runs a function on ranks that are threads of this process.

torch's threaded process group gives real values for 2 to 16 ranks in milliseconds. It has no send and recv, so
xds uses `Native` collectives there. Process-wide state (random generators) is shared by all ranks.
Its reduce_scatter is wrong where the output is a view of the input, as at stages 0 and 1: such runs can be
saved and loaded, but not compared with other results.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

TIMEOUT_SECONDS = 120


def run_threads(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks of one group; the results, by rank.

    An exception on any rank is raised here with that rank's traceback.
    """
    results: list[Any] = [None] * world_size
    failures: list[str] = []
    store = dist.HashStore()

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = function(*args)
        except SystemExit:
            pass  # another rank failed
        except BaseException as error:
            failures.append(f"rank {rank}:\n{traceback.format_exc()}")
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(TIMEOUT_SECONDS)
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise AssertionError(failures[0])
    return results
