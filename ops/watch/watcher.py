"""The watcher thread, one per process: sends heartbeats, answers alarms, ends a process that cannot raise.

    every heartbeat:  beat -> store     new alarm? -> ring to a file, position of the main thread -> store
                      does this rank wait too long? -> alarm, diagnosis; it cannot raise? -> end the process

The thread sleeps between heartbeats, has a separate connection to the store, and ends with the last engine, or
with the process group.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch.distributed as dist

from .config import WatchConfig
from .diagnosis import FOR_ALL_ALARMS, RankReport, explain
from .dump import end_process, recorded, write_ring
from .reports import PATIENCE_SECONDS, REPORTED_SECONDS, Beat, ReportExchange
from .ring import Record, ThreadPosition, tensor_of_call
from .store import REPLY_SECONDS
from .stragglers import StragglerDetector
from .watch import Watch

log = logging.getLogger("xds")
# after the timeout: by then a wait that can raise has raised, even on a busy machine
OVERDUE_SECONDS = 5.0
STUCK_SECONDS = 1.0  # the same for a device's queue, which raises nothing
# before the timeout, a wait in the script's own collective is reported: its error has no diagnosis
EARLY_SECONDS = 5.0
# answers to an alarm are valid for so long: their ranks may end
FRESH_SECONDS = EARLY_SECONDS + 2.0
MAX_CPU_SHARE = 0.05  # the CPU share of a heartbeat below which a thread counts as waiting
# share of the time before a wait is reported, after which the thread is examined
LOOK_AFTER_SHARE = 0.5
FEWEST = 4  # below this number of ranks, no median says which of them is slow
MANY = 64  # above this number of ranks, the step times of all are read less often
Reports = dict[int, RankReport]


@final
@dataclass
class Request:
    """A request of the main thread for a diagnosis of all ranks."""

    report: RankReport
    answer: str = ""
    done: threading.Event = field(default_factory=threading.Event)


@final
class WatchedEngine:
    """The watcher's state for one watch. It holds the watch by a weak reference: the engine owns it."""

    def __init__(
        self, watch: Watch, group: str, timeout_seconds: float, section: WatchConfig
    ) -> None:
        self.watch = weakref.ref(watch)
        self.group = group
        self.notice_seconds = section.notice_seconds
        self.timeout_seconds = timeout_seconds
        self.beat_seconds = min(section.heartbeat_seconds, timeout_seconds / 4)
        self.store = watch.open_store()
        self.exchange: ReportExchange | None = None
        self.is_leaving = False
        self.answered = 0  # the newest alarm that was answered, and when
        self.answered_seconds = 0.0
        self.request: Request | None = None
        self.lowest_waiting = -1  # the lowest rank that answered the last alarm, if it waits
        ratio = section.straggler_ratio
        self.detector = StragglerDetector(ratio) if ratio and watch.rank == 0 else None
        self.beats = 0
        self.wakes: threading.Event | None = None

    def diagnose(self, report: RankReport) -> str:
        request = self.request = Request(report)
        assert self.wakes is not None
        self.wakes.set()
        if request.done.wait(REPORTED_SECONDS):
            return request.answer
        return explain([report], self.watch_size) + " (the store of the group does not answer)"

    @property
    def watch_size(self) -> int:
        watch = self.watch()
        return 0 if watch is None else watch.world_size


@final
class Stall:
    """How long a value has not changed. Time in which this process was stopped does not count."""

    def __init__(self) -> None:
        self._what: object = None
        self.seconds = 0.0
        self.is_reported = False

    def update(self, what: object, elapsed_seconds: float) -> float:
        """Compare `what` with the last value. None means that nothing waits. Returns the seconds."""
        if what is None or what != self._what:
            self._what, self.seconds, self.is_reported = what, 0.0, False
        else:
            self.seconds += elapsed_seconds
        return self.seconds


@final
class Watcher:
    """The watcher thread and the engines that it watches."""

    def __init__(self) -> None:
        self._beat_seconds = 0.0  # the shortest of the engines
        self._engines: list[WatchedEngine] = []
        self._wakes = threading.Event()
        self._wait_stall, self._own_stall, self._device_stall = Stall(), Stall(), Stall()
        self._idle_stall = Stall()
        self._cpu_seconds = 0.0
        self._host = socket.gethostname()
        self._thread = _Thread(self)

    def add(self, entry: WatchedEngine) -> None:
        entry.wakes = self._wakes
        self._engines.append(entry)
        self._wakes.set()  # its heartbeat may be shorter
        if not self._thread.is_alive():
            self._thread.start()

    def remove(self, watch: Watch) -> None:
        """Stop watching `watch`. Returns when its connection is closed. The last call also ends the thread."""
        for entry in list(self._engines):
            if entry.watch() is watch:
                entry.is_leaving = True
        self._wakes.set()
        deadline = time.monotonic() + REPLY_SECONDS
        while time.monotonic() < deadline and self._thread.is_alive():
            if not any(entry.watch() is watch for entry in self._engines):
                break
            time.sleep(0.002)
        if not self._engines:
            self._thread.join(REPLY_SECONDS)

    def end(self) -> None:
        """End the thread before the process exits. A later return from the store would abort the process."""
        for entry in list(self._engines):
            entry.is_leaving = True
        self._wakes.set()
        self._thread.join(REPLY_SECONDS)

    @property
    def is_over(self) -> bool:
        return not self._engines

    # -- in the thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until no engine is left, or the process group has ended."""
        last_seconds = time.monotonic()
        while True:
            now = time.monotonic()
            # a longer time than 1.5 heartbeats means that this process did not run
            elapsed = min(now - last_seconds, 1.5 * self._beat_seconds)
            last_seconds = now
            for entry in list(self._engines):
                entry.is_leaving |= not dist.is_initialized()
                self._attend(entry)
            with _lock:
                if not self._engines:
                    return
                self._beat_seconds = min(entry.beat_seconds for entry in self._engines)
            self._look_for_stalls(elapsed)
            self._wakes.wait(self._beat_seconds)
            self._wakes.clear()

    def _attend(self, entry: WatchedEngine) -> None:
        watch = entry.watch()
        try:
            if watch is None or entry.is_leaving:
                self._drop(entry)
                return
            if entry.exchange is None:
                assert entry.store is not None
                store, entry.store = entry.store.own_connection(), None
                entry.exchange = ReportExchange(store, watch.rank, watch.world_size, watch.engine)
            exchange = entry.exchange
            exchange.beat(Beat(time.time(), self._host, watch.steps.totals()))
            if entry.request is not None:
                self._serve(entry, watch, entry.request)
            number = exchange.alarm()
            if number > entry.answered:
                self._gather(entry, watch, number)
            self._compare(entry, exchange)
        except RuntimeError:  # the store is not reachable, so the run is ending
            self._fail(entry)

    def _drop(self, entry: WatchedEngine) -> None:
        try:
            if entry.exchange is not None:
                watch = entry.watch()
                if watch is not None:
                    entry.exchange.answer(watch.report(left=True, alarm=FOR_ALL_ALARMS))
                entry.exchange.beat(Beat(time.time(), left=True))
        except RuntimeError:
            pass
        entry.exchange = None
        self._engines.remove(entry)

    def _fail(self, entry: WatchedEngine) -> None:
        request, watch = entry.request, entry.watch()
        if watch is not None:
            watch.diagnoser = None  # from now on the watch collects reports itself
        if request is not None and not request.done.is_set():
            request.answer = explain([request.report], entry.watch_size)
            request.done.set()
        self._engines.remove(entry)

    def _serve(self, entry: WatchedEngine, watch: Watch, request: Request) -> None:
        """Serve a failed wait of the main thread: publish its report, raise an alarm, collect all reports."""
        exchange, entry.request = entry.exchange, None
        assert exchange is not None
        exchange.publish(request.report)
        number = exchange.alarm()
        if number != entry.answered or time.monotonic() - entry.answered_seconds > FRESH_SECONDS:
            number = max(number, entry.answered + 1)
            exchange.raise_alarm(number)
        entry.answered, entry.answered_seconds = number, time.monotonic()
        write_ring(watch, request.report)
        deadline = time.monotonic() + PATIENCE_SECONDS
        reports = exchange.collect(request.report, deadline, number)
        request.answer = _explained(exchange, reports, watch.places)
        exchange.wait_for_readers(reports, deadline, number)
        request.done.set()

    def _gather(self, entry: WatchedEngine, watch: Watch, number: int) -> str:
        """Answer an alarm with this rank's position. The lowest rank that answers logs the diagnosis."""
        exchange = entry.exchange
        assert exchange is not None
        entry.answered, entry.answered_seconds = number, time.monotonic()
        mine = self._position(entry, watch, number)
        exchange.answer(mine)
        write_ring(watch, mine)
        deadline = time.monotonic() + PATIENCE_SECONDS
        reports = exchange.collect(mine, deadline, number, stops=self._has_request)
        if self._has_request():  # a wait failed in the meantime: its error has the diagnosis
            return ""
        exchange.has_read(number)
        watch.lost = next((r.gone for r in reports.values() if r.gone is not None), watch.lost)
        lowest = min(rank for rank, report in reports.items() if not report.left)
        entry.lowest_waiting = lowest if reports[lowest].waits_in else -1  # else that rank logs it
        diagnosis = _explained(exchange, reports, watch.places)
        will_raise = bool(mine.waits_in) and watch.probe is None
        if watch.rank == lowest and not will_raise and not watch.is_failing:
            log.error("xds: %s", diagnosis)
        return diagnosis

    def _has_request(self) -> bool:
        return any(entry.request is not None for entry in self._engines)

    def _position(self, entry: WatchedEngine, watch: Watch, number: int) -> RankReport:
        """The report about this rank, made by the watcher thread."""
        for other in [watch, *(w for w in (p.watch() for p in self._engines) if w is not None)]:
            record = _waits_in(other, self._device_stall)
            if record is not None:
                return replace(other.report_wait(record), alarm=number)
        position, call = ThreadPosition(watch.thread), ""
        if position.call:
            has_moved = self._own_stall.seconds == 0.0
            call = position.call + ("" if has_moved else tensor_of_call(watch.thread))
        return replace(
            watch.report(place=position.place, call=call, own=recorded(entry.group)), alarm=number
        )

    # -- stalls -----------------------------------------------------------------------------------------

    def _look_for_stalls(self, elapsed_seconds: float) -> None:
        waiting = [
            (entry, watch) for entry in self._engines if (watch := entry.watch()) is not None
        ]
        found: tuple[WatchedEngine, Watch, tuple[Record, float, int]] | None = None
        for entry, watch in waiting:
            position = watch.position()
            if position is not None and not watch.is_failing:
                found = (entry, watch, position)
        seconds = self._wait_stall.update(found and found[2], elapsed_seconds)
        if found is not None:
            self._own_stall.update(None, 0.0)
            self._idle_stall.update(None, 0.0)
            if seconds > found[0].timeout_seconds + OVERDUE_SECONDS:
                self._end(found[0], found[1])
            elif 0 < found[0].notice_seconds < seconds and not self._wait_stall.is_reported:
                self._wait_stall.is_reported = True
                self._notice(found[0], found[1], seconds)
            return
        if not waiting:
            return
        devices = [pair for pair in waiting if pair[1].probe is not None]
        if not (devices and self._look_at_device(*devices[0], elapsed_seconds)):
            self._look_at_script(*waiting[0], elapsed_seconds)

    def _notice(self, entry: WatchedEngine, watch: Watch, seconds: float) -> None:
        """Log what this rank waits for, once for all ranks that wait."""
        diagnosis = self._raise_alarm(entry, watch)
        if diagnosis and watch.rank == entry.lowest_waiting and not watch.is_failing:
            left = entry.timeout_seconds - seconds
            log.warning(
                "xds: waiting for %.0f s (at most %.0f s more): %s", seconds, left, diagnosis
            )

    def _look_at_device(self, entry: WatchedEngine, watch: Watch, elapsed_seconds: float) -> bool:
        """Report a stuck device queue before torch's watchdog aborts the process. True: it is stuck."""
        probe = watch.probe
        assert probe is not None
        is_stuck = probe.is_stuck()
        what = (id(probe), probe.count) if is_stuck else None
        seconds = self._device_stall.update(what, elapsed_seconds)
        if not is_stuck or not watch.ring:
            return False
        if seconds > _early(entry) and not self._device_stall.is_reported:
            self._device_stall.is_reported = True
            self._raise_alarm(entry, watch)
        if seconds > entry.timeout_seconds + STUCK_SECONDS:
            self._end(entry, watch)
        return True

    def _end(self, entry: WatchedEngine, watch: Watch) -> None:
        """End the process, because the main thread is in a wait that does not raise."""
        diagnosis = self._raise_alarm(entry, watch)
        record = _waits_in(watch, self._device_stall)
        if diagnosis and not watch.is_failing and record is not None:
            called = watch.call(record.key)
            end_process(
                f"PeerError: {called} did not end on rank {watch.rank} of {watch.world_size} within "
                f"{entry.timeout_seconds:.0f} s, and cannot raise. Another rank stopped, or took a different "
                f"path through its code: {diagnosis}"
            )

    def _look_at_script(self, entry: WatchedEngine, watch: Watch, elapsed_seconds: float) -> None:
        """Report a collective of the script's own that waits too long: its error names only a socket.

        Only a thread that has been idle for most of the time is examined.
        """
        before, self._cpu_seconds = self._cpu_seconds, _cpu_seconds(watch.thread)
        is_idle = self._cpu_seconds - before < MAX_CPU_SHARE * self._beat_seconds
        idle_seconds = self._idle_stall.update(is_idle or None, elapsed_seconds)
        what = None
        if idle_seconds > LOOK_AFTER_SHARE * _early(entry):
            position = ThreadPosition(watch.thread)
            what = position.frames if position.call else None
        self._own_stall.update(what, elapsed_seconds)
        if what is not None and idle_seconds > _early(entry) and not self._own_stall.is_reported:
            if self._own_stall.seconds:  # the thread has not moved since the last check
                self._own_stall.is_reported = True
                self._raise_alarm(entry, watch)

    def _raise_alarm(self, entry: WatchedEngine, watch: Watch) -> str:
        exchange = entry.exchange
        if exchange is None:
            return ""
        try:
            number = max(exchange.alarm(), entry.answered + 1)
            if number > entry.answered:
                exchange.raise_alarm(number)
            return self._gather(entry, watch, number)
        except RuntimeError:
            self._fail(entry)
            return ""

    # -- stragglers -------------------------------------------------------------------------------------

    def _compare(self, entry: WatchedEngine, exchange: ReportExchange) -> None:
        entry.beats += 1
        is_skipped = exchange.world_size > MANY and entry.beats % 5
        if entry.detector is None or exchange.world_size < FEWEST or is_skipped:
            return
        beats = exchange.beats()
        if not beats or any(beat.left for beat in beats.values()):
            return
        for change in entry.detector.compare({rank: beat.steps for rank, beat in beats.items()}):
            text = change.message(beats[change.rank].host)
            log.log(logging.WARNING if change.is_slow else logging.INFO, "xds: %s", text)


@final
class _Thread(threading.Thread):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__(target=watcher.run, name="xds-watch", daemon=True)
        self.stop = watcher.end  # for programs that end the daemon threads that are left


def _explained(exchange: ReportExchange, reports: Reports, places: Mapping[int, str]) -> str:
    silences = exchange.silences(reports)
    return explain(list(reports.values()), exchange.world_size, silences, places)


def _early(entry: WatchedEngine) -> float:
    """The seconds after which a wait is reported whose own error has no diagnosis."""
    return entry.timeout_seconds - min(EARLY_SECONDS, entry.timeout_seconds / 4)


def _waits_in(watch: Watch, device: Stall) -> Record | None:
    """The collective that a rank waits in; on a device, the last one that has not completed."""
    if watch.waiting is not None:
        return watch.waiting[0]
    is_stuck = watch.probe is not None and device.seconds > 0 and len(watch.ring) > 0
    return watch.ring[-1] if is_stuck else None


def _cpu_seconds(thread: int) -> float:
    """CPU seconds of a thread; 0 where it has ended, because its clock must not be read then."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or thread not in [each.ident for each in threading.enumerate()]:
        return 0.0
    return time.clock_gettime(clock(thread))


# -- one per process ------------------------------------------------------------------------------------

# A process has one main thread, which waits for one engine at a time: who looks at it knows all engines.
_lock = threading.Lock()
_watcher: Watcher | None = None


def start_watching(watch: Watch, group: str, section: WatchConfig, timeout_seconds: float) -> None:
    """Let this process's watcher thread serve `watch` until `stop_watching`. Starts the thread if needed."""
    global _watcher  # noqa: PLW0603 (one thread per process)
    entry = WatchedEngine(watch, group, timeout_seconds, section)
    if entry.store is None:
        return
    watch.diagnoser = entry
    with _lock:
        if _watcher is None or _watcher.is_over:
            _watcher = Watcher()
        _watcher.add(entry)


def stop_watching(watch: Watch) -> None:
    """Undo `start_watching`."""
    watch.diagnoser = None
    if _watcher is not None:
        _watcher.remove(watch)


def _at_exit() -> None:
    if _watcher is not None:
        _watcher.end()


def _after_fork() -> None:
    global _watcher, _lock  # noqa: PLW0603
    _watcher, _lock = None, threading.Lock()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


__all__: list[Any] = ["start_watching", "stop_watching"]
