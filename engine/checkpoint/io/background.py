"""Saving while training goes on: the states are copied, another process writes, a thread sees to the commit.

    step loop   prepare | copy |  step  step  step  step (or: raises what went wrong)  ...
    process                    |  write, sum, fsync |
    thread                     |       waits        | tell the others | rank 0 commits | all know

The ranks meet in the store of their group: no collective runs beside those of the training. A rank that ends
before the commit leaves a folder that is never loaded. At most one save is under way.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

from ....ops.comm.collectives import Collectives
from ....ops.watch import Store
from ....utils.errors import UsageError, XdsError
from ....utils.quoting import printable
from ..saver import DOING, Job, Progress, Saver
from .folders import MANIFEST
from .tensor_file import copy_image, image_bytes
from .writer_process import WriterProcess

log = logging.getLogger("xds")
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.01, 0.2
BEAT_SECONDS = 1.0
LOST_SECONDS = 60.0  # a process that writes is heard once a second, however slow the disk is


@final
class Background(Saver):
    """`save` returns when the states are copied to host memory, which stays taken until `close`."""

    def __init__(self, keep_last: int, timeout_seconds: float, collectives: Collectives) -> None:
        """Raises UsageError: the ranks have no store to meet in."""
        super().__init__(keep_last)
        if collectives.world_size > 1 and collectives.store() is None:
            raise UsageError(
                "checkpoint.async_save = true: the ranks meet in the store of their process group, and this "
                "one has none; set it to false"
            )
        self._timeout_seconds = min(timeout_seconds, LOST_SECONDS)
        self._writer = WriterProcess()
        self._thread: threading.Thread | None = None
        self._progress: Progress | None = None
        self._failure = ""
        self._old_keys: list[str] = []  # of the last save: by the next every rank has read them
        self._exit: Callable[[], None] | None = None

    def save(self, job: Job) -> None:
        size_bytes, failure = 0, ""
        try:
            size_bytes = image_bytes(job.entries)
            copy_image(job.entries, self._writer.memory(size_bytes))
        except Exception as error:  # told like a write that fails: nobody waits for it here
            failure = _said(error)
        except BaseException:
            job.end(discards=True)
            raise
        self._progress = Progress(job.tag, 0, size_bytes)
        if self._exit is None:
            self._exit = partial(_at_exit, weakref.ref(self), os.getpid())
            atexit.register(self._exit)
        # not a daemon: the interpreter waits for it before it ends
        self._thread = threading.Thread(
            target=self._run,
            args=(replace(job, entries=()), size_bytes, failure),
            name="xds-checkpoint",
        )
        self._thread.start()

    # -- in the thread ----------------------------------------------------------------------------------

    def _run(self, job: Job, size_bytes: int, failure: str) -> None:
        meeting = _Meeting(job, self._timeout_seconds)

        def on_written(written_bytes: int) -> None:
            self._progress = Progress(job.tag, written_bytes, size_bytes)
            meeting.beat(round(1000 * time.monotonic()))

        try:
            mine: dict[str, Any] = {"error": failure}
            try:
                if not failure:
                    mine = {"told": job.told(self._writer.write(job.path, size_bytes, on_written))}
            except Exception as error:
                mine = {"error": _said(error)}
            if job.is_first:
                failure = self._commit(job, meeting, mine)
            else:
                failure = meeting.report(mine)
        except Exception as error:
            failure = _said(error)
        self._progress = None
        self._failure = (
            failure and f"{DOING}, in the background: {printable(job.tag)} was not saved: {failure}"
        )

    def _commit(self, job: Job, meeting: _Meeting, mine: dict[str, Any]) -> str:
        """Rank 0, once every rank has written. What went wrong, or ""."""
        answers = meeting.collect(mine)
        for key in self._old_keys:  # who answered has read them
            meeting.forget(key)
        failed = [(rank, one["error"]) for rank, one in enumerate(answers) if "error" in one]
        failure = f"rank {failed[0][0]} failed: {failed[0][1]}" if failed else ""
        if not failure:
            try:
                self.finish(job, [one["told"] for one in answers])
            except Exception as error:
                failure = f"rank 0 failed: {_said(error)}"
        job.end(discards=bool(failure))
        self._old_keys = meeting.close(failure)
        return failure

    # -- in the step loop -------------------------------------------------------------------------------

    def check(self) -> None:
        if self._failure:
            failure, self._failure = self._failure, ""
            raise XdsError(failure)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def progress(self) -> Progress | None:
        return self._progress

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.close()
            if self._exit is not None:
                atexit.unregister(self._exit)

    def last_words(self) -> str:
        """A failure that nobody was told of."""
        return self._failure


def _at_exit(saver: weakref.ref[Background], pid: int) -> None:
    """A script that ends well although its last checkpoint is not there must not look so."""
    found = saver()
    if found is None or os.getpid() != pid or not found.last_words():
        return
    print(f"xds: {found.last_words()}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # nothing else changes the exit code this late


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, XdsError) else f"{type(error).__name__}: {error}"


@final
class _Meeting:
    """What the ranks tell each other about one save, through a store.

    <save>/<rank>         how it ended there
    <save>/<rank>/alive   a number that changes as long as the rank is there
    <save>/done           rank 0's last word
    """

    def __init__(self, job: Job, timeout_seconds: float) -> None:
        self._job = job
        self._rank = job.collectives.rank
        self._world_size = job.collectives.world_size
        self._timeout_seconds = timeout_seconds
        self._name = f"checkpoint/{job.folder.name}"
        self._store: Store | None = job.collectives.store()
        self._last_beat_seconds = 0.0

    def _key(self, what: object) -> str:
        return f"{self._name}/{what}"

    def beat(self, number: int) -> None:
        """Any other number than before says: this rank is there."""
        now = time.monotonic()
        if self._store is not None and now - self._last_beat_seconds > BEAT_SECONDS:
            self._last_beat_seconds = now
            try:
                self._store.set(self._key(f"{self._rank}/alive"), str(number))
            except RuntimeError:
                pass  # whoever misses it will say so

    def collect(self, mine: dict[str, Any]) -> list[Any]:
        """Every rank's answer, in rank order; rank 0's is `mine`."""
        answers = [mine]
        for rank in range(1, self._world_size):
            answers.append(self._await(self._key(rank), rank))
            self.forget(self._key(rank))
        return answers

    def close(self, failure: str) -> list[str]:
        """Tell the others. The keys that they may be reading still: a store waits for one that is gone."""
        if self._store is None:
            return []
        with suppress(RuntimeError):  # without a store they look for themselves
            self._store.set(self._key("done"), json.dumps({"error": failure}))
        return [self._key("done"), *(self._key(f"{r}/alive") for r in range(self._world_size))]

    def report(self, mine: dict[str, Any]) -> str:
        """Tell rank 0, wait for its last word: what went wrong, or ""."""
        try:
            if self._store is not None:
                self._store.set(self._key(self._rank), json.dumps(mine))
            failure: str = self._await(self._key("done"), 0)["error"]
        except RuntimeError:  # the store went with rank 0, which may have been done
            failure = "" if self._is_committed() else "rank 0 ended before it was committed"
        return failure

    def _is_committed(self) -> bool:
        folder = self._job.save_dir / self._job.tag
        return (folder / self._job.path.name).exists() and (folder / MANIFEST).exists()

    def _await(self, key: str, rank: int) -> Any:
        """What `key` says, as soon as it is there."""
        assert self._store is not None
        pause_seconds = MIN_POLL_SECONDS
        seen, since = b"", time.monotonic()
        while not self._store.check([key]):
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, MAX_POLL_SECONDS)
            self.beat(round(1000 * time.monotonic()))  # who waits is heard as well
            alive = self._alive(rank)
            if alive != seen:
                seen, since = alive, time.monotonic()
            if time.monotonic() - since > self._timeout_seconds:
                return {"error": f"rank {rank} was not heard for {self._timeout_seconds:.0f} s"}
        return json.loads(self._store.get(key))

    def _alive(self, rank: int) -> bytes:
        assert self._store is not None
        key = self._key(f"{rank}/alive")
        return self._store.get(key) if self._store.check([key]) else b""

    def forget(self, key: str) -> None:
        if self._store is not None:
            try:
                self._store.delete_key(key)
            except RuntimeError:
                pass  # some stores cannot
