"""The checkpoints of one engine. What writes and reads them is imported by the first save or load."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ..ops.comm.collectives import Collectives
from .config.sections import Checkpoint

if TYPE_CHECKING:
    from .checkpoint.saver import Progress, Saver


@final
class Saves:
    """Makes the `Saver` when it is first used, or at once if it saves in the background."""

    def __init__(
        self, section: Checkpoint, collectives: Collectives, timeout_seconds: float
    ) -> None:
        """Raises UsageError: it saves in the background, and the process group has no store."""
        self._section = section
        self._collectives = collectives
        self._timeout_seconds = timeout_seconds
        self._saver = self._build() if section.async_save else None

    @property
    def saver(self) -> Saver:
        if self._saver is None:
            self._saver = self._build()
        return self._saver

    def _build(self) -> Saver:
        from .checkpoint.saver import Saver

        return Saver(
            self._collectives,
            keep_last=self._section.keep_last,
            in_background=self._section.async_save,
            timeout_seconds=self._timeout_seconds,
        )

    def check(self) -> None:
        """Raises XdsError, once, if a save in the background has failed."""
        if self._saver is not None:
            self._saver.check()

    def wait(self) -> None:
        """Return when nothing is being written. Raises what `check` raises."""
        if self._saver is not None:
            self._saver.wait()

    def progress(self) -> Progress | None:
        """None: nothing is being written."""
        return None if self._saver is None else self._saver.progress()

    def close(self) -> None:
        """Wait, and release all resources. Raises what `check` raises."""
        if self._saver is not None:
            self._saver.close()


__all__ = ["Saves"]
