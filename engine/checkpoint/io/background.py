"""Saves in the background: the states are copied, another process writes them, a thread commits.

    step loop   prepare | copy |  step  step  step  step (or: raises the failure)  ...
    process                    |  write, sum, fsync |
    thread                     |       waits        | share parts   | rank 0 commits | share the result

The ranks communicate through the store of their group: no collective runs beside those of the training. If a
rank ends before the commit, the uncommitted folder is never loaded. At most one save runs at a time.
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

from pydantic import TypeAdapter

from ....ops.comm.collectives import Collectives
from ....ops.watch import Store
from ....utils.errors import UsageError, XdsError
from ....utils.quoting import plain_lines, printable
from ..agreement import failure_text
from ..saver import DOING, Job, Progress, Saver
from .folders import MANIFEST
from .tensor_file import Sums, copy_image, image_bytes, write_tensors
from .writer_process import WriterProcess

log = logging.getLogger("xds")
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.01, 0.2
BEAT_SECONDS = 1.0
LOST_SECONDS = 60.0  # a rank that writes updates its key once a second, however slow the disk is
_ANSWER = TypeAdapter(dict[str, Any])


@final
class Background(Saver):
    """`save` returns after the states are copied to host memory, which is held until `close`.

    If some states are on a disk (offload to NVMe), this rank's file is complete when `save` returns.
    """

    def __init__(self, keep_last: int, timeout_seconds: float, collectives: Collectives) -> None:
        """Raises UsageError: the process group has no store."""
        super().__init__(keep_last)
        if collectives.world_size > 1 and collectives.store() is None:
            raise UsageError(
                "checkpoint.async_save = true: the ranks communicate through the store of their process group, "
                "and this group has none; set it to false"
            )
        self._timeout_seconds = min(timeout_seconds, LOST_SECONDS)
        self._writer = WriterProcess()
        self._thread: threading.Thread | None = None
        self._progress: Progress | None = None
        self._failure = ""
        self._old_keys: list[
            str
        ] = []  # of the last save; every rank has read them before the next one
        self._exit: Callable[[], None] | None = None

    def save(self, job: Job) -> None:
        size_bytes, failure = 0, ""
        sums: Sums | None = None
        try:
            size_bytes = image_bytes(job.entries)
            if any(entry.blocks is not None for entry in job.entries):
                sums = write_tensors(
                    job.path, job.entries
                )  # a copy could be larger than the memory
            else:
                copy_image(job.entries, self._writer.memory(size_bytes))
        except Exception as error:  # reported like a failed write: no collective runs here
            failure = failure_text(error)
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
            args=(replace(job, entries=()), size_bytes, failure, sums),
            name="xds-checkpoint",
        )
        self._thread.start()

    # -- in the thread ----------------------------------------------------------------------------------

    def _run(self, job: Job, size_bytes: int, failure: str, sums: Sums | None) -> None:
        exchange = _StoreExchange(job, self._timeout_seconds)

        def on_written(written_bytes: int) -> None:
            self._progress = Progress(job.tag, written_bytes, size_bytes)
            exchange.beat(round(1000 * time.monotonic()))

        try:
            mine: dict[str, Any] = {"error": failure}
            try:
                if not failure:
                    sums = sums or self._writer.write(job.path, size_bytes, on_written)
                    mine = {"part": job.part_json(sums)}
            except Exception as error:
                mine = {"error": failure_text(error)}
            if job.is_first:
                failure = self._commit(job, exchange, mine)
            else:
                failure = exchange.report(mine)
        except Exception as error:
            failure = failure_text(error)
        self._progress = None
        self._failure = failure and (
            f"{DOING}, in the background: {printable(job.tag)} was not saved in "
            f"{printable(job.save_dir.absolute())}: {plain_lines(failure)}"
        )

    def _commit(self, job: Job, exchange: _StoreExchange, mine: dict[str, Any]) -> str:
        """Commit on rank 0, after every rank has written. Returns the failure, or ""."""
        answers = exchange.collect(mine)
        for key in self._old_keys:  # every rank that answered has read them
            exchange.delete(key)
        failed = [(rank, one["error"]) for rank, one in enumerate(answers) if "error" in one]
        failure = f"rank {failed[0][0]} failed: {failed[0][1]}" if failed else ""
        if not failure:
            try:
                self.finish(job, [one["part"] for one in answers])
            except Exception as error:
                failure = f"rank 0 failed: {failure_text(error)}"
        job.end(discards=bool(failure))
        self._old_keys = exchange.close(failure)
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

    def unreported_failure(self) -> str:
        """A failure that `check` has not raised yet, or ""."""
        return self._failure


def _at_exit(saver: weakref.ref[Background], pid: int) -> None:
    """Exit with code 1 if the script ends normally although its last checkpoint was not saved."""
    found = saver()
    if found is None or os.getpid() != pid or not found.unreported_failure():
        return
    print(f"xds: {found.unreported_failure()}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the only way to change the exit code this late


@final
class _StoreExchange:
    """The ranks' messages about one save, in the store of their group.

    <save>/<rank>         the rank's part of the manifest, or its failure
    <save>/<rank>/alive   a number that changes while the rank is alive
    <save>/done           the result of the save, from rank 0
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
        """Show that this rank is alive; `number` must differ from the one before."""
        now = time.monotonic()
        if self._store is not None and now - self._last_beat_seconds > BEAT_SECONDS:
            self._last_beat_seconds = now
            try:
                self._store.set(self._key(f"{self._rank}/alive"), str(number))
            except RuntimeError:
                pass  # the ranks that wait for it report it

    def collect(self, mine: dict[str, Any]) -> list[Any]:
        """Every rank's answer, in rank order; rank 0's is `mine`."""
        answers = [mine]
        for rank in range(1, self._world_size):
            answers.append(self._await(self._key(rank), rank))
            self.delete(self._key(rank))
        return answers

    def close(self, failure: str) -> list[str]:
        """Send the result. Returns the keys that other ranks may still read and that must be deleted later."""
        if self._store is None:
            return []
        with suppress(RuntimeError):  # without a store they look for the committed files
            self._store.set(self._key("done"), json.dumps({"error": failure}))
        return [self._key("done"), *(self._key(f"{r}/alive") for r in range(self._world_size))]

    def report(self, mine: dict[str, Any]) -> str:
        """Send `mine` to rank 0 and wait for the result: the failure, or ""."""
        try:
            if self._store is not None:
                self._store.set(self._key(self._rank), json.dumps(mine))
            failure: str = self._await(self._key("done"), 0)["error"]
        except RuntimeError:  # the store ended with rank 0, perhaps after the commit
            failure = "" if self._is_committed() else "rank 0 ended before it was committed"
        return failure

    def _is_committed(self) -> bool:
        folder = self._job.save_dir / self._job.tag
        return (folder / self._job.path.name).exists() and (folder / MANIFEST).exists()

    def _await(self, key: str, rank: int) -> dict[str, Any]:
        """Wait for `key` and return its value; an error if `rank` shows no sign of life."""
        assert self._store is not None
        pause_seconds = MIN_POLL_SECONDS
        seen, since = "", time.monotonic()
        while (answer := self._store.read_as(_ANSWER, key)) is None:
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, MAX_POLL_SECONDS)
            self.beat(round(1000 * time.monotonic()))  # a waiting rank is alive, too
            alive = self._store.read(self._key(f"{rank}/alive"))
            if alive is not None and alive != seen:
                seen, since = alive, time.monotonic()
            if time.monotonic() - since > self._timeout_seconds:
                return {"error": f"rank {rank} did not respond for {self._timeout_seconds:.0f} s"}
        return answer

    def delete(self, key: str) -> None:
        if self._store is not None:
            try:
                self._store.delete(key)
            except RuntimeError:
                pass  # some stores cannot
