"""What an engine imports at its first use: what writes and reads checkpoints, and what compiles blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from torch import nn

from ..ops.comm.collectives import Collectives
from .config.config import Config
from .config.sections import Checkpoint

if TYPE_CHECKING:
    from .checkpoint.saver import Progress, Saver
    from .model.compiling import Compiler
    from .model.recomputing import Recomputing


@final
class Saves:
    """The checkpoints of one engine. Makes the `Saver` at the first one, or at once for the background."""

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


@final
class Compiling:
    """The compiled blocks of one model: makes the `Compiler` when it is first used."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        config: Config,
        recomputing: Recomputing | None,
    ) -> None:
        """Nothing is compiled yet. recomputing: of `blocks`; None: nothing is recomputed.

        Raises:
            ConfigError: the section is enabled and names an unknown backend or option.
        """
        self._model, self._blocks = model, blocks
        self._config, self._recomputing = config, recomputing
        self._compiler = self._build() if config.compile.enabled else None

    def _build(self) -> Compiler:
        from .model.compiling import Compiler

        return Compiler(self._model, self._blocks, self._config, self._recomputing)

    @property
    def is_compiled(self) -> bool:
        return self._compiler is not None and self._compiler.is_compiled

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `Compiler.compile`."""
        if self._compiler is None:
            self._compiler = self._build()
        self._compiler.compile(*args, **kwargs)

    def undo(self) -> None:
        """Restore the forwards of before `compile`."""
        if self._compiler is not None:
            self._compiler.undo()


__all__ = ["Compiling", "Saves"]
