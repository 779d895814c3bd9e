"""Runs a job through one command that reaches all hosts: pdsh, srun, mpirun.

The orders are in its arguments, so no messages can be sent later. The ranks are stopped by a signal to the
command, and a restart is a new command. Messages of the hosts arrive on its output.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from ...utils.messages import write_stderr
from ...utils.sealing import RUN_KEY, new_key
from ..job import Host, Job, Remote, Rendezvous, Restarts
from ..ranks.failure import first_failure, was_preempted
from ..ranks.network import join_endpoint
from ..ranks.stop import Stop, stop_signals
from .backends import AllAtOnce
from .link import NodeLink
from .messages import pack_orders
from .start import LostHost, Results, choose_hosts, final_report, make_orders, own_streams

_TICK_SECONDS = 0.1
# After the first failure: time for the other hosts' ranks to end, and for their messages to arrive.
_OTHERS_SECONDS = 2.0
_SIGKILL_AFTER_SECONDS = 6.0
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the kernel's range of ephemeral ports


@final
@dataclass
class _Start(Results):
    """The state of one start, from the messages of the hosts."""

    record: dict[str, float] = field(default_factory=dict)  # host to the time of its last message
    ahead_seconds: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    failed_at: float = 0.0

    def take(self, message: Mapping[str, Any]) -> None:
        """Process one message of one host."""
        host, kind = message["sender"], message["kind"]
        self.record[host] = time.time()
        if kind == "hello":
            self.ahead_seconds[host] = message["now"] - time.time()
        elif kind == "failed":
            self.failed_at = self.failed_at or time.monotonic()
        elif kind == "ended":
            self.ended.add(host)
            self.add(host, message, self.ahead_seconds.get(host, 0.0))
            if message["error"]:
                self.failed_at = self.failed_at or time.monotonic()


def run_at_once(
    job: Job, hosts: Sequence[Host], remote: Remote, backend: AllAtOnce, restarts: Restarts
) -> int:
    """Run `job` on `hosts` to its end. Returns the exit code of the first rank that failed, or 0."""
    generation = 0
    with stop_signals() as stop:
        while True:
            start, code = _one_start(job, hosts, remote, backend, restarts, generation, stop)
            if stop.signum:
                return 128 + stop.signum
            if code == 0 and not (start.failures or start.errors):
                return 0
            if was_preempted(start.failures):
                write_stderr(
                    "xds: every rank has saved a checkpoint and stopped, as requested\n",
                    stop.is_requested,
                )
                return first_failure(start.failures).exit_code
            lost = _hosts_without_result(hosts, start, code, backend.name)
            text, code = final_report(start.failures, start.finished, start.errors, lost)
            write_stderr(text, stop.is_requested)
            if generation >= restarts.max_restarts:
                return code
            generation += 1
            again = f"xds: starting every rank again ({generation} of {restarts.max_restarts})\n"
            write_stderr(again, stop.is_requested)


def _hosts_without_result(
    hosts: Sequence[Host], start: _Start, code: int, program: str
) -> list[LostHost]:
    """The hosts that never reported the end of their ranks; [] if another host reported a failure."""
    if start.failures or start.errors:
        return []
    missing = [host.name for host in hosts if host.name not in start.ended]
    why = f"{program} ended with exit code {code} before the ranks had ended"
    return [
        LostHost(name, why, start.record.get(name, 0.0), code or 1, name in start.record)
        for name in missing or [hosts[0].name]
    ]


def _one_start(
    job: Job,
    hosts: Sequence[Host],
    remote: Remote,
    backend: AllAtOnce,
    restarts: Restarts,
    generation: int,
    stop: Stop,
) -> tuple[_Start, int]:
    """Run one command from its start to its end. Returns the state and the exit code."""
    token = secrets.token_hex(8)
    chosen = choose_hosts(hosts, len(hosts), restarts)
    address = remote.master_addr or hosts[0].name.rpartition("@")[2]
    port = remote.master_port or _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
    meeting = Rendezvous(
        kind="static",
        endpoint=join_endpoint(address, port),
        run_id=f"{token}.{generation}",
    )
    orders = [
        replace(order, generation=generation, max_restarts=restarts.max_restarts)
        for order in make_orders(job, chosen, remote, meeting)
    ]
    argv = [
        remote.python,
        "-u",
        "-m",
        "xds.launcher.remote.node",
        "--orders",
        pack_orders(token, orders),
    ]
    command = backend.command([host for host, _ in chosen], remote, argv)
    selector = selectors.DefaultSelector()
    # not in the orders, which every user can read in the arguments
    environment = {**os.environ, **backend.environment(remote), RUN_KEY: new_key()}
    link = NodeLink(backend.name, command, token, selector, own_streams(stop), environment)
    link.close_input()
    start = _Start()
    sent: set[int] = set()
    while not link.has_ended:
        for key, _ in selector.select(_TICK_SECONDS):
            for message in link.read(key.fd):
                start.take(message)
        while stop.forwards:
            link.signal(stop.forwards.pop(0))
        due = _signal_due(start, stop)
        if due and due not in sent:
            sent.add(due)
            link.signal(due)
    link.end(_SIGKILL_AFTER_SECONDS)
    selector.close()
    return start, link.exit_code() or 0


def _signal_due(start: _Start, stop: Stop) -> int:
    """The signal that the command should have received by now; 0 for none."""
    if stop.signum:
        # the command forwards it; the node processes know how long their ranks may take to save
        return signal.SIGKILL if stop.is_urgent else stop.signum
    if not start.failed_at:
        return 0
    waited_seconds = time.monotonic() - start.failed_at
    if waited_seconds > _SIGKILL_AFTER_SECONDS:
        return signal.SIGKILL
    return signal.SIGTERM if waited_seconds > _OTHERS_SECONDS else 0
