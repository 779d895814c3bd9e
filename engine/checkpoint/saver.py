"""Writes a prepared checkpoint: at once, or in the background from a copy of the states.

    at once          write, sum, fsync |  share parts  |  rank 0 commits
    in background    copy | step  step  step  step (or: raises the failure)  ...
          thread          |  write, sum, fsync  |  share parts  |  rank 0 commits  |  share the result

In the background the ranks communicate through the store of their group: no collective runs beside those of
the training. If a rank ends before the commit, the uncommitted folder is never loaded. At most one save runs at
a time.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from pydantic import TypeAdapter
from torch import Tensor

from ...offload.pinned import host_memory
from ...ops.comm.collectives import Collectives
from ...ops.mesh import Mesh
from ...ops.watch.store import Store
from ...utils.errors import PeerError, UsageError, XdsError
from ...utils.quoting import plain_lines, printable
from ...utils.sizes import size_text
from ..config.config import Config
from ..parts import Recovery
from ..process.process import timeout_seconds
from .agreement import failure_text, together
from .format import part_of_json, part_to_json
from .io.folders import MANIFEST, commit, discard, file_name, prune, write_latest
from .io.storage import Claim, storage_of
from .io.tensor_file import Sums, TensorEntry, copy_image, image_bytes, write_image, write_tensors
from .joining import joined_manifest
from .manifest import RankPart
from .score import Score

log = logging.getLogger("xds")
DOING = "save_checkpoint"
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.01, 0.2
BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.05  # between two looks for another generation of the ranks
_LEFT = "another rank has failed meanwhile"
_ENDED = "rank 0 ended before it was committed"
LOST_SECONDS = 60.0  # a rank that writes updates its key once a second, however slow the disk is
NEVER = Recovery()
_ANSWER = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, eq=False)
class SaveJob:
    """One checkpoint to write; everything except the checksums is known. It references no tensor.

    rank: this one's number when the save began. Later groups may give it another one.
    first_folder: where the ranks write, as rank 0 sees it; it becomes save_dir / tag.
    claim: the lock on the folder, on rank 0, which made it.
    part: this rank's part of the manifest, without its file's length and checksums.
    state: the manifest's `state`, on rank 0.
    """

    collectives: Collectives
    rank: int
    save_dir: Path
    first_folder: Path
    claim: Claim | None
    tag: str
    save_latest: bool
    keep_last: int
    mesh: Mesh
    stage: int
    part: RankPart
    state: Any
    score: Score | None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """The same, as this rank sees it."""
        return self.save_dir / self.first_folder.name

    def check_folder(self) -> None:
        """Raises UsageError: this rank does not see the folder that rank 0 has made."""
        if not storage_of(self.save_dir).is_folder(self.folder):
            raise UsageError(
                f"this rank saves in {printable(self.save_dir.absolute())}, where it does not see what rank 0 "
                f"writes in {printable(self.first_folder.parent)}; give all ranks one folder that every host "
                "sees"
            )

    def write(self, entries: Sequence[TensorEntry]) -> Sums:
        """Write this rank's file. Raises what `check_folder` raises."""
        self.check_folder()
        return write_tensors(self.path, entries)

    @property
    def path(self) -> Path:
        """This rank's file."""
        return self.folder / file_name(self.folder, self.rank)

    def written(self, sums: Sums) -> Any:
        """This rank's part of the manifest, as JSON."""
        record = replace(
            self.part.file,
            path=self.path.name,
            size_bytes=sums.size_bytes,
            chunk_bytes=sums.chunk_bytes,
            crc32=sums.crc32,
        )
        # rank 0 needs no message with its own flats
        flats = () if self.is_first else self.part.flats
        return part_to_json(replace(self.part, file=record, flats=flats))

    def commit(self, parts: Sequence[Any]) -> None:
        """Commit, update `latest`, prune. Only on rank 0, after every rank's file is durable."""
        rank_parts = [part_of_json(part) for part in parts]
        manifest = joined_manifest(
            self.tag, self.stage, self.mesh, self.part.flats, self.state, rank_parts
        )
        commit(self.folder, self.save_dir, replace(manifest, score=self.score))
        if self.save_latest:
            write_latest(self.save_dir, self.tag)
        if self.keep_last or self.score is not None:
            prune(self.save_dir, self.tag, self.keep_last)
        log.info("saved checkpoint %s", self.save_dir / self.tag)

    def end(self, *, discards: bool) -> None:
        """Release the folder; remove it first if the save failed."""
        if self.claim is not None:
            if discards:
                discard(self.folder)
            self.claim.release()


@dataclass(frozen=True)
class Progress:
    """How much of its file this rank has written in the background."""

    tag: str
    written_bytes: int
    total_bytes: int


@final
class Saver:
    """Writes the checkpoints of one engine.

    In the background `save` returns after the states are copied to host memory, which is held until `close`.
    If some states are on a disk (offload to NVMe), this rank's file is complete when `save` returns.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        keep_last: int,
        in_background: bool,
        timeout_seconds: float = LOST_SECONDS,
    ) -> None:
        """
        Args:
            keep_last: the number of checkpoints of a kind that stay; 0 keeps all.
        Raises:
            UsageError: `in_background`, and the process group has no store.
        """
        if in_background and collectives.world_size > 1 and collectives.store() is None:
            raise UsageError(
                "checkpoint.async_save = true: the ranks communicate through the store of their process group, "
                "and this group has none; set it to false"
            )
        self.keep_last = keep_last
        self._in_background = in_background
        self._timeout_seconds = min(timeout_seconds, LOST_SECONDS)
        self._memory: Tensor | None = None  # of the copy; the next save uses it again
        self._thread: threading.Thread | None = None
        self._messages: _Messages | None = None  # of the thread
        self._progress: Progress | None = None
        self._failure = ""
        self._old_keys: list[str] = []  # of the last save; every rank reads them before the next
        self._exit: Callable[[], None] | None = None

    def save(self, job: SaveJob, entries: Sequence[TensorEntry]) -> None:
        """Write a checkpoint, or start to. A collective; raises on all ranks or on none."""
        if self._in_background:
            self._start(job, entries)
            return
        is_saved = False
        try:
            _, parts = together(
                job.collectives,
                DOING,
                partial(job.write, entries),
                share=job.written,
            )
            together(job.collectives, DOING, lambda: job.commit(parts) if job.is_first else None)
            is_saved = True
        finally:
            job.end(discards=not is_saved)

    def check(self) -> None:
        """Raises XdsError, once, if a save in the background has failed, and no rank has abandoned it."""
        if self._failure and not self._is_abandoned:
            failure, self._failure = self._failure, ""
            raise XdsError(failure)

    def wait(self, recovery: Recovery = NEVER) -> None:
        """Return when nothing is being written.

        Raises what `check` raises; PeerError: a rank has failed before it was committed.
        """
        if self._thread is not None:
            if self._thread.is_alive():
                recovery.keep()
            while self._thread.is_alive():
                self._thread.join(LOOK_SECONDS if recovery.is_on else None)
                if recovery.is_replaced():
                    self._leave()
            self._thread = None
        if self._is_abandoned:
            raise PeerError(self._failure)
        self.check()

    def abandon(self) -> str:
        """A rank has failed: end what is being written. Returns why it is not saved; "": it is, or none was."""
        self._leave()
        self._thread = None
        failure, self._failure = self._failure, ""
        return failure

    def _leave(self) -> None:
        if self._thread is not None and self._messages is not None:
            self._messages.leave()
            self._thread.join()

    @property
    def _is_abandoned(self) -> bool:
        """This rank, or another one, has noticed that a rank has failed, and has ended the save."""
        return _LEFT in self._failure

    def progress(self) -> Progress | None:
        """None: nothing is being written."""
        return self._progress

    def close(self) -> None:
        """Wait, and release all resources. Raises what `check` raises."""
        try:
            self.wait()
        finally:
            self._memory = None
            if self._exit is not None:
                atexit.unregister(self._exit)

    # -- in the background ------------------------------------------------------------------------------

    def _start(self, job: SaveJob, entries: Sequence[TensorEntry]) -> None:
        """Copy the states, and start the thread."""
        size_bytes, failure = 0, ""
        sums: Sums | None = None
        try:
            job.check_folder()
            size_bytes = image_bytes(entries)
            if any(entry.blocks is not None and not entry.reads_memory for entry in entries):
                sums = write_tensors(job.path, entries)  # a copy could be larger than the memory
            else:
                copy_image(entries, self._memory_of(size_bytes))
        except Exception as error:  # reported like a failed write: no collective runs here
            failure = failure_text(error)
        except BaseException:
            job.end(discards=True)
            raise
        self._progress = Progress(job.tag, 0, size_bytes)
        if self._exit is None:
            self._exit = partial(_at_exit, weakref.ref(self), os.getpid())
            atexit.register(self._exit)
        messages = self._messages = _Messages(job, self._timeout_seconds)
        # not a daemon: the interpreter waits for it before it ends
        self._thread = threading.Thread(
            target=self._run, args=(job, messages, size_bytes, failure, sums), name="xds-checkpoint"
        )
        self._thread.start()

    def _memory_of(self, size_bytes: int) -> Tensor:
        """`size_bytes` of host memory, uint8. Page-locked, if there is a GPU."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = None  # frees it first
            try:
                self._memory = host_memory(size_bytes, pin=True)
            except UsageError:
                raise XdsError(
                    f"checkpoint.async_save = true: there are no {size_text(size_bytes)} of host memory for "
                    "the copy of this rank's states; set it to false"
                ) from None
        return self._memory[:size_bytes]

    def _run(
        self, job: SaveJob, messages: _Messages, size_bytes: int, failure: str, sums: Sums | None
    ) -> None:
        """The thread."""

        def on_written(written_bytes: int) -> None:
            self._progress = Progress(job.tag, written_bytes, size_bytes)
            messages.check()

        try:
            mine: dict[str, Any] = {"error": failure}
            try:
                if not failure:
                    sums = sums or write_image(job.path, self._memory_of(size_bytes), on_written)
                    mine = {"part": job.written(sums)}
            except Exception as error:
                mine = {"error": failure_text(error)}
            failure = self._commit(job, messages, mine) if job.is_first else messages.report(mine)
        except Exception as error:
            failure = failure_text(error)
        finally:
            messages.end()
        self._progress = None
        self._failure = failure and (
            f"{DOING}, in the background: {printable(job.tag)} was not saved in "
            f"{printable(job.save_dir.absolute())}: {plain_lines(failure)}"
        )

    def _commit(self, job: SaveJob, messages: _Messages, mine: dict[str, Any]) -> str:
        """Commit on rank 0, after every rank has written. Returns the failure, or ""."""
        answers = messages.collect(mine)
        messages.delete(self._old_keys)  # every rank that answered has read them
        failed = [
            (rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer
        ]
        failure = f"rank {failed[0][0]} failed: {failed[0][1]}" if failed else ""
        if not failure:
            try:
                job.commit([answer["part"] for answer in answers])
            except Exception as error:
                failure = f"rank 0 failed: {failure_text(error)}"
        job.end(discards=bool(failure))
        self._old_keys = messages.tell(failure)
        return failure

    def unreported_failure(self) -> str:
        """A failure that `check` has not raised yet, or ""."""
        return self._failure


def _at_exit(reference: weakref.ref[Saver], pid: int) -> None:
    """Exit with code 1 if the script ends normally although its last checkpoint was not saved."""
    saver = reference()
    if saver is None or os.getpid() != pid or not saver.unreported_failure():
        return
    print(f"xds: {saver.unreported_failure()}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the only way to change the exit code this late


@final
class _Messages:
    """The ranks' messages about one save, in the store of their group. Another thread shows signs of life.

    <save>/<rank>         the rank's part of the manifest, or its failure
    <save>/<rank>/alive   a number that changes while the rank is alive
    <save>/done           the result of the save, from rank 0
    """

    def __init__(self, job: SaveJob, timeout_seconds: float) -> None:
        self._job = job
        self._rank = job.rank
        self._world_size = job.collectives.world_size
        self._timeout_seconds = timeout_seconds
        self._store: Store | None = job.collectives.store()
        self._is_over = threading.Event()
        self._is_left = threading.Event()
        # both threads of a save start in the step loop: none can start while the interpreter ends
        self._beats = threading.Thread(target=self._beat, name="xds-checkpoint-alive")
        if self._store is not None:
            self._beats.start()

    def _key(self, what: object) -> str:
        return f"checkpoint/{self._job.folder.name}/{what}"

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            assert self._store is not None
            with suppress(RuntimeError):  # the ranks that wait for it report it
                self._store.set(self._key(f"{self._rank}/alive"), str(time.monotonic_ns()))

    def end(self) -> None:
        """No more messages."""
        self._is_over.set()
        if self._store is not None:
            self._beats.join()

    def leave(self) -> None:
        """The other ranks answer no more: every wait ends with an error. From another thread."""
        self._is_left.set()

    def check(self) -> None:
        """Raises XdsError: `leave` was called."""
        if self._is_left.is_set():
            raise XdsError(_LEFT)

    def collect(self, mine: dict[str, Any]) -> list[Any]:
        """Every rank's answer, in rank order; rank 0's is `mine`."""
        answers = [mine]
        for rank in range(1, self._world_size):
            answers.append(self._await(self._key(rank), rank))
            self.delete([self._key(rank)])
        return answers

    def tell(self, failure: str) -> list[str]:
        """Send the result. Returns the keys that other ranks may still read and that must be deleted later."""
        if self._store is None:
            return []
        with suppress(RuntimeError):  # without a store they look for the committed files
            self._store.set(self._key("done"), json.dumps({"error": failure}))
        return [self._key("done"), *(self._key(f"{r}/alive") for r in range(self._world_size))]

    def report(self, mine: dict[str, Any]) -> str:
        """Send `mine` to rank 0 and wait for the result: the failure, or ""."""
        assert self._store is not None
        try:
            self._store.set(self._key(self._rank), json.dumps(mine))
            failure: str = self._await(self._key("done"), 0)["error"]
        except RuntimeError:  # the store ended with rank 0
            failure = _ENDED
        # rank 0 has not said what became of it
        return "" if failure in (_ENDED, _LEFT) and self._is_committed() else failure

    def _is_committed(self) -> bool:
        """Rank 0 may have ended after the commit, before it could say so."""
        folder = self._job.save_dir / self._job.tag
        paths = (folder / self._job.path.name, folder / MANIFEST)
        return min(map(storage_of(folder).size_of, paths)) >= 0

    def _await(self, key: str, rank: int) -> dict[str, Any]:
        """Wait for `key` and return its value; an error if `rank` shows no sign of life."""
        assert self._store is not None
        pause_seconds = MIN_POLL_SECONDS
        seen, since = "", time.monotonic()
        while True:
            is_left = self._is_left.is_set()
            answer = self._store.read_as(_ANSWER, key)  # once more where it is left
            if answer is not None:
                return answer
            if is_left:
                return {"error": _LEFT}
            self._is_left.wait(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, MAX_POLL_SECONDS)
            alive = self._store.read(self._key(f"{rank}/alive"))
            if alive is not None and alive != seen:
                seen, since = alive, time.monotonic()
            if time.monotonic() - since > self._timeout_seconds:
                return {"error": f"rank {rank} did not respond for {self._timeout_seconds:.0f} s"}

    def delete(self, keys: Sequence[str]) -> None:
        if self._store is None:
            return
        for key in keys:
            with suppress(RuntimeError):  # some stores cannot
                self._store.delete(key)


def build_saver(config: Config, collectives: Collectives) -> Saver:
    """The saver of one engine. Raises UsageError: see `Saver`."""
    section = config.checkpoint
    return Saver(
        collectives,
        keep_last=section.keep_last,
        in_background=section.async_save,
        timeout_seconds=timeout_seconds(),
    )
