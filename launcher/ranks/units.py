"""Runs the ranks of one machine so that the others go on when one fails: `xds --recover`.

    rank 2 ends ──> a thread that waits for it ──> the lighthouse names the next generation, without rank 2
    rank 1 is stopped (SIGSTOP) for too long ──> it is killed, so it ends

torch's agent ends all its ranks at the first failure. So this module starts the ranks itself, in the same
environment. The store is in this process, and outlives every rank.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, final

from ...utils.errors import XdsError
from ...utils.messages import write_stderr
from ..job import Order
from .failure import SAVED_AND_LEFT
from .guard import stat
from .run_folder import RunFolder
from .stop import Stop

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from ...recovery.generations import Lighthouse

STOPPED_SECONDS = 1.0  # a rank that is stopped for so long is lost
_LOOK_SECONDS = 0.05
_MOST_SECONDS = 0.2  # between two looks: in more time this process was stopped itself


@final
class Units(threading.Thread):
    """A thread that starts the ranks, each of which is a unit, and stores their result."""

    def __init__(self, order: Order, folder: RunFolder, stop: Stop, extra: dict[str, str]) -> None:
        super().__init__(name="xds-units", daemon=True)
        self.num_ranks = 0  # until it is known
        self.failures: dict[int, ProcessFailure] = {}  # by rank; of a run that has ended for them
        self.error: XdsError | None = None
        self.fault = ""
        self.store_reference: object = None
        self.is_ending = False  # the run ends for a failure
        self.folder, self.order = folder, order
        self._stop_asked, self._extra = stop, extra
        self._ranks: dict[int, int] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: queue.SimpleQueue[tuple[int, int, float]] = queue.SimpleQueue()
        self._lost: set[int] = set()  # ranks without which the run went on
        self._stopped: dict[int, float] = {}  # by rank: for how long it has been stopped

    def ranks(self) -> dict[int, int]:
        """Rank by local rank; empty until they start."""
        return dict(self._ranks)

    def run(self) -> None:
        try:
            from .elastic import count_ranks

            self.num_ranks = count_ranks(self.order.job, self.order.num_ranks)
            if not self._stop_asked.signum:
                self._run()
        except XdsError as error:
            self.error = error
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.fault = f"the ranks cannot be started: {reason}"

    def _run(self) -> None:
        from ...ops.watch.store import Store
        from ...recovery.generations import Lighthouse
        from .rendezvous_store import serve

        rendezvous, store = serve(self.order.rendezvous)
        assert store is not None
        self.store_reference = store
        messages = Store(store, "recovery", -1, self.order.key)
        lighthouse = Lighthouse(messages, self.num_ranks)
        errors = self._start_all(rendezvous.endpoint)
        codes: dict[int, int] = {}
        now = time.monotonic()
        while len(codes) < self.num_ranks:
            with contextlib.suppress(queue.Empty):
                rank, code, _ = self._ended.get(timeout=_LOOK_SECONDS)
                codes[rank] = code
                if code and not self.is_ending:
                    self._lose(rank, codes, lighthouse)
            before, now = now, time.monotonic()
            if now - before < _MOST_SECONDS:
                self._look_for_stopped(now - before, codes)
        if self.is_ending:
            self._collect(codes, errors)

    # -- start ------------------------------------------------------------------------------------------

    def _start_all(self, endpoint: str) -> dict[int, str]:
        """Start every rank. Returns the paths of their failure records."""
        from .elastic import WORKER, RankFiles

        host, _, port = endpoint.rpartition(":")
        count = str(self.num_ranks)
        environments: dict[int, dict[str, Any]] = {}
        for rank in range(self.num_ranks):
            number = str(rank)
            environments[rank] = {
                **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), number),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), count),
                **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"},
                **{"MASTER_ADDR": host, "MASTER_PORT": port},
                "TORCHELASTIC_RESTART_COUNT": str(self.order.generation),
                "TORCHELASTIC_MAX_RESTARTS": str(self.order.max_restarts),
                "TORCHELASTIC_RUN_ID": "recover",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "XDS_LIGHTHOUSE": endpoint,
            }
        files = RankFiles(self.folder, self.order, self.num_ranks, self._ranks, self._extra)
        destinations = files.reify(environments)
        job = self.order.job
        argv = [sys.executable, "-u", WORKER, job.kind, job.target, *job.args]
        for rank, environment in environments.items():
            process = subprocess.Popen(
                argv, env={**os.environ, **environment}, start_new_session=True
            )
            self._processes[rank] = process
            threading.Thread(target=self._wait, args=(rank, process.pid), daemon=True).start()
        return destinations.error_files

    def _wait(self, rank: int, pid: int) -> None:
        # WNOWAIT: another thread waits for it as well, and reads how it ended
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        is_exit = ended.si_code == os.CLD_EXITED
        self._ended.put((rank, ended.si_status if is_exit else -ended.si_status, time.time()))

    # -- a rank is lost ---------------------------------------------------------------------------------

    def _lose(self, rank: int, codes: dict[int, int], lighthouse: Lighthouse) -> None:
        """Go on without `rank`, or end the run. codes: by rank that has ended."""
        code, former = codes[rank], lighthouse.generation.units
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        left = [unit for unit in former if unit != rank]
        if self._stop_asked.signum or code == SAVED_AND_LEFT:
            self.is_ending = True  # the others end as well
            return
        least = (
            lighthouse.min_units or self.num_ranks
        )  # before all have built their engines none goes on
        if rank not in former or len(left) < least or any(codes.get(unit) == 0 for unit in left):
            self._end_all()
            return
        self._lost.add(rank)
        generation = lighthouse.lose(rank, f"rank {rank} {how}")
        units = ", ".join(map(str, left))
        text = f"xds: rank {rank} {how}; ranks {units} go on (generation {generation.number})\n"
        self.folder.record(text.strip())
        write_stderr(text, self._stop_asked.is_requested)

    def _end_all(self) -> None:
        self.is_ending = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)

    def _look_for_stopped(self, seconds: float, ended: dict[int, int]) -> None:
        """Kill ranks that are stopped while others run: a collective waits for them, and they could wake."""
        running = [rank for rank in self._processes if rank not in ended]
        stopped = [rank for rank in running if _is_stopped(self._processes[rank].pid)]
        if len(stopped) == len(running):  # somebody has stopped the whole run
            stopped = []
        self._stopped = {rank: self._stopped.get(rank, 0.0) + seconds for rank in stopped}
        for rank, waited_seconds in self._stopped.items():
            if waited_seconds > STOPPED_SECONDS:
                with contextlib.suppress(ProcessLookupError):
                    self._processes[rank].send_signal(signal.SIGKILL)

    def _collect(self, codes: dict[int, int], errors: dict[int, str]) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        for rank, code in codes.items():
            if code and rank not in self._lost:
                pid = self._processes[rank].pid
                self.failures[rank] = ProcessFailure(rank, pid, code, errors[rank])


def _is_stopped(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] == "T"


__all__ = ["Units"]
