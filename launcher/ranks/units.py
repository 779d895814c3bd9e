"""Runs the ranks of one machine so that other units go on when a rank fails: `xds --recover`.

    rank 2 ends ──> a thread that waits for it ──> the lighthouse names the next generation, without its unit
                                                   the other ranks of the unit are killed
    rank 1 is stopped (SIGSTOP) for too long ──> it is killed, so it ends

Where ranks hold one copy of the states alone, the next generation has a new process in the place of the lost
one, and begins when that is ready.

torch's agent ends all its ranks at the first failure. So this module starts the ranks itself, in the same
environment. The store is in this process, and outlives every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from glob import glob
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
_SPARE_SECONDS = 2.0  # for a spare to end
MOST_FAILURES = (
    3  # of new processes of a rank after the same step, with one copy: the next one would fail too
)
_MOST_SECONDS = 0.2  # that count between two looks: in the rest this process was stopped itself


@final
class Units(threading.Thread):
    """A thread that starts the ranks, and stores their result."""

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
        self._is_over = False  # on request
        self._argv: list[str] = []
        self._environments: dict[int, dict[str, Any]] = {}
        self._errors: dict[int, str] = {}  # by rank: the path of its failure record
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}  # by rank: how its last process ended
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._lost: set[int] = set()  # ranks without which the run goes on
        self._stopped: dict[int, float] = {}  # by rank: for how long it has been stopped
        self._told_stopped: set[int] = set()  # units: what the ranks were told
        self._spares: list[subprocess.Popen[bytes]] = []
        # by rank: the number of its new process, which is no part yet
        self._joining: dict[int, int] = {}
        self._admitted: set[int] = set()  # units of such ranks that are in the newest generation
        self._attempt = 0  # the number of the last new process
        # with one copy, by rank: how those that are lost now ended; the number of the newest process, and after
        # which step how many of them in turn have failed
        self._endings: dict[int, str] = {}
        self._newest: dict[int, int] = {}
        self._failed: dict[int, tuple[int, int]] = {}

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
        from ...recovery.slots import all_folders
        from .rendezvous_store import serve

        rendezvous, store = serve(self.order.rendezvous)
        assert store is not None
        self.store_reference = store
        messages = Store(store, "recovery", -1, self.order.key)
        lighthouse = Lighthouse(messages, self.num_ranks)
        try:
            self._run_ranks(lighthouse, rendezvous.endpoint)
        finally:
            for path in glob(all_folders(os.getpid())):
                shutil.rmtree(path, ignore_errors=True)

    def _run_ranks(self, lighthouse: Lighthouse, endpoint: str) -> None:
        self._prepare(endpoint)
        for rank in range(self.num_ranks):
            self._run_rank(
                rank,
                subprocess.Popen(self._argv, env=self._environment(rank), start_new_session=True),
            )
        self._fill_spares()
        now = time.monotonic()
        while self._running:
            with contextlib.suppress(queue.Empty):
                rank, code = self._ended.get(timeout=_LOOK_SECONDS)
                self._codes[rank] = code
                process = self._running.pop(rank)
                if code and not (self.is_ending or self._is_over):
                    self._lose(rank, lighthouse)
                if code and rank not in self._lost:
                    self._note_failure(rank, process.pid, code)
                if not code and lighthouse.are_alone:
                    self._end_unit(lighthouse.unit_of(rank), lighthouse)
            lighthouse.is_ready()
            before, now = now, time.monotonic()
            self._look_for_stopped(min(now - before, _MOST_SECONDS), lighthouse)
            self._admit(lighthouse)
        self._end_spares()
        if not (self.is_ending or self._is_over):
            self.failures = {}

    # -- start ------------------------------------------------------------------------------------------

    def _prepare(self, endpoint: str) -> None:
        """Choose the environment of every rank, and the paths of its files."""
        from .elastic import WORKER, RankFiles

        host, _, port = endpoint.rpartition(":")
        count = str(self.num_ranks)
        for rank in range(self.num_ranks):
            number = str(rank)
            self._environments[rank] = {
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
        self._errors = files.reify(self._environments).error_files
        job = self.order.job
        self._argv = [sys.executable, "-u", WORKER, job.kind, job.target, *job.args]

    def _environment(self, rank: int) -> dict[str, str]:
        return {**os.environ, **self._environments[rank]}

    def _run_rank(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._running[rank] = process
        threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        # WNOWAIT: another thread waits for it as well, and reads how it ended
        with contextlib.suppress(ChildProcessError):  # a signal to it has found that it had ended
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._ended.put((rank, process.wait()))

    # -- spares -----------------------------------------------------------------------------------------

    def _fill_spares(self) -> None:
        """Start processes that import torch, and then wait for the place of a lost rank."""
        while len(self._spares) < self.order.job.num_spares:
            self._spares.append(self._new_spare())

    def _new_spare(self) -> subprocess.Popen[bytes]:
        # of the last rank, whose output goes to a file, until it gets those of its own rank
        environment = {**self._environment(self.num_ranks - 1), "XDS_SPARE": "1"}
        return subprocess.Popen(
            self._argv, env=environment, stdin=subprocess.PIPE, start_new_session=True
        )

    def _fill_places(self, ranks: Sequence[int], generation: int) -> None:
        """Let spares be these ranks from now on, or new processes where there are fewer. Start other spares."""
        self._spares = [spare for spare in self._spares if spare.poll() is None]
        for rank in ranks:
            spare = self._spares.pop(0) if self._spares else self._new_spare()
            self._attempt += 1
            changes = {**self._environments[rank], "XDS_JOINS": f"{generation} {self._attempt}"}
            assert spare.stdin is not None
            with contextlib.suppress(OSError):  # it has ended meanwhile
                spare.stdin.write(json.dumps(changes).encode() + b"\n")
                spare.stdin.close()
            self._joining[rank] = self._newest[rank] = self._attempt
            self._run_rank(rank, spare)
        self._fill_spares()

    def _admit(self, lighthouse: Lighthouse) -> None:
        """Let new processes that have built their engines take part. End those that nobody waits for."""
        # with one copy a generation without a new process for each lost rank would miss them
        if not lighthouse.has_one_copy or self._joining.keys() <= self._admitted:
            lighthouse.repeat_if_asked()
        if lighthouse.has_one_copy:
            self._admit_all(lighthouse)
            return
        for unit in sorted({lighthouse.unit_of(rank) for rank in self._joining}):
            ranks = lighthouse.units[unit]
            attempts = {rank: self._joining[rank] for rank in ranks if rank in self._joining}
            if unit not in self._admitted:
                if lighthouse.admit(unit, attempts) is not None:
                    self._admitted.add(unit)
            elif lighthouse.has_joined(unit, attempts):
                for rank in ranks:
                    del self._joining[rank]
                self._admitted.discard(unit)
                self._lost.difference_update(ranks)
                self._tell(
                    f"{lighthouse.generation.reason} (generation {lighthouse.generation.number})"
                )
        if self._running.keys() <= self._joining.keys():
            self._end_newcomers()

    def _admit_all(self, lighthouse: Lighthouse) -> None:
        """With one copy: begin a generation when all new processes are ready."""
        if not self._joining:
            return
        if not self._admitted:
            if lighthouse.replace(self._joining, "; ".join(self._endings.values())) is not None:
                self._admitted.update(self._joining)
        elif all(lighthouse.has_joined(rank, self._joining) for rank in self._joining):
            numbers = sorted(self._joining)
            who = "rank" if len(numbers) == 1 else "ranks"
            number = lighthouse.generation.number
            self._tell(
                f"new processes of {who} {', '.join(map(str, numbers))} take part (generation {number})"
            )
            self._lost.difference_update(numbers)
            self._joining.clear()
            self._admitted.clear()
            self._endings.clear()
        if 0 in self._codes.values() and self._running.keys() <= self._joining.keys():
            self._end_newcomers()

    def _end_newcomers(self) -> None:
        """The others have ended."""
        if self._running and not self.is_ending:
            self._is_over = True
            for process in self._running.values():
                process.kill()

    def _end_spares(self) -> None:
        for spare in self._spares:
            assert spare.stdin is not None
            with contextlib.suppress(OSError):
                spare.stdin.close()
        for spare in self._spares:
            with contextlib.suppress(subprocess.TimeoutExpired):
                spare.wait(_SPARE_SECONDS)
            spare.kill()

    # -- a rank is lost ---------------------------------------------------------------------------------

    def _lose(self, rank: int, lighthouse: Lighthouse) -> None:
        """Go on without the unit of `rank`, or end the run."""
        code = self._codes[rank]
        if self._stop_asked.signum or code == SAVED_AND_LEFT:
            self._is_over = True  # the others end as well
            return
        if not lighthouse.is_ready():  # before all have built their engines none goes on
            self._end_all()
            return
        by = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        ending = f"rank {rank} {by}"
        if lighthouse.has_one_copy:
            self._replace(rank, ending, lighthouse)
        else:
            self._lose_unit(rank, ending, lighthouse)

    def _lose_unit(self, rank: int, ending: str, lighthouse: Lighthouse) -> None:
        unit = lighthouse.unit_of(rank)
        ranks = lighthouse.units[unit]
        if rank in self._joining:  # it has not taken part yet
            for other in ranks:
                self._joining.pop(other, None)
            if unit in self._admitted:
                self._admitted.discard(unit)
                lighthouse.lose(unit, ending)
        elif rank not in self._lost and not self._go_on(unit, ending, lighthouse):
            self._end_all()
            return
        for other in ranks:  # they have no whole state
            if other in self._running:
                self._running[other].kill()
        has_spares = self.order.job.num_spares > 0
        if has_spares and not any(other in self._running for other in ranks):
            self._fill_places(ranks, lighthouse.generation.number)

    def _go_on(self, unit: int, ending: str, lighthouse: Lighthouse) -> bool:
        """Begin a generation without `unit`. False: the run cannot go on without it."""
        former = lighthouse.generation.units
        left = lighthouse.ranks_in([other for other in former if other != unit])
        has_ended = any(other not in self._running for other in left)
        if has_ended and not lighthouse.are_alone:
            return False
        if unit not in former or len(former) - 1 < lighthouse.min_units:
            return False
        if not any(self._has_states(other, lighthouse) for other in former if other != unit):
            self._tell(f"{ending}; no other rank has the states yet, so the run ends")
            return False
        self._lost.update(lighthouse.units[unit])
        generation = lighthouse.lose(unit, ending)
        numbers = ", ".join(map(str, left))
        self._tell(f"{ending}; ranks {numbers} go on (generation {generation.number})")
        return True

    def _end_unit(self, unit: int, lighthouse: Lighthouse) -> None:
        """If all ranks of a unit that trains alone have ended well, the others do not wait for it."""
        ranks = lighthouse.units[unit]
        is_over = not any(rank in self._running for rank in ranks)
        if is_over and unit in lighthouse.generation.units and len(lighthouse.generation.units) > 1:
            lighthouse.lose(unit, "it has ended its script")

    def _replace(self, rank: int, ending: str, lighthouse: Lighthouse) -> None:
        """With one copy: start a new process for `rank`, or end the run."""
        self._endings[rank] = ending
        is_error = all(self._codes[other] > 0 for other in self._endings)
        # a rank has ended, or all have raised: new processes would raise again
        is_error &= len(self._endings) == self.num_ranks
        if 0 in self._codes.values() or is_error or lighthouse.is_given_up():
            self._end_all()
            return
        if rank in self._newest:
            step = lighthouse.joined_step(rank, self._newest[rank])
            before, count = self._failed.get(rank, (-1, 0))
            self._failed[rank] = (max(step, before), count + 1 if step in (-1, before) else 1)
            if self._failed[rank][1] >= MOST_FAILURES:
                times = f"so did {MOST_FAILURES} of its new processes after the same step"
                self._tell(f"{ending}, and {times}: the run ends")
                self._end_all()
                return
        self._lost.add(rank)
        self._admitted.clear()
        self._tell(f"{ending}; the other ranks wait for a new process")
        self._fill_places([rank], lighthouse.generation.number)

    def _has_states(self, unit: int, lighthouse: Lighthouse) -> bool:
        """Its processes have trained, or have copied the states of others."""
        ranks = lighthouse.units[unit]
        attempts = {rank: self._joining[rank] for rank in ranks if rank in self._joining}
        return unit not in self._admitted or lighthouse.has_joined(unit, attempts)

    def _tell(self, text: str) -> None:
        write_stderr(f"xds: {text}\n", self._stop_asked.is_requested)

    def _end_all(self) -> None:
        self.is_ending = True
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)

    def _look_for_stopped(self, seconds: float, lighthouse: Lighthouse) -> None:
        """Kill ranks that are stopped while others run: a collective waits for them, and they could wake.

        Units that train alone are only told of it.
        """
        stopped = [rank for rank, process in self._running.items() if _is_stopped(process.pid)]
        if len(stopped) == len(self._running):  # somebody has stopped the whole run
            stopped = []
        self._stopped = {rank: self._stopped.get(rank, 0.0) + seconds for rank in stopped}
        lost = [rank for rank, waited in self._stopped.items() if waited > STOPPED_SECONDS]
        if lighthouse.are_alone:
            units = {lighthouse.unit_of(rank) for rank in lost}
            if units != self._told_stopped:
                self._told_stopped = units
                lighthouse.say_stopped(sorted(units))
            return
        for rank in lost:
            with contextlib.suppress(ProcessLookupError):
                self._running[rank].send_signal(signal.SIGKILL)

    def _note_failure(self, rank: int, pid: int, code: int) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        self.failures[rank] = ProcessFailure(rank, pid, code, self._errors[rank])


def _is_stopped(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] == "T"


__all__ = ["Units"]
