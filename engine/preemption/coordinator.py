"""Asked to leave, all ranks save at the same step: how they agree on it, in a thread and the group's store.

`count` is how many step boundaries a rank's main thread has passed. A rank that has had the signal, or sees in
the store that another one had it, freezes: its thread posts count + 1, the next boundary it will come to, for a
main thread that is blocked in a collective as well. There the main thread waits for everybody's post.

    rank 0   ---- 7 ----[SIGTERM: posts 8]---- 8 waits: 8, 9 -> 9 ------ 9 saves, leaves
    rank 1   ---- 7 ------- 8 ----[sees it: posts 9]-------------------- 9 saves, leaves

The largest post is a boundary that every rank comes to and none has passed. Until it is reached every rank goes
on with its steps, so each collective is joined by all: nobody waits for a rank that waits for something else
than a thread. What can still go wrong ends at the deadline. The states are saved where the step ends; the
script is told when it begins the next one, so that it has written down what it writes down for a step.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final

from ...ops.comm.collectives import Collectives
from ...utils.errors import UsageError, XdsError
from ...utils.messages import write_stderr
from .signals import Signals

log = logging.getLogger("xds")
EXIT_CODE = 128 + signal.SIGTERM
POLL_SECONDS = 0.25  # how soon a rank sees that another one was asked; more from 256 ranks on
RANKS_A_SECOND = 1000  # that the store is asked by
BUSY_POLL_SECONDS = 0.01
REPEATED_SECONDS = (
    2.0  # within these the same signal again is the same request: from a launcher, and to a group
)
MARGIN_SECONDS = 2.0  # that whoever kills waits longer than the deadline
LEFT = "left"


class Saving(Protocol):
    """What is asked of an engine whose states are to be saved."""

    global_steps: int

    def save_checkpoint(self, save_dir: str) -> bool: ...
    def wait_for_checkpoint(self) -> None: ...


class Preempted(SystemExit):
    """Training was asked to stop (SIGTERM, SIGUSR1), and all states are saved. Ends a script with code 143.

    `path` is the checkpoint's folder.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.code = EXIT_CODE
        self.path = path


@final
@dataclass(eq=False)
class Participant:
    """An engine whose states are to be saved. count: boundaries of its steps that were passed."""

    engine: weakref.ref[Saving]
    save_dir: str
    seconds: float
    collectives: Collectives
    store: Any  # None: it is alone, or the store has gone
    count: int = 0

    def key(self, what: object) -> str:
        return f"xds/preemption/{self.collectives.instance}/{what}"


@final
class Coordinator:
    """Listens for one process. The first engine that lives leads: at its boundaries all are saved."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []
        self._condition = threading.Condition()
        self._signals = Signals()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._grace_file = os.environ.get("XDS_GRACE_FILE", "")
        # the request
        self._reason = ""
        self._heard: dict[int, float] = {}  # signal: when it first came to this process
        self._deadline_seconds = 0.0
        self._posted: Participant | None = None  # for whose boundaries
        self._post = 0  # this rank's
        self._is_told = False  # in the store
        self._target = 0  # the boundary to save at; 0 until it is known
        self._is_off = False  # nobody can save any more
        self._saved = ""  # where
        self._has_raised = False  # the script knows, and closes its things

    # -- called by the main thread --------------------------------------------------------------------------

    def join(self, participant: Participant) -> None:
        """From now on `participant` is saved, too."""
        with self._condition:
            self._participants = [each for each in self._participants if each.engine() is not None]
            self._check(participant)
            self._participants.append(participant)
        if len(self._participants) == 1 and not self._signals.install():
            log.warning(
                "checkpoint.preemption_save_dir: xds.initialize does not run in the main thread, so this "
                "process hears no signals; it saves when another rank does"
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="xds-preemption", daemon=True)
            self._thread.start()
            atexit.register(self._stop)  # a thread must not ask a store while the interpreter ends
        self._ask_for_grace(max(each.seconds for each in self._participants) + MARGIN_SECONDS)

    def _check(self, participant: Participant) -> None:
        setting = f'checkpoint.preemption_save_dir = "{participant.save_dir}"'
        for other in self._participants:
            if os.path.realpath(other.save_dir) == os.path.realpath(participant.save_dir):
                raise UsageError(
                    f"{setting}: another engine of this process "
                    "saves there; give each its own folder, or destroy() the other one first"
                )
            mine, others = participant.collectives, other.collectives
            if (mine.rank, mine.world_size) != (others.rank, others.world_size):
                raise UsageError(
                    f"{setting}: this engine is rank {mine.rank} of "
                    f"{mine.world_size}, another one of this process {others.rank} of {others.world_size}; "
                    "engines that are saved together need the same ranks: leave it empty for one of them"
                )

    def leave(self, participant: Participant) -> bool:
        """`participant` takes no more steps. True: it was the last, and nothing is to be waited for."""
        with self._condition:
            if participant not in self._participants:
                return not self._participants
            is_first = participant is self._leader()
            self._participants.remove(participant)
            if is_first and self._posted is not participant:
                self._set(participant, participant.collectives.rank, LEFT)
            if self._participants:
                return False
            self._signals.restore()
            if self._reason and not self._saved:
                return False  # the thread stays until the deadline
        self._stop()
        atexit.unregister(self._stop)
        self._signals.close()
        self._ask_for_grace(0)
        return True

    def _stop(self) -> None:
        """Nobody listens any more."""
        self._is_closing = True
        if self._thread is not None and self._thread.is_alive():
            self._signals.wake()
            self._thread.join()

    def boundary(self, participant: Participant) -> None:
        """A step of `participant`'s engine is over. Saves, if it is the step that was agreed on."""
        with self._condition:
            participant.count += 1
            if not self._reason or self._saved or participant is not self._leader():
                return
            while not (self._target and self._posted is participant) and not self._is_off:
                self._condition.wait(1.0)
            if self._is_off or participant.count < self._target:
                return
        begun_seconds = time.monotonic()
        self._save()
        engine = participant.engine()
        assert engine is not None  # it called
        self._saved = os.path.join(participant.save_dir, f"global_step{engine.global_steps}")
        if participant.collectives.rank == 0:
            seconds = time.monotonic() - begun_seconds
            _tell(f"{self._reason}: saved {self._saved} in {seconds:.1f} s; leaving")

    def check(self) -> None:
        """A new step begins: raises Preempted once all is saved."""
        if self._saved:
            self._has_raised = True
            raise Preempted(f"{self._reason}: all states are saved in {self._saved}", self._saved)

    def _save(self) -> None:
        """Every engine, as far as it goes; then raises what went wrong with one, the same on all ranks."""
        failures: list[XdsError] = []
        for participant in self._participants:
            engine = participant.engine()
            if engine is None:
                continue
            try:
                engine.wait_for_checkpoint()
            except XdsError as error:  # an older one: this one is another matter
                _tell(str(error))
            try:
                engine.save_checkpoint(participant.save_dir)
                engine.wait_for_checkpoint()
            except XdsError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    # -- called by the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for signum in self._signals.read(self._pause_seconds()):
                    if signum:
                        self._on_signal(signum)
                if not self._reason:
                    self._look()
                if self._reason and not self._saved:
                    self._settle()
                is_late = self._reason and time.monotonic() > self._deadline_seconds
                if is_late and not self._has_raised:
                    self._give_up("checkpoint.preemption_seconds are over")
        except Exception:  # nobody would answer a main thread that waits
            with self._condition:
                self._is_off = True
                self._condition.notify_all()
            log.exception("the thread that waits for signals has failed")

    def _pause_seconds(self) -> float:
        if self._reason and not (self._target or self._is_off):
            return BUSY_POLL_SECONDS
        leader = self._leader()
        num_ranks = leader.collectives.world_size if leader is not None else 1
        return max(POLL_SECONDS, num_ranks / RANKS_A_SECOND)

    def _on_signal(self, signum: int) -> None:
        now = time.monotonic()
        since_seconds = self._heard.setdefault(signum, now)
        if now - since_seconds > REPEATED_SECONDS and not self._has_raised:
            self._give_up("asked again")
        if not self._reason:
            leader = self._leader()
            rank = leader.collectives.rank if leader is not None else 0
            self._notice(f"{signal.Signals(signum).name} on rank {rank}")

    def _look(self) -> None:
        """Has another rank been asked?"""
        leader = self._leader()
        if leader is not None and self._has(leader, ["notice"]):
            self._notice(self._get(leader, "notice") or "a signal on another rank")

    def _notice(self, reason: str) -> None:
        """From here on the main thread waits at its next boundary."""
        with self._condition:
            longest = max((participant.seconds for participant in self._participants), default=0.0)
            self._deadline_seconds = time.monotonic() + longest
            self._reason = reason
            self._freeze()

    def _freeze(self) -> None:
        """Settle what this rank posts, for the engine that leads now."""
        leader = self._leader()
        if leader is not None and self._posted is not leader:
            self._posted, self._post, self._is_told = leader, leader.count + 1, False
            self._target, self._is_off = 0, False

    def _settle(self) -> None:
        """Post this rank's next boundary; when all have, the largest is the target."""
        with self._condition:
            self._freeze()
            leader, post, is_told = self._posted, self._post, self._is_told
            self._is_told = True
        if leader is None or self._is_off or self._target:
            return
        if not is_told:
            self._set(leader, "notice", self._reason)
            self._set(leader, leader.collectives.rank, str(post))
        target = self._agreed(leader, post)
        with self._condition:
            if target is not None and self._posted is leader:
                self._target, self._is_off = target, not target
            self._condition.notify_all()

    def _agreed(self, leader: Participant, post: int) -> int | None:
        """The largest post; None: not all are there; 0: there will be none."""
        world_size = leader.collectives.world_size
        if world_size == 1:
            return post
        if leader.store is None:
            return self._go_on("the store of the ranks does not answer")
        if not self._has(leader, list(range(world_size))):
            return None
        posts = [self._get(leader, rank) for rank in range(world_size)]
        gone = [rank for rank, each in enumerate(posts) if not each.isdecimal()]
        if gone:
            return self._go_on(f"rank {gone[0]} takes no more steps")
        return max(map(int, posts))

    def _go_on(self, why: str) -> int:
        _tell(f"{self._reason}: {why}, so nothing can be saved; going on until the deadline")
        return 0

    def _give_up(self, why: str) -> NoReturn:
        """The main thread may be blocked for good: only this ends the process."""
        saved = f"saved in {self._saved}" if self._saved else "nothing saved"
        _tell(f"{self._reason}: {why}, {saved}; leaving with code {EXIT_CODE}")
        os._exit(EXIT_CODE)

    # -- both -----------------------------------------------------------------------------------------------

    def _leader(self) -> Participant | None:
        return next(
            (participant for participant in self._participants if participant.engine() is not None),
            None,
        )

    def _set(self, participant: Participant, what: object, value: str) -> None:
        if participant.store is not None:
            try:
                participant.store.set(participant.key(what), value)
            except RuntimeError:
                participant.store = None

    def _has(self, participant: Participant, what: list[Any]) -> bool:
        if participant.store is not None:
            try:
                return bool(participant.store.check([participant.key(each) for each in what]))
            except RuntimeError:
                participant.store = None
        return False

    def _get(self, participant: Participant, what: object) -> str:
        try:
            return (
                str(participant.store.get(participant.key(what)).decode())
                if participant.store is not None
                else ""
            )
        except RuntimeError:
            participant.store = None
            return ""

    def _ask_for_grace(self, seconds: float) -> None:
        """Tell the launcher how long it should wait before it kills; 0 takes it back."""
        if not self._grace_file:
            return
        part = f"{self._grace_file}.{os.getpid()}"
        try:
            if seconds:
                with open(part, "w") as file:
                    file.write(f"{seconds:g}")
                os.replace(part, self._grace_file)
            else:
                os.unlink(self._grace_file)
        except OSError as error:
            log.debug("XDS_GRACE_FILE: %s", error)


def _tell(text: str) -> None:
    """Nobody may read: the save and the end come first."""
    write_stderr(f"xds: {text}\n")
