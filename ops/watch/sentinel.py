"""One thread a process that speaks for its ranks: shows that they live, answers alarms, ends what cannot raise.

    every heartbeat:  beat -> store     an alarm there? -> ring to a file, where the main thread stands -> store
                      does this rank wait too long? -> alarm, diagnosis; it cannot raise? -> end of the process

It sleeps between heartbeats, has a connection of its own to the store, and ends with the last engine.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, final

from .config import WatchConfig
from .diagnosis import Report, explain
from .dump import end_process, recorded, write_ring
from .exchange import PATIENCE_SECONDS, Exchange
from .ring import Mark, Stand, tensor_of_call
from .store import REPLY_SECONDS, own_connection
from .stragglers import Judge
from .watch import Watch

log = logging.getLogger("xds")
OVERDUE_SECONDS = (
    5.0  # beyond the timeout: by then a wait that can raise has raised, on a busy machine too
)
STUCK_SECONDS = 1.0  # the same for a device's queue, which raises nothing
EARLY_SECONDS = (
    5.0  # before the timeout a wait of the script's own is told: its error will not tell
)
FRESH_SECONDS = EARLY_SECONDS + 2.0  # answers to an alarm are true for so long: their ranks may end
MAX_CPU_SHARE = 0.05  # of a beat that a thread uses while it only waits
LOOK_AFTER_SHARE = 0.5  # of the time after which a wait is told
MANY = 64  # ranks above which the times of all are read more seldom
Reports = dict[int, Report]


@final
@dataclass
class Request:
    """The main thread asks all ranks where they are."""

    report: Report
    answer: str = ""
    done: threading.Event = field(default_factory=threading.Event)


@final
class Post:
    """What the sentinel holds for one watch; the watch itself stays its engine's."""

    def __init__(
        self, watch: Watch, group: str, timeout_seconds: float, straggler_ratio: float
    ) -> None:
        self.watch = weakref.ref(watch)
        self.group = group
        self.timeout_seconds = timeout_seconds
        self.store = watch.open_store()
        self.exchange: Exchange | None = None
        self.is_leaving = False
        self.answered = 0  # the newest alarm that was dealt with, and when
        self.answered_seconds = 0.0
        self.request: Request | None = None
        self.judge = Judge(straggler_ratio) if straggler_ratio and watch.rank == 0 else None
        self.beats = 0
        self.wakes: threading.Event | None = None

    def ask(self, report: Report) -> str:
        request = self.request = Request(report)
        assert self.wakes is not None
        self.wakes.set()
        if request.done.wait(PATIENCE_SECONDS + 1.5):
            return request.answer
        return explain([report], self.watch_size) + " (the store of the group does not answer)"

    @property
    def watch_size(self) -> int:
        watch = self.watch()
        return 0 if watch is None else watch.world_size


@final
class Stall:
    """How long something has not moved, by our own looks: a process that was stopped has not waited."""

    def __init__(self) -> None:
        self._what: object = None
        self.seconds = 0.0
        self.is_told = False

    def look(self, what: object, elapsed_seconds: float) -> float:
        """`what` is compared with the last look's; None: nothing waits."""
        if what is None or what != self._what:
            self._what, self.seconds, self.is_told = what, 0.0, False
        else:
            self.seconds += elapsed_seconds
        return self.seconds


@final
class Sentinel:
    """The thread, and what it watches."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._beat_seconds = heartbeat_seconds
        self._posts: list[Post] = []
        self._wakes = threading.Event()
        self._wait_stall, self._own_stall, self._device_stall = Stall(), Stall(), Stall()
        self._idle_stall = Stall()
        self._cpu_seconds = 0.0
        self._host = socket.gethostname()
        self._thread = threading.Thread(target=self._run, name="xds-watch", daemon=True)

    def add(self, post: Post) -> None:
        post.wakes = self._wakes
        self._posts.append(post)
        if not self._thread.is_alive():
            self._thread.start()

    def remove(self, watch: Watch) -> None:
        """Say good-bye for `watch`; returns when its connection is closed, and after the last the thread."""
        for post in list(self._posts):
            if post.watch() is watch:
                post.is_leaving = True
        self._wakes.set()
        deadline = time.monotonic() + REPLY_SECONDS
        while time.monotonic() < deadline and self._thread.is_alive():
            if not any(post.watch() is watch for post in self._posts):
                break
            time.sleep(0.002)
        if not self._posts:
            self._thread.join(REPLY_SECONDS)

    def end(self) -> None:
        """The process ends: a thread that came back from the store then would abort it."""
        for post in list(self._posts):
            post.is_leaving = True
        self._wakes.set()
        self._thread.join(REPLY_SECONDS)

    @property
    def is_over(self) -> bool:
        return not self._posts

    # -- in the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        last_seconds = time.monotonic()
        while True:
            now = time.monotonic()
            # more than a beat and a half was no waiting: this process did not run
            elapsed = min(now - last_seconds, 1.5 * self._beat_seconds)
            last_seconds = now
            for post in list(self._posts):
                self._attend(post)
            with _lock:
                if not self._posts:
                    return
            self._look_for_stalls(elapsed)
            self._wakes.wait(self._beat_seconds)
            self._wakes.clear()

    def _attend(self, post: Post) -> None:
        watch = post.watch()
        try:
            if watch is None or post.is_leaving:
                self._drop(post)
                return
            if post.exchange is None:
                store = own_connection(post.store)
                post.store = None
                post.exchange = Exchange(store, watch.rank, watch.world_size, watch.engine)
            exchange = post.exchange
            exchange.beat(host=self._host, steps=watch.steps.told())
            if post.request is not None:
                self._serve(post, watch, post.request)
            number = exchange.alarm()
            if number > post.answered:
                self._gather(post, watch, number)
            self._compare(post, exchange)
        except RuntimeError:  # the store is gone, and the run with it
            self._fail(post)

    def _drop(self, post: Post) -> None:
        try:
            if post.exchange is not None:
                post.exchange.beat(left=True)
        except RuntimeError:
            pass
        post.exchange = None
        self._posts.remove(post)

    def _fail(self, post: Post) -> None:
        request, watch = post.request, post.watch()
        if watch is not None:
            watch.asker = None  # it asks by itself from now on
        if request is not None and not request.done.is_set():
            request.answer = explain([request.report], post.watch_size)
            request.done.set()
        self._posts.remove(post)

    def _serve(self, post: Post, watch: Watch, request: Request) -> None:
        """The main thread's wait failed: its own words, an alarm, everybody's reports."""
        exchange, post.request = post.exchange, None
        assert exchange is not None
        exchange.say(request.report)
        number = exchange.alarm()
        if number != post.answered or time.monotonic() - post.answered_seconds > FRESH_SECONDS:
            number = max(number, post.answered + 1)
            exchange.raise_alarm(number)
        post.answered, post.answered_seconds = number, time.monotonic()
        write_ring(watch, request.report)
        deadline = time.monotonic() + PATIENCE_SECONDS
        reports = exchange.collect(request.report, deadline, number)
        request.answer = _explained(exchange, reports)
        exchange.stay(reports, deadline)
        request.done.set()

    def _gather(self, post: Post, watch: Watch, number: int) -> str:
        """An alarm: say where this rank is; the lowest rank that lives tells what all say, unless it raises."""
        exchange = post.exchange
        assert exchange is not None
        post.answered, post.answered_seconds = number, time.monotonic()
        mine = self._where(post, watch, number)
        exchange.answer(mine)
        write_ring(watch, mine)
        deadline = time.monotonic() + PATIENCE_SECONDS
        reports = exchange.collect(mine, deadline, number, stops=self._is_asked)
        if self._is_asked():  # a wait failed meanwhile: its error will tell
            return ""
        exchange.store.set(f"xds/read/{watch.rank}", "")
        told = _explained(exchange, reports)
        will_raise = bool(mine.waits_in) and watch.probe is None
        if watch.rank == min(reports) and not will_raise and not watch.is_failing:
            log.error("xds: %s", told)
        return told

    def _is_asked(self) -> bool:
        return any(post.request is not None for post in self._posts)

    def _where(self, post: Post, watch: Watch, number: int) -> Report:
        """This rank, as seen from outside."""
        for other in [watch, *(w for w in (p.watch() for p in self._posts) if w is not None)]:
            mark = _waits_in(other, self._device_stall)
            if mark is not None:
                return replace(other.report_wait(mark), alarm=number)
        stand, call = Stand(watch.thread), ""
        if stand.call:
            has_moved = self._own_stall.seconds == 0.0
            call = stand.call + ("" if has_moved else tensor_of_call(watch.thread))
        return replace(
            watch.report(place=stand.place, call=call, own=recorded(post.group)), alarm=number
        )

    # -- stalls -----------------------------------------------------------------------------------------

    def _look_for_stalls(self, elapsed_seconds: float) -> None:
        waiting = [(post, watch) for post in self._posts if (watch := post.watch()) is not None]
        found: tuple[Post, Watch, tuple[Mark, float]] | None = None
        for post, watch in waiting:
            now_waits = watch.waiting
            if now_waits is not None and not watch.is_failing:
                found = (post, watch, now_waits)
        seconds = self._wait_stall.look(found and found[2], elapsed_seconds)
        if found is not None:
            self._own_stall.look(None, 0.0)
            self._idle_stall.look(None, 0.0)
            if seconds > found[0].timeout_seconds + OVERDUE_SECONDS:
                self._end(found[0], found[1])
            return
        if not waiting:
            return
        devices = [pair for pair in waiting if pair[1].probe is not None]
        if not (devices and self._look_at_device(*devices[0], elapsed_seconds)):
            self._look_at_script(*waiting[0], elapsed_seconds)

    def _look_at_device(self, post: Post, watch: Watch, elapsed_seconds: float) -> bool:
        """What was queued is not done: said before torch's own watchdog aborts the process. True: it waits."""
        probe = watch.probe
        assert probe is not None
        is_stuck = probe.is_stuck()
        what = (id(probe), probe.count) if is_stuck else None
        seconds = self._device_stall.look(what, elapsed_seconds)
        if not is_stuck or not watch.ring:
            return False
        if seconds > _early(post) and not self._device_stall.is_told:
            self._device_stall.is_told = True
            self._raise_alarm(post, watch)
        if seconds > post.timeout_seconds + STUCK_SECONDS:
            self._end(post, watch)
        return True

    def _end(self, post: Post, watch: Watch) -> None:
        """The main thread sits in a wait that does not raise."""
        told = self._raise_alarm(post, watch)
        mark = _waits_in(watch, self._device_stall)
        if told and not watch.is_failing and mark is not None:
            called = watch.call(mark.key)
            end_process(
                f"PeerError: {called} did not end on rank {watch.rank} of {watch.world_size} within "
                f"{post.timeout_seconds:.0f} s, and cannot raise. Another rank stopped, or went another way "
                f"through its code: {told}"
            )

    def _look_at_script(self, post: Post, watch: Watch, elapsed_seconds: float) -> None:
        """A collective of the script's own that waits too long: its error will name a socket.

        Only a thread that has been idle for most of the time is looked at: it waits, and does not move.
        """
        before, self._cpu_seconds = self._cpu_seconds, _cpu_seconds(watch.thread)
        is_idle = self._cpu_seconds - before < MAX_CPU_SHARE * self._beat_seconds
        idle_seconds = self._idle_stall.look(is_idle or None, elapsed_seconds)
        what = None
        if idle_seconds > LOOK_AFTER_SHARE * _early(post):
            stand = Stand(watch.thread)
            what = stand.moment if stand.call else None
        self._own_stall.look(what, elapsed_seconds)
        if what is not None and idle_seconds > _early(post) and not self._own_stall.is_told:
            if self._own_stall.seconds:  # the same as at the look before
                self._own_stall.is_told = True
                self._raise_alarm(post, watch)

    def _raise_alarm(self, post: Post, watch: Watch) -> str:
        exchange = post.exchange
        if exchange is None:
            return ""
        try:
            number = max(exchange.alarm(), post.answered + 1)
            if number > post.answered:
                exchange.raise_alarm(number)
            return self._gather(post, watch, number)
        except RuntimeError:
            self._fail(post)
            return ""

    # -- stragglers -------------------------------------------------------------------------------------

    def _compare(self, post: Post, exchange: Exchange) -> None:
        post.beats += 1
        if post.judge is None or (exchange.world_size > MANY and post.beats % 5):
            return
        beats = exchange.beats()
        if any("steps" not in beat for beat in beats.values()):
            return
        for verdict in post.judge.look({rank: beat["steps"] for rank, beat in beats.items()}):
            told = verdict.told(beats[verdict.rank]["host"])
            log.log(logging.WARNING if verdict.is_slow else logging.INFO, "xds: %s", told)


def _explained(exchange: Exchange, reports: Reports) -> str:
    silences = exchange.silences(reports)
    return explain(list(reports.values()), exchange.world_size, silences)


def _early(post: Post) -> float:
    """After so many seconds something is told that ends without our words."""
    return post.timeout_seconds - min(EARLY_SECONDS, post.timeout_seconds / 4)


def _waits_in(watch: Watch, device: Stall) -> Mark | None:
    """The collective in which a rank is; on a device the last one of those that are not done."""
    if watch.waiting is not None:
        return watch.waiting[0]
    is_stuck = watch.probe is not None and device.seconds > 0 and len(watch.ring) > 0
    return watch.ring[-1] if is_stuck else None


def _cpu_seconds(thread: int) -> float:
    """Of a thread; 0 where it is gone: its clock may not be asked for then."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or thread not in [each.ident for each in threading.enumerate()]:
        return 0.0
    return time.clock_gettime(clock(thread))


# -- one for each process -------------------------------------------------------------------------------

_lock = threading.Lock()
_sentinel: Sentinel | None = None


def attend(watch: Watch, group: str, section: WatchConfig, timeout_seconds: float) -> None:
    """Let this process's thread speak for `watch`, until `leave` or its end; starts it where there is none."""
    global _sentinel  # noqa: PLW0603 (one thread a process)
    post = Post(watch, group, timeout_seconds, section.straggler_ratio)
    if post.store is None:
        return
    watch.asker = post
    with _lock:
        if _sentinel is None or _sentinel.is_over:
            _sentinel = Sentinel(min(section.heartbeat_seconds, timeout_seconds / 4))
        _sentinel.add(post)


def leave(watch: Watch) -> None:
    """The end of `attend`."""
    watch.asker = None
    if _sentinel is not None:
        _sentinel.remove(watch)


def _at_exit() -> None:
    if _sentinel is not None:
        _sentinel.end()


def _after_fork() -> None:
    global _sentinel, _lock  # noqa: PLW0603
    _sentinel, _lock = None, threading.Lock()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


__all__: list[Any] = ["attend", "leave"]
