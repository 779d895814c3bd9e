"""Runs a job over one connection to each host, reports the first failure, and restarts if restarts are left.

    connect to every host, a few at a time     ssh -> node.py, which sends "hello"
    a start: choose hosts and ranks            every chosen node process gets its order
    the first rank fails, or a host is lost    the ranks of all other hosts are stopped
    all have ended: one report                 then the next start, or the end of every node process

The node processes communicate with each other only through torch's rendezvous. The head decides the
participants and the rendezvous endpoint, so a start needs no agreement protocol.

With recovery another head follows one that is killed (ranks/keeper.py), and goes on from what hosts hold.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from ...utils.errors import UsageError
from ...utils.messages import write_stderr
from ...utils.sealing import new_key
from ..job import Host, Job, Order, Remote, Rendezvous, Restarts
from ..ranks.failure import first_failure, was_preempted
from ..ranks.guard import LAUNCHER_KILLED
from ..ranks.network import join_endpoint
from ..ranks.stop import Stop, stop_signals
from ..ranks.supervise import import_torch
from .backends import PerHost
from .link import NodeLink
from .messages import HEARTBEATS_PER_TIMEOUT
from .start import (
    HEARTBEAT_SECONDS,
    LostHost,
    Results,
    choose_hosts,
    final_report,
    heartbeat_seconds,
    hosts_in_place,
    make_orders,
    own_streams,
    spare_order,
)

if TYPE_CHECKING:
    from ..ranks.keeper import Keeper
    from .deciding import Deciding
    from .holding import Held

CONNECTING_AT_ONCE = 64
_TICK_SECONDS = 0.1
# time limits for the login, and for the import of torch
_LIMITS_SECONDS = {"connecting": 30.0, "preparing": 120.0}
_RETRY_SECONDS = 5.0  # between attempts to reach a lost host
_RETURN_SECONDS = 300.0  # how long to wait for hosts if there are too few
_TAKE_OVER_SECONDS = 120.0  # the same of hosts of another head
_FILES_A_LINK = 4
_LEAVE_SECONDS = 2.0


def run_per_host(
    job: Job, hosts: Sequence[Host], remote: Remote, backend: PerHost, restarts: Restarts
) -> int:
    """Run `job` on `hosts` to its end. Returns the exit code of the first rank that failed, or 0."""
    keeper = None
    if job.recovers and sys.platform == "linux":  # as on one machine
        from ..ranks.keeper import Keeper

        keeper = Keeper()
        code = keeper.run()
        if code is not None:  # this is the keeper
            return code
    allow_files(_FILES_A_LINK * len(hosts) + 64)
    with stop_signals() as stop, _suspension_ignored():
        return _Head(job, hosts, remote, backend, restarts, stop, keeper).run()


def allow_files(needed: int) -> None:
    """Raise this process's limit of open files to `needed` if it is lower.

    Raises:
        UsageError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"open files = {hard} (hard limit): {needed} are needed for a connection to each host; raise it "
            f"(`ulimit -Hn {needed}` as root), or start from Slurm or MPI"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def _suspension_ignored() -> Iterator[None]:
    """Ignore Ctrl-Z: every host would treat a suspended launcher as lost."""
    former = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, former)


@final
@dataclass(eq=False)  # compared by identity: fast lookup among thousands at every message
class _Member:
    """A host and its state.

    state: away (not connected yet), connecting, preparing, ready, running, lost.
    """

    host: Host
    state: str = "away"
    link: NodeLink | None = None
    address: str = ""
    head_address: str = ""  # where it sees this machine
    held: Held = field(default_factory=dict)  # whose versions it holds of a head before
    port: int = 0
    ahead_seconds: float = 0.0  # its clock minus ours
    next_attempt: float = 0.0
    is_stopping: bool = False
    ranks: tuple[int, ...] = ()  # of the current start


@final
@dataclass
class _Start(Results):
    """The state and the results of one start of all ranks."""

    members: list[_Member] = field(default_factory=list)
    order: Order | None = None  # of the last of them
    lost: list[LostHost] = field(default_factory=list)
    passed: list[LostHost] = field(default_factory=list)  # with recovery: the run went on
    is_growing: bool = False  # stopped by the head to add hosts that came back
    # a node process got a stop signal on its host, for example from a cloud provider
    was_stopped_on_host: bool = False
    deciding: Deciding | None = None  # what happens to ranks of a run with recovery


@final
class _Head:
    """The main loop: reads the streams, sends the orders, does one start after another."""

    def __init__(
        self,
        job: Job,
        hosts: Sequence[Host],
        remote: Remote,
        backend: PerHost,
        restarts: Restarts,
        stop: Stop,
        keeper: Keeper | None,
    ) -> None:
        """keeper: of a run with recovery."""
        self._job, self._remote, self._backend = job, remote, backend
        self._restarts, self._stop = restarts, stop
        self._write = own_streams(stop)
        self._limit_seconds = heartbeat_seconds(HEARTBEAT_SECONDS)
        if job.recovers:
            import_torch()  # before hosts wait for messages: it may take long
            from .deciding import HEARTBEAT_SECONDS as SHORT_SECONDS

            is_near = job.num_sites == 1  # links between sites are slower
            self._limit_seconds = heartbeat_seconds(SHORT_SECONDS if is_near else HEARTBEAT_SECONDS)
        self._keeper = keeper
        self._token = secrets.token_hex(8) if keeper is None else keeper.run_id
        self._members = [_Member(host) for host in hosts]
        self._by_link: dict[NodeLink, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._start: _Start | None = None
        self._lost: list[LostHost] = []
        self._generation = 0
        self._next_beat = self._next_look = 0.0

    def run(self) -> int:
        try:
            return self._run()
        finally:
            self._leave()

    def _run(self) -> int:
        restarts_left = self._restarts.max_restarts
        while True:
            chosen = self._gather()
            if not chosen:
                return self._give_up()
            start = self._one_start(chosen)
            if self._stop.signum:
                return 128 + self._stop.signum
            if not (start.failures or start.lost or start.errors):
                return 0
            goes_on = start.is_growing or (start.was_stopped_on_host and self._is_elastic())
            if was_preempted(start.failures) and not goes_on:
                self._say("every rank has saved a checkpoint and stopped, as requested")
                return first_failure(start.failures).exit_code
            if not start.is_growing:
                text, code = final_report(start.failures, start.finished, start.errors, start.lost)
                write_stderr(text, self._stop.is_requested)
                if not restarts_left:
                    return code
                restarts_left -= 1
            self._generation += 1

    # -- a start ------------------------------------------------------------------------------------------

    @property
    def _takes_over(self) -> bool:
        """This start goes on from what hosts hold of a head before."""
        return self._generation == 0 and self._keeper is not None and self._keeper.num_killed > 0

    def _gather(self) -> list[tuple[_Member, int]]:
        """Connect until a start is possible, at first with every host. Empty if a start is impossible."""
        if self._takes_over:
            return self._gather_again()
        begun = time.monotonic()
        is_logged = False
        while not self._stop.signum:
            self._turn()
            pending = [m for m in self._members if m.state in ("away", "connecting", "preparing")]
            is_first = self._generation == 0
            if is_first and any(m.state == "lost" and not m.host.is_spare for m in self._members):
                if not self._is_elastic():
                    return []
            if is_first and pending:
                continue
            chosen = self._chosen()
            if chosen:
                return chosen
            if is_first or time.monotonic() - begun > _RETURN_SECONDS:
                return []
            if not is_logged:
                is_logged = True
                self._say(f"waiting for hosts to come back, up to {_RETURN_SECONDS:.0f} s")
        return []

    def _gather_again(self) -> list[tuple[_Member, int]]:
        """Connect until each place of the start before has a host. Empty if no host holds versions."""
        begun = time.monotonic()
        while not self._stop.signum:
            self._turn()
            is_late = time.monotonic() - begun > _TAKE_OVER_SECONDS
            if any(m.state in ("away", "connecting", "preparing") for m in self._members):
                if not is_late:
                    continue
            is_held = any(m.held for m in self._members if m.state == "ready")
            chosen = self._chosen() if is_held else []
            if chosen or is_late or not is_held:
                return chosen
        return []

    def _is_elastic(self) -> bool:
        return 0 < self._restarts.min_nodes < len(self._members)

    def _chosen(self) -> list[tuple[_Member, int]]:
        ready = {m.host.name: m for m in self._members if m.state == "ready"}
        hosts = [m.host for m in ready.values()]
        if self._job.recovers:
            held = {name: m.held for name, m in ready.items()} if self._takes_over else {}
            picked = hosts_in_place(hosts, [m.host for m in self._members], held)
            return [(ready[host.name], ranks) for host, ranks in picked]
        picked = choose_hosts(hosts, len(self._members), self._restarts)
        return [(ready[host.name], ranks) for host, ranks in picked]

    def _give_up(self) -> int:
        if self._stop.signum:
            return 128 + self._stop.signum
        if self._takes_over:
            text = final_report([], [], {}, self._lost)[0] if self._lost else ""
            write_stderr(text + LAUNCHER_KILLED, self._stop.is_requested)
            return 128 + signal.SIGKILL
        text, code = final_report([], [], {}, self._lost)
        write_stderr(text, self._stop.is_requested)
        return code

    def _one_start(self, chosen: Sequence[tuple[_Member, int]]) -> _Start:
        """Send the orders, and run the loop until the last node process reports its end."""
        start = self._start = _Start(members=[member for member, _ in chosen])
        self._lost = []
        if self._generation:
            ranks = sum(count for _, count in chosen)
            hosts = f"{len(chosen)} host(s), {ranks} ranks"
            self._say(f"starting every rank again (number {self._generation}) on {hosts}")
        self._send_orders(start, chosen)
        num_requests = 0
        while any(member.state == "running" for member in start.members):
            self._turn()
            if self._stop.signum and num_requests < 1 + self._stop.is_urgent:
                num_requests += 1
                if start.deciding is not None:
                    start.deciding.decider.asked_to_end()
                self._stop_ranks(self._stop.signum, again=num_requests > 1)
            elif start.deciding is not None:
                self._decide(start.deciding, start)
            elif (start.failures or start.lost or start.errors) and not num_requests:
                self._stop_ranks(signal.SIGTERM, is_for_peer=True)
            elif self._can_add_hosts(start):
                start.is_growing = True
                self._say("more hosts are available: the ranks save if they can, and start again")
                self._stop_ranks(signal.SIGTERM)
        self._start = None
        if start.deciding is not None:
            start.failures = start.deciding.counted(start.failures)
            if not (start.failures or start.lost):
                # the others had ended without noticing it, so nobody did the rest of the work of its ranks
                failed = start.deciding.decider.failed
                start.lost = [each for each in start.passed if failed.intersection(each.ranks)]
            start.deciding = None  # closes its store, whose port the next start may need
        return start

    # -- recovery -----------------------------------------------------------------------------------------

    def _decide_from_now(self, start: _Start, counts: Sequence[int], key: str) -> str:
        """Serve the store of generations. Returns its endpoint. Raises UsageError: hosts do not reach it."""
        from .deciding import Deciding, head_address

        members = start.members
        seen = {m.host.name: m.head_address for m in members if m.state == "ready"}
        address = head_address(seen, self._remote.master_addr)
        endpoint = join_endpoint(address, self._remote.master_port or 0)
        hosts, num_spares = [m.host for m in members], self._job.num_spares
        given = (hosts, counts, num_spares, endpoint, key)
        start.deciding = Deciding(*given, takes_over=self._takes_over)
        for member, place in zip(members, start.deciding.decider.places, strict=True):
            place.is_there = member.state == "ready"
        return start.deciding.endpoint

    def _take_back(self, deciding: Deciding, start: _Start) -> None:
        """Let hosts that are reached again have processes that wait for a place."""
        decider = deciding.decider
        if deciding.is_finished or decider.is_ending or self._stop.signum:
            return
        for number, (member, place) in enumerate(zip(start.members, decider.places, strict=True)):
            if member.state == "ready" and not place.is_there:
                assert start.order is not None
                _send_order(member, spare_order(start.order, member.host))
                decider.host_came(number)

    def _decide(self, deciding: Deciding, start: _Start) -> None:
        """Do what is decided about ranks and hosts."""
        from ...recovery.decider import Fill, Kill, Tell

        decider = deciding.decider
        if self._keeper is not None:
            is_whole = decider.lighthouse.has_one_copy and not decider.is_ending
            self._keeper.note_versions(on_hosts=is_whole)
        self._take_back(deciding, start)
        for command in deciding.look():
            if isinstance(command, Tell):
                self._say(command.text)
            elif isinstance(command, Fill | Kill):
                link, words = start.members[command.host].link, vars(command)
                if link is not None:
                    link.send("fill" if isinstance(command, Fill) else "kill", **words)
            else:
                self._stop_ranks(signal.SIGTERM, is_for_peer=True)
        if start.errors and not decider.is_ending:
            self._stop_ranks(signal.SIGTERM, is_for_peer=True)
        if decider.is_done and not deciding.is_finished:
            deciding.is_finished = True
            for member in start.members:
                if member.state == "running" and member.link is not None:
                    member.link.send("finish")

    def _send_orders(self, start: _Start, chosen: Sequence[tuple[_Member, int]]) -> None:
        """Start the ranks, and with recovery the processes that wait on spare hosts."""
        key, remote = new_key(), self._remote
        if self._job.recovers:
            start.members += [m for m in self._members if m not in start.members]
            endpoint = self._decide_from_now(start, [count for _, count in chosen], key)
            num_spare = sum(member.state == "ready" for member in start.members[len(chosen) :])
            if self._takes_over:  # one may have a place now
                num_spare = sum(member.host.is_spare for member in self._members)
            environment = {**remote.environment, "XDS_SPARE_HOSTS": str(num_spare)}
            remote = replace(remote, environment=environment)
        else:
            endpoint = _endpoint(remote, chosen[0][0], is_alone=len(chosen) == 1)
        rendezvous = Rendezvous(
            kind="static", endpoint=endpoint, run_id=f"{self._token}.{self._generation}"
        )
        counts = [(member.host, count) for member, count in chosen]
        orders = make_orders(self._job, counts, remote, rendezvous)
        first_rank = 0
        for (member, count), order in zip(chosen, orders, strict=True):
            member.ranks = tuple(range(first_rank, first_rank + count))
            first_rank += count
            start.order = replace(
                order,
                generation=self._generation,
                max_restarts=self._restarts.max_restarts,
                heartbeat_seconds=self._limit_seconds,
                key=key,
                takes_over=self._takes_over,
            )
            _send_order(member, start.order)
        assert start.order is not None
        for member in start.members[len(chosen) :]:
            if member.state == "ready":
                _send_order(member, spare_order(start.order, member.host))

    def _can_add_hosts(self, start: _Start) -> bool:
        if start.is_growing or self._stop.signum or not self._is_elastic():
            return False
        back = [m for m in self._members if m.state == "ready" and m not in start.members]
        if not back:
            return False
        there = [m.host for m in self._members if m.state in ("ready", "running")]
        picked = choose_hosts(there, len(self._members), self._restarts)
        now = choose_hosts([m.host for m in start.members], len(self._members), self._restarts)
        return sum(count for _, count in picked) > sum(count for _, count in now)

    def _stop_ranks(self, signum: int, *, is_for_peer: bool = False, again: bool = False) -> None:
        for member in self._start.members if self._start else ():
            if member.state == "running" and (again or not member.is_stopping):
                member.is_stopping = True
                assert member.link is not None
                member.link.send("stop", signum=int(signum), is_for_peer=is_for_peer)

    # -- the loop -----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Read every stream once, and do the periodic work that is due."""
        deciding = None if self._start is None else self._start.deciding
        tick_seconds = _TICK_SECONDS if deciding is None else deciding.tick_seconds
        for key, _ in self._selector.select(tick_seconds):
            link: NodeLink = key.data
            member = self._by_link.get(link)
            for message in link.read(key.fd):
                if member is not None:
                    self._take(member, message)
            if link.has_ended and member is not None:
                self._lose(member, "")
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _TICK_SECONDS
            self._connect(now)
            self._look_for_silence(now)
            self._forward()
        if now >= self._next_beat:
            self._next_beat = now + self._limit_seconds / HEARTBEATS_PER_TIMEOUT
            for link in self._by_link:
                link.send("beat")

    def _forward(self) -> None:
        while self._stop.forwards:
            signum = self._stop.forwards.pop(0)
            for member in self._start.members if self._start else ():
                if member.state == "running" and member.link is not None:
                    member.link.send("forward", signum=signum)

    def _connect(self, now: float) -> None:
        """Begin as many connections as the limit allows."""
        num_connecting = sum(m.state == "connecting" for m in self._members)
        for member in self._members:
            if num_connecting >= CONNECTING_AT_ONCE or self._stop.signum:
                return
            if member.state == "lost" and self._generation_can_use(member):
                member.state = "away"
            if member.state != "away" or now < member.next_attempt:
                continue
            argv = [self._remote.python, "-u", "-m", "xds.launcher.remote.node"]
            command = self._backend.command(member.host, self._remote, argv)
            link = NodeLink(
                *(member.host.name, command, self._token, self._selector, self._write),
                holds_stderr=True,
            )
            member.state, member.link = "connecting", link
            self._by_link[link] = member
            number = None if self._keeper is None else self._keeper.num_killed
            link.send_handshake(member.host.name, self._limit_seconds, number)
            num_connecting += 1

    def _generation_can_use(self, member: _Member) -> bool:
        """Whether to reconnect to a lost host: only if a later start can use it."""
        has_begun = self._start is not None or self._generation > 0 or self._takes_over
        return has_begun and (self._restarts.max_restarts > 0 or self._job.recovers)

    def _look_for_silence(self, now: float) -> None:
        for link, member in list(self._by_link.items()):
            silent_seconds = now - link.last_received
            slow_seconds = _LIMITS_SECONDS.get(member.state)
            if slow_seconds is not None and silent_seconds > slow_seconds:
                self._lose(member, f"no answer for {slow_seconds:.0f} s")
            elif member.state in ("ready", "running") and silent_seconds > self._limit_seconds:
                self._lose(member, f"no message for {silent_seconds:.0f} s")

    def _take(self, member: _Member, message: Mapping[str, Any]) -> None:
        kind, start = message["kind"], self._start
        if kind == "here" and member.state == "connecting":
            member.state = "preparing"
        elif kind == "hello" and member.state in ("connecting", "preparing"):
            member.state = "ready"
            member.address, member.port = message["address"], message["port"]
            member.head_address = message["head"]
            member.held = {int(rank): (head, number) for rank, (head, number) in message["held"]}
            member.ahead_seconds = message["now"] - time.time()
        elif start is None or member not in start.members:
            return
        elif kind == "failed" and message["generation"] == self._generation:
            if not self._stop.signum and not start.is_growing:
                member.is_stopping = True  # the host stops its own ranks
                self._stop_ranks(signal.SIGTERM, is_for_peer=True)
        elif kind in ("rank_ended", "ranks_stopped"):
            if start.deciding is not None and message["generation"] == self._generation:
                start.deciding.take(start.members.index(member), message)
        elif kind == "ended" and message["generation"] == self._generation:
            member.state, member.port = "ready", message["port"]
            start.was_stopped_on_host |= message["was_stopped_here"]
            start.add(member.host.name, message, member.ahead_seconds)

    def _lose(self, member: _Member, why: str) -> None:
        """Mark the host as lost. Another attempt to connect follows later."""
        link, was_reached = member.link, member.state in ("preparing", "ready", "running")
        assert link is not None
        if not was_reached or not why:
            with contextlib.suppress(Exception):
                link.end(_TICK_SECONDS)
        code = link.exit_code()
        link.signal(signal.SIGKILL)
        link.end(_TICK_SECONDS)
        argv = link.last_error_lines()
        why = why or "the connection ended"
        last_message_at = time.time() - (time.monotonic() - link.last_received)
        lost = LostHost(
            host=member.host.name,
            why=f"{why}: {argv}" if argv else why,
            last_message_at=last_message_at,
            exit_code=code or 1,
            was_reached=was_reached,
            ranks=member.ranks if member.state == "running" else (),
        )
        start = self._start
        if start is not None and start.deciding is not None:
            self._lose_host(start.deciding, start, member, lost, why)
        else:
            self._lost.append(lost)
            if start is not None and member.state == "running":
                start.lost.append(lost)
        self._by_link.pop(link, None)
        member.state, member.link = "lost", None
        member.next_attempt = time.monotonic() + _RETRY_SECONDS

    def _lose_host(
        self, deciding: Deciding, start: _Start, member: _Member, lost: LostHost, why: str
    ) -> None:
        """Go on without a host, or end the run."""
        decider, number = deciding.decider, start.members.index(member)
        if not decider.places[number].is_there:  # it could not be reached again
            return
        was_ending = decider.is_ending
        decider.host_lost(number, why)
        if decider.is_ending and not was_ending:
            start.lost.append(lost)
        else:
            start.passed.append(lost)

    def _leave(self) -> None:
        """End every node process."""
        links = list(self._by_link)
        for link in links:
            link.send("quit")
            link.close_input()
        deadline = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < deadline and any(link.exit_code() is None for link in links):
            for key, _ in self._selector.select(_TICK_SECONDS):
                key.data.read(key.fd)
        for link in links:
            link.end(0.0)
        self._selector.close()

    def _say(self, text: str) -> None:
        write_stderr(f"xds: {text}\n", self._stop.is_requested)


def _send_order(member: _Member, order: Order) -> None:
    member.state, member.is_stopping = "running", False
    assert member.link is not None
    member.link.send("run", order=order.as_dict())


def _endpoint(remote: Remote, first: _Member, *, is_alone: bool) -> str:
    """The rendezvous endpoint: the first host, by the address at which the head reached it."""
    address = remote.master_addr or ("127.0.0.1" if is_alone else first.address)
    return join_endpoint(address, remote.master_port or first.port)
