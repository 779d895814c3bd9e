"""After a signal to stop, all ranks save at the same step. A thread and the group's store agree on the step.

`count` is the number of step boundaries that a rank's main thread has passed. A rank that received the signal,
or reads in the store that another rank did, posts count + 1: the next boundary it will reach. Its thread posts,
so this also works while the main thread is blocked in a collective. At that boundary the main thread waits for
the posts of all ranks.

    rank 0   ---- 7 ----[SIGTERM: posts 8]---- 8 waits: 8, 9 -> 9 ------ 9 saves, exits
    rank 1   ---- 7 ------- 8 ----[sees it: posts 9]-------------------- 9 saves, exits

The largest post is a boundary that every rank reaches and none has passed. Until then every rank continues its
steps, so all ranks join each collective, and no main thread waits for another main thread. The deadline bounds
every other failure. The states are saved at the end of the step. `Preempted` is raised when the script begins
the next step, so that the script can first log and record the finished one.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, final

from ...ops.comm.collectives import Collectives
from ...ops.watch import Store
from ...utils.errors import UsageError, XdsError
from ...utils.messages import write_stderr
from ...utils.quoting import printable
from .signals import Signals

log = logging.getLogger("xds")
EXIT_CODE = 128 + signal.SIGTERM
POLL_SECONDS = (
    0.25  # between two looks into the store for another rank's signal; more from 256 ranks on
)
RANKS_A_SECOND = 1000  # that poll the store
BUSY_POLL_SECONDS = 0.01
# The same signal within this time is the same request: the launcher and the process group both deliver it.
REPEATED_SECONDS = 2.0
MARGIN_SECONDS = 2.0  # the launcher kills this long after the deadline
LEFT = "left"
_POST = re.compile("[0-9]{1,18}")


class Saving(Protocol):
    """The part of an engine that is needed to save its states."""

    global_steps: int

    def save_checkpoint(self, save_dir: str) -> bool: ...
    def wait_for_checkpoint(self) -> None: ...


class Preempted(SystemExit):
    """A signal (SIGTERM, SIGUSR1) stopped training, and all states are saved. The script exits with code 143.

    `path` is the checkpoint's folder.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.code = EXIT_CODE
        self.path = path


@final
@dataclass(eq=False)
class Participant:
    """An engine whose states are to be saved. count: step boundaries that it has passed."""

    engine: weakref.ref[Saving]
    save_dir: str
    seconds: float
    collectives: Collectives
    store: Store | None  # None: there is one rank, or the store does not answer any more
    count: int = 0
    posts: list[str] = field(default_factory=list)  # of the first ranks, as far as they are known

    def key(self, what: object) -> str:
        return f"xds/preemption/{self.collectives.instance}/{what}"


@final
class Coordinator:
    """Handles the signals of one process. All engines are saved at boundaries of the first live engine."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []
        self._condition = threading.Condition()
        self._signals = Signals()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._grace_file = os.environ.get("XDS_GRACE_FILE", "")
        # the request
        self._reason = ""
        self._received: dict[int, float] = {}  # signal: when this process first received it
        self._deadline_seconds = 0.0
        self._leading: Participant | None = None  # whose boundaries `_post` and `_target` count
        self._post = 0  # this rank's
        self._is_posted = False  # in the store
        self._target = 0  # the boundary to save at; 0 until it is known
        self._is_off = False  # saving is not possible any more
        self._saved = ""  # the checkpoint's folder
        self._has_raised = False  # the script got Preempted and cleans up

    # -- called by the main thread --------------------------------------------------------------------------

    def join(self, participant: Participant) -> None:
        """Save `participant` from now on, too."""
        with self._condition:
            self._participants = [each for each in self._participants if each.engine() is not None]
            self._check(participant)
            self._participants.append(participant)
        if len(self._participants) == 1 and not self._signals.install():
            log.warning(
                "checkpoint.preemption_save_dir: xds.initialize does not run in the main thread, so this "
                "process does not receive signals; it saves when another rank does"
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="xds-preemption", daemon=True)
            self._thread.start()
            atexit.register(self._stop)  # a thread must not use a store while the interpreter exits
        self._write_grace(max(each.seconds for each in self._participants) + MARGIN_SECONDS)

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
        """`participant` takes no more steps. True: it was the last, and no save is pending."""
        with self._condition:
            if participant not in self._participants:
                return not self._participants
            is_first = participant is self._leader()
            self._participants.remove(participant)
            if is_first and self._leading is not participant:
                self._set(participant, participant.collectives.rank, LEFT)
            if self._participants:
                return False
            self._signals.restore()
            if self._reason and not self._saved:
                return False  # the thread stays until the deadline
        self._stop()
        atexit.unregister(self._stop)
        self._signals.close()
        self._write_grace(0)
        return True

    def _stop(self) -> None:
        """Stop the thread."""
        self._is_closing = True
        if self._thread is not None and self._thread.is_alive():
            self._signals.wake()
            self._thread.join()

    def boundary(self, participant: Participant) -> None:
        """A step of `participant`'s engine has ended. Save if the ranks agreed on this step."""
        with self._condition:
            participant.count += 1
            if not self._reason or self._saved or participant is not self._leader():
                return
            while not (self._target and self._leading is participant) and not self._is_off:
                self._condition.wait(1.0)
            if self._is_off or participant.count < self._target:
                return
        begun_seconds = time.monotonic()
        self._save()
        engine = participant.engine()
        assert engine is not None  # it called this method
        self._saved = os.path.join(participant.save_dir, f"global_step{engine.global_steps}")
        if participant.collectives.rank == 0:
            seconds = time.monotonic() - begun_seconds
            _report(f"{self._reason}: saved {self._saved} in {seconds:.1f} s; exiting")

    def check(self) -> None:
        """A new step begins. Raises Preempted if all states are saved."""
        if self._saved:
            self._has_raised = True
            raise Preempted(f"{self._reason}: all states are saved in {self._saved}", self._saved)

    def _save(self) -> None:
        """Save every engine. Then raise the first failure, which is the same on all ranks."""
        failures: list[XdsError] = []
        for participant in self._participants:
            engine = participant.engine()
            if engine is None:
                continue
            try:
                engine.wait_for_checkpoint()
            except XdsError as error:  # the failure of an earlier save does not prevent this one
                _report(str(error))
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
                    self._check_other_ranks()
                if self._reason and not self._saved:
                    self._agree()
                is_late = self._reason and time.monotonic() > self._deadline_seconds
                if is_late and not self._has_raised:
                    self._give_up("checkpoint.preemption_seconds are over")
        except Exception:  # the main thread may wait for this thread: wake it
            with self._condition:
                self._is_off = True
                self._condition.notify_all()
            log.exception("the thread that waits for signals failed")

    def _pause_seconds(self) -> float:
        if self._reason and not (self._target or self._is_off):
            return BUSY_POLL_SECONDS
        leader = self._leader()
        num_ranks = leader.collectives.world_size if leader is not None else 1
        return max(POLL_SECONDS, num_ranks / RANKS_A_SECOND)

    def _on_signal(self, signum: int) -> None:
        now = time.monotonic()
        since_seconds = self._received.setdefault(signum, now)
        if now - since_seconds > REPEATED_SECONDS and not self._has_raised:
            self._give_up("the signal came again")
        if not self._reason:
            leader = self._leader()
            rank = leader.collectives.rank if leader is not None else 0
            self._request(f"{signal.Signals(signum).name} on rank {rank}")

    def _check_other_ranks(self) -> None:
        """Look in the store for a signal that another rank received."""
        leader = self._leader()
        notice = self._read(leader, "notice") if leader is not None else None
        if notice is not None:
            self._request(printable(notice) or "a signal on another rank")

    def _request(self, reason: str) -> None:
        """From now on the main thread waits at its next boundary."""
        with self._condition:
            longest = max((participant.seconds for participant in self._participants), default=0.0)
            self._deadline_seconds = time.monotonic() + longest
            self._reason = reason
            self._fix_post()

    def _fix_post(self) -> None:
        """Fix this rank's post for the engine that leads now."""
        leader = self._leader()
        if leader is not None and self._leading is not leader:
            self._leading, self._post, self._is_posted = leader, leader.count + 1, False
            self._target, self._is_off = 0, False

    def _agree(self) -> None:
        """Post this rank's next boundary. Once all ranks have posted, the largest post is the target."""
        with self._condition:
            self._fix_post()
            leader, post, is_posted = self._leading, self._post, self._is_posted
            self._is_posted = True
        if leader is None or self._is_off or self._target:
            return
        if not is_posted:
            self._set(leader, "notice", self._reason)
            self._set(leader, leader.collectives.rank, str(post))
        target = self._agreed(leader, post)
        with self._condition:
            if target is not None and self._leading is leader:
                self._target, self._is_off = target, not target
            self._condition.notify_all()

    def _agreed(self, leader: Participant, post: int) -> int | None:
        """The largest post; None: some are missing still; 0: the ranks cannot agree."""
        world_size = leader.collectives.world_size
        if world_size == 1:
            return post
        if leader.store is None:
            return self._go_on("the store of the ranks does not answer")
        posts = leader.posts  # each is read once: it does not change
        while len(posts) < world_size:
            found = self._read(leader, len(posts))
            if found is None:
                return None
            posts.append(found)
        gone = [rank for rank, each in enumerate(posts) if not _POST.fullmatch(each)]
        if gone:
            return self._go_on(f"rank {gone[0]} takes no more steps")
        return max(map(int, posts))

    def _go_on(self, why: str) -> int:
        _report(f"{self._reason}: {why}, so nothing can be saved; continuing until the deadline")
        return 0

    def _give_up(self, why: str) -> NoReturn:
        """End the process from this thread: the main thread may be blocked forever."""
        saved = f"saved in {self._saved}" if self._saved else "nothing saved"
        _report(f"{self._reason}: {why}, {saved}; exiting with code {EXIT_CODE}")
        os._exit(EXIT_CODE)

    # -- called by both -------------------------------------------------------------------------------------

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

    def _read(self, participant: Participant, what: object) -> str | None:
        if participant.store is not None:
            try:
                return participant.store.read(participant.key(what))
            except RuntimeError:
                participant.store = None
        return None

    def _write_grace(self, seconds: float) -> None:
        """Write for the launcher how long it must wait before it kills; 0 removes the file."""
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


def _report(text: str) -> None:
    """Nobody may read: the save and the end come first."""
    write_stderr(f"xds: {text}\n")
