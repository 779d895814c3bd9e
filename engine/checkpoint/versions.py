"""The newest two versions of what this rank holds, in memory that outlives its process.

    step 7 ends   forward of step 8     before the norm of step 8     forward of step 9
                  thread: 7 into slot 1   slot 1 is complete            thread: 8 into slot 0, over 6

A rank votes for a step when the version before it is complete. So when any rank has taken step 8, all have
version 7; and when none has, all have version 6. The slot that is written has no manifest, so it is no version.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import final

from ...utils.errors import XdsError
from ...utils.sizes import size_text
from .image import FILE, Image, image_step
from .io.folders import MANIFEST

NUM_SLOTS = 2
NONE = -1  # instead of a step: there is no version


@final
class Versions:
    """The slots of one rank. `steps`: the complete versions, newest first, NONE where there are fewer."""

    def __init__(self, folder: Path) -> None:
        self._slots = [folder / str(number) for number in range(NUM_SLOTS)]
        for slot in self._slots:
            slot.mkdir(parents=True, exist_ok=True)
        self._steps = [NONE] * NUM_SLOTS  # of each slot
        self._thread = ThreadPoolExecutor(1, "xds-versions")
        self._writing: tuple[Future[None], int, int] | None = None  # the slot, the step

    @property
    def steps(self) -> list[int]:
        return sorted(self._steps, reverse=True)

    def find(self) -> None:
        """Take over what a former process of this rank has left. Reads every byte."""
        found = [image_step(slot) for slot in self._slots]
        self._steps = [NONE if step is None else step for step in found]

    def begin(self, image: Image) -> None:
        """Start to write a version over the older one. Masters and states must not change before `complete`."""
        self.complete()
        slot = self._steps.index(min(self._steps))
        self._steps[slot] = NONE
        self._writing = (self._thread.submit(image.write, self._slots[slot]), slot, image.step)

    def complete(self) -> None:
        """The version that is being written is complete afterwards.

        Raises XdsError: it does not fit into the memory.
        """
        if self._writing is None:
            return
        (job, slot, step), self._writing = self._writing, None
        try:
            job.result()
        except OSError as error:
            raise XdsError(
                f"recovery.enabled: the copy of the states in {self._slots[slot]} cannot be written "
                f"({error.strerror}): free memory there, or set recovery.enabled to false"
            ) from error
        self._steps[slot] = step

    def is_kept(self, step: int) -> bool:
        """This version is complete, or is being written."""
        return step in self._steps or (self._writing is not None and self._writing[2] == step)

    def folder_of(self, step: int) -> Path:
        """Where the image of a complete version is."""
        return self._slots[self._steps.index(step)]

    def drop_after(self, step: int) -> None:
        """Versions after `step` count no longer: other ranks do not have them."""
        self.complete()
        for slot, there in enumerate(self._steps):
            if there > step:
                with suppress(FileNotFoundError):
                    (self._slots[slot] / MANIFEST).unlink()
                self._steps[slot] = NONE

    def reserve(self, size_bytes: int) -> None:
        """Take the memory of all versions now. Raises XdsError: there is too little."""
        for slot in self._slots:
            descriptor = os.open(slot / FILE, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
            except OSError as error:
                raise XdsError(
                    f"recovery.enabled: each rank keeps {NUM_SLOTS} copies of its states, "
                    f"{size_text(size_bytes)} each, and {slot.parent.parent} has no memory for them "
                    f"({error.strerror}): enlarge it (mount -o remount,size=), start fewer ranks on this host, "
                    "or set recovery.enabled to false"
                ) from error
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """No version is needed any more."""
        with suppress(XdsError):
            self.complete()
        self._thread.shutdown()
        shutil.rmtree(self._slots[0].parent, ignore_errors=True)


def newest_common(ranks: Sequence[Sequence[int]]) -> int:
    """The newest step of which all ranks have a version; NONE: there is none. ranks: the steps of each.

    >>> newest_common([(8, 7), (7, 6), (-1, 7)])
    7
    """
    common = set.intersection(*(set(steps) for steps in ranks))
    return max(common, default=NONE)


__all__ = ["NONE", "NUM_SLOTS", "Versions", "newest_common"]
