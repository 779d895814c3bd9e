"""Starts a job over one connection to each host, tells the first failure, and goes on if it may.

    connect to every host, a few at a time     ssh -> node.py, which says hello
    a start: choose hosts and ranks            every chosen node gets its order
    the first rank fails, or a host is lost    the ranks of all other hosts are stopped
    all have ended: the report, once           then the next start, or the end of every node part

The nodes never talk to one another but through torch's rendezvous: who takes part, and where they meet, is
decided here, so that a start needs no agreement.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import selectors
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from ...utils.errors import UsageError
from ...utils.messages import write_stderr
from ..job import Host, Job, Remote, Rendezvous, Restarts
from ..ranks.failure import Failure, first_failure, was_preempted
from ..ranks.stop import Stop, stop_signals
from .backends.base import PerHost
from .frames import BEATS_A_LIMIT
from .link import Link
from .roster import choose
from .start import Lost, heartbeat_seconds, make_orders, own_streams, tell

CONNECTING_AT_ONCE = 64
_TICK_SECONDS = 0.1
_LIMITS_SECONDS = {"connecting": 30.0, "preparing": 120.0}  # to log in there; to import torch
_RETRY_SECONDS = 5.0  # between attempts to reach a lost host
_RETURN_SECONDS = 300.0  # how long too few hosts are waited for
_FILES_A_LINK = 4
_LEAVE_SECONDS = 2.0


def run_per_host(
    job: Job, hosts: Sequence[Host], remote: Remote, backend: PerHost, restarts: Restarts
) -> int:
    """Run `job` on `hosts` to its end; the exit code of the first rank that failed, 0 when none did."""
    allow_files(_FILES_A_LINK * len(hosts) + 64)
    with stop_signals() as stop, _deaf_to_suspension():
        return _Head(job, hosts, remote, backend, restarts, stop).run()


def allow_files(needed: int) -> None:
    """Raise this process's limit of open files to `needed` where it may be raised.

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
def _deaf_to_suspension() -> Iterator[None]:
    """Ctrl-Z would be taken for a lost launcher on every host."""
    former = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, former)


@final
@dataclass(eq=False)  # itself: it is looked for among thousands at every message
class _Member:
    """A host and how things stand with it.

    state: away (to be connected to), connecting, preparing, ready, running, lost.
    """

    host: Host
    state: str = "away"
    link: Link | None = None
    address: str = ""
    port: int = 0
    ahead_seconds: float = 0.0  # its clock minus ours
    next_attempt: float = 0.0
    is_told_to_stop: bool = False
    ranks: tuple[int, ...] = ()  # of the newest start


@final
@dataclass
class _Start:
    """What came of one start of all ranks."""

    members: list[_Member]
    failures: list[Failure] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    grows: bool = False  # stopped by the head, to take in hosts that came back
    was_stopped_there: bool = False  # a host was told to stop by somebody else, such as its cloud


@final
class _Head:
    """The loop: streams in, orders out, one start after another."""

    def __init__(
        self,
        job: Job,
        hosts: Sequence[Host],
        remote: Remote,
        backend: PerHost,
        restarts: Restarts,
        stop: Stop,
    ) -> None:
        self._job, self._remote, self._backend = job, remote, backend
        self._restarts, self._stop = restarts, stop
        self._write = own_streams(stop)
        self._limit_seconds = heartbeat_seconds()
        self._token = secrets.token_hex(8)
        self._members = [_Member(host) for host in hosts]
        self._by_link: dict[Link, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._start: _Start | None = None
        self._lost: list[Lost] = []
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
            goes_on = start.grows or (start.was_stopped_there and self._is_elastic())
            if was_preempted(start.failures) and not goes_on:
                self._say("every rank has saved and stopped, as it was asked to")
                return first_failure(start.failures).exit_code
            if not start.grows:
                text, code = tell(start.failures, start.finished, start.errors, start.lost)
                write_stderr(text, self._stop.was_asked)
                if not restarts_left:
                    return code
                restarts_left -= 1
            self._generation += 1

    # -- a start ------------------------------------------------------------------------------------------

    def _gather(self) -> list[tuple[_Member, int]]:
        """Connect until a start is possible, with every host at first; empty where it is not to be."""
        begun = time.monotonic()
        told = False
        while not self._stop.signum:
            self._turn()
            pending = [m for m in self._members if m.state in ("away", "connecting", "preparing")]
            is_first = self._generation == 0
            if is_first and any(m.state == "lost" for m in self._members):
                if not self._is_elastic():
                    return []
            if is_first and pending:
                continue
            chosen = self._chosen()
            if chosen:
                return chosen
            if is_first or time.monotonic() - begun > _RETURN_SECONDS:
                return []
            if not told:
                told = True
                self._say(f"waiting for hosts to come back, up to {_RETURN_SECONDS:.0f} s")
        return []

    def _is_elastic(self) -> bool:
        return 0 < self._restarts.min_nodes < len(self._members)

    def _chosen(self) -> list[tuple[_Member, int]]:
        ready = {m.host.name: m for m in self._members if m.state == "ready"}
        hosts = [m.host for m in ready.values()]
        picked = choose(hosts, len(self._members), self._restarts)
        return [(ready[host.name], ranks) for host, ranks in picked]

    def _give_up(self) -> int:
        if self._stop.signum:
            return 128 + self._stop.signum
        text, code = tell([], [], {}, self._lost)
        write_stderr(text, self._stop.was_asked)
        return code

    def _one_start(self, chosen: Sequence[tuple[_Member, int]]) -> _Start:
        """Give the orders, and see it through to the last node's end."""
        start = self._start = _Start([member for member, _ in chosen])
        self._lost = []
        ranks = sum(count for _, count in chosen)
        if self._generation:
            hosts = f"{len(chosen)} host(s), {ranks} ranks"
            self._say(f"starting every rank again (number {self._generation}) on {hosts}")
        first = chosen[0][0]
        orders = make_orders(
            self._job,
            [(member.host, count) for member, count in chosen],
            self._remote,
            Rendezvous(
                kind="static",
                endpoint=_endpoint(self._remote, first, is_alone=len(chosen) == 1),
                run_id=f"{self._token}.{self._generation}",
            ),
        )
        first_rank = 0
        for (member, count), order in zip(chosen, orders, strict=True):
            member.state, member.is_told_to_stop = "running", False
            member.ranks = tuple(range(first_rank, first_rank + count))
            first_rank += count
            order = replace(
                order,
                generation=self._generation,
                max_restarts=self._restarts.max_restarts,
                heartbeat_seconds=self._limit_seconds,
            )
            assert member.link is not None
            member.link.send("run", order=order.as_dict())
        asked = 0
        while any(member.state == "running" for member in start.members):
            self._turn()
            if self._stop.signum and asked < 1 + self._stop.is_urgent:
                asked += 1
                self._stop_ranks(self._stop.signum, again=asked > 1)
            elif (start.failures or start.lost or start.errors) and not asked:
                self._stop_ranks(signal.SIGTERM, is_for_peer=True)
            elif self._could_grow(start):
                start.grows = True
                self._say("more hosts are there: the ranks save where they can, and start anew")
                self._stop_ranks(signal.SIGTERM)
        self._start = None
        return start

    def _could_grow(self, start: _Start) -> bool:
        if start.grows or self._stop.signum or not self._is_elastic():
            return False
        back = [m for m in self._members if m.state == "ready" and m not in start.members]
        if not back:
            return False
        there = [m.host for m in self._members if m.state in ("ready", "running")]
        picked = choose(there, len(self._members), self._restarts)
        now = choose([m.host for m in start.members], len(self._members), self._restarts)
        return sum(count for _, count in picked) > sum(count for _, count in now)

    def _stop_ranks(self, signum: int, *, is_for_peer: bool = False, again: bool = False) -> None:
        for member in self._start.members if self._start else ():
            if member.state == "running" and (again or not member.is_told_to_stop):
                member.is_told_to_stop = True
                assert member.link is not None
                member.link.send("stop", signum=int(signum), is_for_peer=is_for_peer)

    # -- the loop -----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One look at every stream, and what is due by the clock."""
        for key, _ in self._selector.select(_TICK_SECONDS):
            link: Link = key.data
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
            self._next_beat = now + self._limit_seconds / BEATS_A_LIMIT
            for link in self._by_link:
                link.send("beat")

    def _forward(self) -> None:
        while self._stop.forwards:
            signum = self._stop.forwards.pop(0)
            for member in self._start.members if self._start else ():
                if member.state == "running" and member.link is not None:
                    member.link.send("forward", signum=signum)

    def _connect(self, now: float) -> None:
        """Begin as many connections as the bound allows."""
        num_connecting = sum(m.state == "connecting" for m in self._members)
        for member in self._members:
            if num_connecting >= CONNECTING_AT_ONCE or self._stop.signum:
                return
            if member.state == "lost" and self._generation_can_use(member):
                member.state = "away"
            if member.state != "away" or now < member.next_attempt:
                continue
            words = [self._remote.python, "-u", "-m", "xds.launcher.remote.node"]
            command = self._backend.command(member.host, self._remote, words)
            link = Link(
                *(member.host.name, command, self._token, self._selector, self._write),
                holds_back=True,
            )
            member.state, member.link = "connecting", link
            self._by_link[link] = member
            link.introduce(member.host.name, self._limit_seconds)
            num_connecting += 1

    def _generation_can_use(self, member: _Member) -> bool:
        """Whether a lost host is worth another attempt: only where a later start could take it."""
        has_begun = self._start is not None or self._generation > 0
        return has_begun and self._restarts.max_restarts > 0

    def _look_for_silence(self, now: float) -> None:
        for link, member in list(self._by_link.items()):
            silent_seconds = now - link.heard
            slow_seconds = _LIMITS_SECONDS.get(member.state)
            if slow_seconds is not None and silent_seconds > slow_seconds:
                self._lose(member, f"no answer for {slow_seconds:.0f} s")
            elif member.state in ("ready", "running") and silent_seconds > self._limit_seconds:
                self._lose(member, f"no sign of life for {silent_seconds:.0f} s")

    def _take(self, member: _Member, message: Mapping[str, Any]) -> None:
        kind, start = message["kind"], self._start
        if kind == "here" and member.state == "connecting":
            member.state = "preparing"
        elif kind == "hello" and member.state in ("connecting", "preparing"):
            member.state = "ready"
            member.address, member.port = message["address"], message["port"]
            member.ahead_seconds = message["now"] - time.time()
        elif start is None or member not in start.members:
            return
        elif kind == "failed" and message["generation"] == self._generation:
            if not self._stop.signum and not start.grows:
                member.is_told_to_stop = True  # it stops its own
                self._stop_ranks(signal.SIGTERM, is_for_peer=True)
        elif kind == "ended" and message["generation"] == self._generation:
            member.state, member.port = "ready", message["port"]
            start.finished += message["finished"]
            start.was_stopped_there |= message["was_stopped_here"]
            for said in message["failures"]:
                failure = Failure.from_dict(said)
                at = failure.time_seconds - member.ahead_seconds
                start.failures.append(replace(failure, time_seconds=at, host=member.host.name))
            if message["error"]:
                start.errors[member.host.name] = message["error"]

    def _lose(self, member: _Member, why: str) -> None:
        """The host is out of reach; an attempt to reach it again comes later."""
        link, was_reached = member.link, member.state in ("preparing", "ready", "running")
        assert link is not None
        if not was_reached or not why:
            with contextlib.suppress(Exception):
                link.end(_TICK_SECONDS)
        code = link.exit_code()
        link.signal(signal.SIGKILL)
        link.end(_TICK_SECONDS)
        words = link.last_words()
        why = why or "the connection ended"
        heard_at = time.time() - (time.monotonic() - link.heard)
        lost = Lost(
            host=member.host.name,
            why=f"{why}: {words}" if words else why,
            heard_at=heard_at,
            exit_code=code or 1,
            was_reached=was_reached,
            ranks=member.ranks if member.state == "running" else (),
        )
        self._lost.append(lost)
        if self._start is not None and member.state == "running":
            self._start.lost.append(lost)
        self._by_link.pop(link, None)
        member.state, member.link = "lost", None
        member.next_attempt = time.monotonic() + _RETRY_SECONDS

    def _leave(self) -> None:
        """End every node part."""
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
        write_stderr(f"xds: {text}\n", self._stop.was_asked)


def _endpoint(remote: Remote, first: _Member, *, is_alone: bool) -> str:
    """Where the ranks meet: the first host, by the address at which the head reached it."""
    address = remote.master_addr or ("127.0.0.1" if is_alone else first.address)
    port = remote.master_port or first.port
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
