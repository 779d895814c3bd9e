"""Runs a script on the devices of this machine, restarts it if asked, and says how it ended.

Also this machine's part of a run whose other machines were started by something else: then torch's
rendezvous finds them, and torch's agent does the restarts.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Literal

from ...utils.errors import UsageError, XdsError
from ...utils.messages import OutputWriter, write_stderr
from ...utils.quoting import quoted
from ..job import Job, Order, Rendezvous, Restarts
from .failure import first_failure, report, was_preempted
from .peers import Peers
from .rank_zero import RankZero
from .run_folder import RunFolder, run_folder
from .stop import Stop, stop_signals
from .supervise import Outcome, import_torch, supervise

_DRAIN_SECONDS = 1.0


_ONE_MACHINE = Rendezvous()
_NO_RESTARTS = Restarts()


def run(job: Job, rendezvous: Rendezvous = _ONE_MACHINE, restarts: Restarts = _NO_RESTARTS) -> int:
    """Run `job` to its end; the exit code of the first rank that failed, 0 when none did.

    A rank killed by a signal gives 128 + its number; so does a signal to the launcher itself.

    Raises:
        UsageError: there is no such script, or this machine has not got what was asked for.
        XdsError: torch could not start the ranks.
    """
    check_target(job)
    is_alone = rendezvous.max_nodes == 1
    order = Order(
        job,
        rendezvous,
        _fitting_ranks(job, restarts) if is_alone else job.num_ranks,
        max_restarts=restarts.max_restarts,
        agent_restarts=0 if is_alone else restarts.max_restarts,
    )
    with stop_signals() as stop, run_folder(job.log_dir) as folder:
        peers = Peers(rendezvous, stop)
        if not is_alone:
            peers.start()
        shown = OutputWriter(stop.was_asked)
        with RankZero(folder.path, folder.log(0), shown.write, stop.was_asked) as tee:
            outcome = _generations(order, folder, stop, tee)
        shown.close()
        text, code = _ending(outcome, stop, peers)
        write_stderr(text, stop.was_asked)
        if text and not (is_alone or stop.signum):
            peers.tell(text, code)
    if outcome.is_agent_alive:  # told to stop while it imports torch, or waits for other machines
        sys.stdout.flush()
        os._exit(code)
    return code


def _fitting_ranks(job: Job, restarts: Restarts) -> int | Literal["auto", "gpu", "cpu"]:
    """As many ranks as were asked for, or where the config's elasticity section counts, the most that fit."""
    if restarts.fits is None:
        return job.num_ranks
    import_torch()
    from .elastic import count_ranks

    most = count_ranks(job, job.num_ranks)
    fitting = next((count for count in range(most, 0, -1) if restarts.fits(count)), 0)
    if not fitting:
        raise UsageError(
            f"no number of ranks up to {most} fits the elasticity section of the config; "
            "`xds elastic config.json` prints those that do"
        )
    return fitting


def check_target(job: Job) -> None:
    """Raise a UsageError where there is no such script."""
    if job.kind == "script" and not os.path.exists(job.target):
        raise UsageError(
            f"script = {quoted(job.target)}: no such file; give the path of a Python script"
        )


def _generations(order: Order, folder: RunFolder, stop: Stop, tee: RankZero) -> Outcome:
    """Start all ranks, again after a failure while restarts are left; how the last start ended."""
    allowed = 0 if order.agent_restarts else order.max_restarts
    while True:
        outcome = supervise(order, folder, stop, tee.environment)
        tee.drain(_DRAIN_SECONDS, stop.was_asked)
        is_over = bool(stop.signum) or not outcome.failures or was_preempted(outcome.failures)
        if is_over or order.generation >= allowed:
            return outcome
        order = replace(order, generation=order.generation + 1)
        again = f"xds: starting every rank again ({order.generation} of {allowed})\n"
        write_stderr(report(outcome.failures, outcome.finished) + again, stop.was_asked)


def _ending(outcome: Outcome, stop: Stop, peers: Peers) -> tuple[str, int]:
    """What is to be said about the end, and the exit code."""
    if stop.is_for_peer:
        return f"xds: another machine says:\n{peers.told['text']}", int(peers.told["exit_code"])
    if stop.signum:
        return "", 128 + stop.signum
    if outcome.error:
        raise XdsError(outcome.error)
    if not outcome.failures:
        return "", 0
    code = first_failure(outcome.failures).exit_code
    if was_preempted(outcome.failures):
        return "xds: every rank has saved and stopped, as it was asked to\n", code
    return report(outcome.failures, outcome.finished), code
