"""After a signal to stop any rank, all ranks save a checkpoint at the same step and exit.

The small message that every step sends anyway carries one bit more: this rank was asked to stop. A step in
which some rank said so is the last one.

    rank 0   ---- 7 ----[SIGTERM]---- 8 says so -> saves, exits
    rank 1   ---- 7 ----------------- 8 reads it -> saves, exits

- Python runs a signal handler between two instructions of the main thread. A rank that waits in a collective
  handles its signal after it. The launcher ends a rank that waits forever, after `preemption_seconds`.
- All engines of a process are saved together, at the end of a step of the first one. Where that one takes no
  step for half of `preemption_seconds`, a step of any engine is the last one.
- `Preempted` is raised when the script begins the next step, so that it can log and record the finished one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any, NoReturn, final

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError, XdsError
from ..utils.messages import write_stderr
from ..utils.quoting import plain_lines
from ..utils.small_files import replace_small_file
from ..zero.core.reduction import StepStatus
from .config.sections import Checkpoint
from .parts import Preemption, Saving

log = logging.getLogger("xds")
EXIT_CODE = 128 + signal.SIGTERM
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: usually sent by Slurm's --signal
# The same signal within this time is the same request: the launcher and the process group both deliver it.
REPEATED_SECONDS = 2.0
MARGIN_SECONDS = 2.0  # the launcher kills this long after the deadline


class Preempted(SystemExit):
    """A signal (SIGTERM, SIGUSR1) stopped training, and all states are saved. The script exits with code 143.

    `path` is the checkpoint's folder.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.code = EXIT_CODE
        self.path = path


@final
class SaveOnPreemption(Preemption):
    """After a signal to any rank, all ranks save at the same step and exit."""

    def __init__(self, section: Checkpoint, collectives: Collectives) -> None:
        self.save_dir = section.preemption_save_dir
        self.seconds = section.preemption_seconds
        self.collectives = collectives
        self.engine: weakref.ref[Saving] | None = None
        self._reason = ""  # since a step in which a rank said that it was asked to stop

    def begin(self, engine: Saving) -> None:
        self.engine = weakref.ref(engine)
        _signals.join(self)

    @property
    def is_asked(self) -> bool:  # type: ignore[override]
        """This rank got a signal, and the steps of this engine decide."""
        return bool(_signals.name) and (_signals.leader() is self or _signals.is_half_over())

    def agree(self, status: StepStatus) -> None:
        asked = status.stops
        if any(asked):
            name = _signals.name or "a signal to stop"
            self._reason = f"{name} on rank {asked.index(True)}"

    def boundary(self) -> None:
        if not self._reason or _signals.saved:
            return
        begun_seconds = time.monotonic()
        self._save()
        engine = self._engine()
        _signals.saved = os.path.join(self.save_dir, f"global_step{engine.global_steps}")
        _signals.reason = self._reason
        if self.collectives.rank == 0:
            seconds = time.monotonic() - begun_seconds
            _report(f"{self._reason}: saved {_signals.saved} in {seconds:.1f} s; exiting")

    def _save(self) -> None:
        """Save every engine. Then raise the first failure, which is the same on all ranks."""
        failures: list[XdsError] = []
        for other in _signals.participants():
            engine = other._engine()
            try:
                engine.wait_for_checkpoint()
            except XdsError as error:  # the failure of an earlier save does not prevent this one
                _report(str(error))
            try:
                engine.save_checkpoint(other.save_dir, client_state=engine.last_client_state)
                engine.wait_for_checkpoint()
            except XdsError as error:
                failures.append(error)
        if failures:
            self._reason = ""
            raise failures[0]

    def _engine(self) -> Saving:
        engine = None if self.engine is None else self.engine()
        assert engine is not None, "it calls this, or participates"
        return engine

    def check(self) -> None:
        if _signals.saved:
            _signals.has_raised = True
            raise Preempted(
                f"{_signals.reason}: all states are saved in {_signals.saved}", _signals.saved
            )

    def end(self) -> None:
        _signals.remove(self)


@final
class _Signals:
    """The signal handlers of this process, and its engines that save. The former handlers are called as well.

    A signal that is ignored, as under nohup, stays ignored. In forked children the former handlers act.
    """

    def __init__(self) -> None:
        self._joined: list[SaveOnPreemption] = []
        self._former: dict[int, Any] = {}
        self._process = 0  # whose handlers they are
        self._deadline: threading.Timer | None = None
        self._forget()

    def _forget(self) -> None:
        """No signal has come. A deadline of an earlier request does not end what runs now."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._received: dict[int, float] = {}  # signal: when this process first received it
        self._handling: set[int] = set()
        self.name = ""  # of the first signal
        self.saved = ""  # the checkpoint's folder
        self.reason = ""
        self.has_raised = False  # the script got Preempted and cleans up

    def participants(self) -> list[SaveOnPreemption]:
        """Those whose engines live, in the order of their creation: the same ones on all ranks."""
        gc.collect()  # an engine is in a reference cycle; ranks collect at different times
        return [one for one in self._joined if one.engine is not None and one.engine() is not None]

    def leader(self) -> SaveOnPreemption | None:
        """Whose steps decide when all are saved."""
        return next(iter(self.participants()), None)

    def is_half_over(self) -> bool:
        """Half of the time to save has passed since the first signal."""
        longest = max((one.seconds for one in self._joined), default=0.0)
        return time.monotonic() - min(self._received.values()) > longest / 2

    def join(self, new: SaveOnPreemption) -> None:
        """Save the engine of `new` as well. The first one installs the handlers.

        A request that came too late for the engines before is one to this engine.
        """
        self._joined = self.participants()
        self._check(new)
        if not self._joined:
            if self.saved or not self.name:
                self._forget()
            self._install()
        self._joined.append(new)
        self._write_grace(max(one.seconds for one in self._joined) + MARGIN_SECONDS)

    def _check(self, new: SaveOnPreemption) -> None:
        setting = f'checkpoint.preemption_save_dir = "{new.save_dir}"'
        for other in self._joined:
            if os.path.realpath(other.save_dir) == os.path.realpath(new.save_dir):
                raise UsageError(
                    f"{setting}: another engine of this process "
                    "saves there; give each its own folder, or destroy() the other one first"
                )
            mine, others = new.collectives, other.collectives
            if (mine.rank, mine.world_size) != (others.rank, others.world_size):
                raise UsageError(
                    f"{setting}: this engine is rank {mine.rank} of "
                    f"{mine.world_size}, another one of this process {others.rank} of {others.world_size}; "
                    "engines that are saved together need the same ranks: leave it empty for one of them"
                )

    def remove(self, old: SaveOnPreemption) -> None:
        """The engine of `old` takes no more steps. The last one restores the former handlers."""
        if old not in self._joined:
            return
        self._joined.remove(old)
        if not self.participants():
            self._restore()
            self._write_grace(0)

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "checkpoint.preemption_save_dir: xds.initialize does not run in the main thread, so this "
                "process does not receive signals; it saves when another rank does"
            )
            return
        self._process = os.getpid()
        for signum in STOP_SIGNALS:
            former = signal.getsignal(signum)
            if former == self._handle:  # of an engine that was dropped without `destroy`
                continue
            if former is not signal.SIG_IGN and former is not None:  # None: it belongs to C code
                self._former[signum] = former
                signal.signal(signum, self._handle)

    def _restore(self) -> None:
        """Restore the former handlers, except where other code has installed its own since."""
        with contextlib.suppress(ValueError):  # not the main thread: `_handle` acts like the former
            for signum, former in self._former.items():
                if signal.getsignal(signum) == self._handle:
                    signal.signal(signum, former)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # a handler of the script, which is former to this one, calls it
        if signum in self._handling:
            return
        self._handling.add(signum)
        try:
            self._act(signum, frame)
        finally:
            self._handling.discard(signum)

    def _act(self, signum: int, frame: FrameType | None) -> None:
        former = self._former[signum]
        counts = os.getpid() == self._process and bool(self.participants())
        if callable(former):
            former(signum, frame)
        elif not counts:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if counts:
            self._receive(signum)

    def _receive(self, signum: int) -> None:
        now = time.monotonic()
        since_seconds = self._received.setdefault(signum, now)
        if now - since_seconds > REPEATED_SECONDS and not self.has_raised:
            self._give_up("the signal came again")
        if not self.name:
            self.name = signal.Signals(signum).name
            longest = max(one.seconds for one in self._joined)
            self._deadline = threading.Timer(longest, self._end_late)
            self._deadline.daemon = True
            self._deadline.start()

    def _end_late(self) -> None:
        if self.participants() and not self.has_raised:
            self._give_up("checkpoint.preemption_seconds are over")

    def _give_up(self, why: str) -> NoReturn:
        """End the process: its main thread may be blocked forever."""
        saved = f"saved in {self.saved}" if self.saved else "nothing saved"
        _report(f"{self.name}: {why}, {saved}; exiting with code {EXIT_CODE}")
        os._exit(EXIT_CODE)

    def _write_grace(self, seconds: float) -> None:
        """Write for the launcher how long it must wait before it kills; 0 removes the file."""
        path = os.environ.get("XDS_GRACE_FILE", "")
        if not path:
            return
        try:
            if seconds:
                replace_small_file(path, f"{seconds:g}")
            else:
                os.unlink(path)
        except OSError as error:
            log.debug("XDS_GRACE_FILE: %s", error)


_signals = _Signals()  # signal handlers belong to the process


def _report(text: str) -> None:
    """Nobody may read: the save and the end come first."""
    write_stderr(f"xds: {plain_lines(text)}\n")


__all__ = ["Preempted", "SaveOnPreemption"]
