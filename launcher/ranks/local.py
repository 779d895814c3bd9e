"""Runs a script on the devices of this machine, restarts it if requested, and reports how it ended.

Also runs this machine's part of a job on several machines that each start xds themselves. In that case torch's
rendezvous connects them, and torch's agent does the restarts. Agents restart together, but an agent without
restarts left exits silently, and ranks on other machines would wait until their timeout. So a failure is
published in the rendezvous store before the agent exits.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, final

from ...utils.errors import UsageError, XdsError
from ...utils.messages import OutputWriter, write_stderr
from ...utils.quoting import plain_lines, printable, quoted, ranks_text
from ...utils.sealing import new_key
from ..job import Job, Order, Rendezvous, Restarts
from .failure import first_failure, report, was_preempted
from .network import split_endpoint
from .rank_zero import RankZero
from .run_folder import RunFolder, run_folder
from .stop import Stop, stop_signals
from .supervise import Outcome, import_torch, supervise

if TYPE_CHECKING:
    from ...ops.watch.store import Store

_DRAIN_SECONDS = 1.0
_POLL_SECONDS = 1.0
_DELIVERY_SECONDS = 2.5  # time for the others to read, before the store may end with this process
_CONNECT_SECONDS = 5.0  # of one attempt: torch waits longer and longer between the tries of one
_ARRIVAL_SECONDS = 30.0  # the other machines start a little later, and import torch
_ON_TCP_STORES = ("c10d", "static")

_ONE_MACHINE = Rendezvous()
_NO_RESTARTS = Restarts()


def run(job: Job, rendezvous: Rendezvous = _ONE_MACHINE, restarts: Restarts = _NO_RESTARTS) -> int:
    """Run `job` to its end. Returns the exit code of the first rank that failed, or 0.

    A rank killed by a signal gives 128 + the signal number. So does a signal to the launcher itself.

    Raises:
        UsageError: the script does not exist, or this machine lacks the requested devices or backend.
        XdsError: torch could not start the ranks.
    """
    check_target(job)
    is_alone = rendezvous.max_nodes == 1
    if job.recovers and not is_alone:
        raise UsageError(
            "--recover on machines that each start xds: one of them has to decide for all; start xds once, "
            "with --hostfile and ssh"
        )
    if job.recovers and sys.platform == "linux":  # where the kernel ends a launcher with its keeper
        from .keeper import Keeper

        code = Keeper().run()
        if code is not None:  # this is the keeper
            return code
    order = Order(
        job,
        rendezvous,
        _fitting_ranks(job, restarts) if is_alone else job.num_ranks,
        max_restarts=restarts.max_restarts,
        agent_restarts=0 if is_alone else restarts.max_restarts,
        key=new_key() if is_alone else "",
    )
    with stop_signals() as stop, run_folder(job.log_dir) as folder:
        with Arrivals(rendezvous, folder), Peers(rendezvous, stop) as peers:
            shown = OutputWriter(stop.is_requested)
            with RankZero(folder.path, folder.log(0), shown.write, stop.is_requested) as tee:
                outcome = _generations(order, folder, stop, tee)
            shown.close()
            text, code = _ending(outcome, stop, peers)
            write_stderr(text, stop.is_requested)
            if text and not (is_alone or stop.signum):
                peers.publish(text, code)
    # after a stop signal: the agent may import torch or wait for other machines, and `peers` may connect
    if outcome.is_agent_alive or peers.is_alive():
        sys.stdout.flush()
        os._exit(code)
    return code


def _fitting_ranks(job: Job, restarts: Restarts) -> int | Literal["auto", "gpu", "cpu"]:
    """The requested number of ranks, or the largest number that the config's elasticity section allows."""
    if restarts.fits is None:
        return job.num_ranks
    import_torch()
    from .elastic import count_ranks

    most = count_ranks(job, job.num_ranks)
    fitting = next((count for count in range(most, 0, -1) if restarts.fits(count)), 0)
    if not fitting:
        raise UsageError(
            f"no number of ranks up to {most} is valid for the elasticity section of the config; "
            "`xds elastic config.json` prints the valid ones"
        )
    return fitting


def check_target(job: Job) -> None:
    """Raise a UsageError if the script does not exist."""
    if job.kind == "script" and not os.path.exists(job.target):
        raise UsageError(
            f"script = {quoted(job.target)}: no such file; give the path of a Python script"
        )


def _generations(order: Order, folder: RunFolder, stop: Stop, tee: RankZero) -> Outcome:
    """Start all ranks, and again after each failure while restarts are left. Returns the last outcome."""
    allowed = 0 if order.agent_restarts else order.max_restarts
    while True:
        outcome = supervise(order, folder, stop, tee.environment)
        tee.drain(_DRAIN_SECONDS, stop.is_requested)
        is_over = bool(stop.signum) or not outcome.failures or was_preempted(outcome.failures)
        if is_over or order.generation >= allowed:
            return outcome
        order = replace(order, generation=order.generation + 1, key=new_key())
        again = f"xds: starting every rank again ({order.generation} of {allowed})\n"
        write_stderr(report(outcome.failures, outcome.finished) + again, stop.is_requested)


def _ending(outcome: Outcome, stop: Stop, peers: Peers) -> tuple[str, int]:
    """The final message and the exit code."""
    if peers.received is not None and stop.is_for_peer:
        return f"xds: another machine reports:\n{peers.received.text}", peers.received.exit_code
    if stop.signum:
        return "", 128 + stop.signum
    if outcome.error:
        raise XdsError(outcome.error)
    if not outcome.failures:
        return "", 0
    code = first_failure(outcome.failures).exit_code
    if was_preempted(outcome.failures):
        return "xds: every rank has saved a checkpoint and stopped, as requested\n", code
    return report(outcome.failures, outcome.finished), code


# -- other machines, for runs without a head process ----------------------------------------------------------


@final
class Arrivals(threading.Thread):
    """A thread that says for whom this machine waits, and without rank 0 where its output is."""

    def __init__(self, rendezvous: Rendezvous, folder: RunFolder) -> None:
        super().__init__(name="xds-arrivals", daemon=True)
        self._rendezvous, self._folder = rendezvous, folder
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        if self._rendezvous.max_nodes > 1:
            self.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self.is_alive():  # Python may not end while it writes
            self.join()

    def run(self) -> None:
        late_at = time.monotonic() + _ARRIVAL_SECONDS
        while not (self._folder.ranks or self._is_over.wait(_POLL_SECONDS)):
            if time.monotonic() > late_at:
                late_at = math.inf
                least, endpoint = self._rendezvous.min_nodes, self._rendezvous.endpoint
                write_stderr(
                    f"xds: waiting for other machines: the run needs {least}, and they meet at "
                    f"{printable(endpoint)}; start xds on each, with the same address, and check that they "
                    "reach it\n"
                )
        ranks = self._folder.ranks
        if (
            ranks
            and 0 not in ranks
            and os.environ.get("XDS_LOG_LEVEL", "info") in ("debug", "info")
        ):
            write_stderr(
                f"xds: output of {ranks_text(sorted(ranks))}: {printable(self._folder.shown())}\n"
            )


@final
@dataclass(frozen=True)
class Ending:
    """How the ranks of another machine ended. text: the report. exit_code: that of the first failure."""

    text: str
    exit_code: int


@final
class Peers(threading.Thread):
    """A thread that receives another machine's failure, and publishes that of this machine."""

    def __init__(self, rendezvous: Rendezvous, stop: Stop) -> None:
        super().__init__(name="xds-peers", daemon=True)
        self.received: Ending | None = None
        self._rendezvous, self._stop_asked = rendezvous, stop
        self._key = f"xds/{rendezvous.run_id}/failed"
        self._store: Store | None = None
        self._is_over = threading.Event()

    def __enter__(self) -> Peers:
        if self._rendezvous.max_nodes > 1 and self._rendezvous.kind in _ON_TCP_STORES:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Python unwinds the stacks of threads that are left at its end, and C++ code in them then aborts
        self._is_over.set()
        if self.is_alive() and not self._stop_asked.signum:
            self.join(_CONNECT_SECONDS + _POLL_SECONDS)

    def run(self) -> None:
        try:
            self._listen()
        except Exception:  # the store ended with its machine; the ranks here fail on the lost peer
            self._store = None

    def _listen(self) -> None:
        import_torch()  # the agent's thread does so at the same time
        from pydantic import TypeAdapter

        kind = TypeAdapter(Ending)
        while not self._is_over.wait(_POLL_SECONDS):
            if self._store is None:
                with contextlib.suppress(RuntimeError):  # the machine that serves it starts later
                    self._store = self._connect()
                continue
            found = self._store.read_as(kind, self._key)
            if found is not None:
                self.received = Ending(plain_lines(found.text), found.exit_code % 256 or 1)
                self._stop_asked.request(signal.SIGTERM, is_for_peer=True)
                return

    def _connect(self) -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from ...ops.watch.store import Store

        host, port = split_endpoint(self._rendezvous.endpoint)
        timeout = timedelta(seconds=_CONNECT_SECONDS)
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        return Store(store, "launcher", self._rendezvous.node_rank or 0)

    def publish(self, text: str, exit_code: int) -> None:
        """Publish how the ranks ended on this machine, and give the others time to read it."""
        self._is_over.set()
        self.join(2 * _POLL_SECONDS)
        if self.received or not (self._store or self.is_alive()):
            return
        try:
            # the thread may wait for its next attempt while the store already answers
            store = self._store or self._connect()
            store.set(self._key, json.dumps({"text": text, "exit_code": exit_code}))
        except Exception:  # the store ended with its machine
            return
        time.sleep(_DELIVERY_SECONDS)
