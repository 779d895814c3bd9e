"""The last save of a run that recovers: what ranks tell each other of it, and whether it is written again.

a save of step 8 in the background    a rank fails     all go on after
save_checkpoint ── step 9 ──          it is abandoned  step 8: it is written again, on all ranks
                                                       step 9: its states are gone, so it is not
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from ..recovery.slots import NONE
from .checkpoint.save import SaveOptions
from .checkpoint.score import number_of
from .counters import Counters
from .parts import CheckpointWriter

log = logging.getLogger("xds")
Arguments = tuple[Any, ...]
"""save_dir, tag, client_state, SaveOptions: of `States.save`."""


@final
class LastSave:
    """The save, as one rank knows it.

    unsaved_step: of the save in the background that this rank has abandoned; NONE: it has not.
    """

    def __init__(self) -> None:
        self.unsaved_step = NONE
        self.args: Arguments = ()  # of the call, if this process was in it
        # its folder, and after which step it was made; NONE: it was loaded
        self._path, self._step = "", NONE
        self._counted: tuple[float | None, int] = None, 0  # by `Counters`, before it
        self._failure = ""  # why it was abandoned

    def begin(self, counters: Counters) -> None:
        """A save is about to be made."""
        self._counted = counters.best_metric, counters.saves_since_best

    def made(self, counters: Counters, args: Arguments) -> None:
        """It is made, or written in the background from now on."""
        save_dir, tag = args[:2]
        self._step = counters.global_steps
        self._path = _path_of(save_dir, f"global_step{self._step}" if tag is None else tag)
        self.args = args

    def loaded(self, path: str) -> None:
        """The run goes on from the checkpoint in this folder."""
        self._path, self._step = str(Path(path).absolute()), NONE

    def is_same(self, save_dir: str | Path, tag: Any, step: int) -> bool:
        """A save into this folder after `step` is the last one."""
        return (_path_of(save_dir, tag), step) == (self._path, self._step)

    # -- a rank has failed ------------------------------------------------------------------------------

    def abandon(self, saver: CheckpointWriter | None) -> None:
        """End what is written in the background: the lost rank does not do its part."""
        failure = "" if saver is None else saver.abandon()
        if failure:
            self.unsaved_step, self._failure = self._step, failure

    def args_to_make(self, call: Arguments) -> Arguments:
        """The arguments of the save that runs, `call`, or else of the abandoned one."""
        return call or (self.args if self.unsaved_step != NONE else ())

    def uncount(self, counters: Counters) -> None:
        """It will be counted again. Where ranks go back to a version, the counters do so as well."""
        counters.best_metric, counters.saves_since_best = self._counted

    def end(self, *, is_made_again: bool) -> None:
        """The ranks go on."""
        if self._failure:
            how = "" if is_made_again else "not "
            log.warning("%s; it is %swritten again", self._failure, how)
        self.unsaved_step, self._failure = NONE, ""

    # -- what a new process has to know -----------------------------------------------------------------

    def told(self, call: Arguments) -> dict[str, Any]:
        """What this rank tells, as JSON values without the client_state. call: the save that runs, if any."""
        args, told = self.args_to_make(call), None
        if args:
            save_dir, tag, _, options = args
            metric, *others = options.score
            more = {"score": (number_of(metric), *others)}
            tag = None if tag is None else str(tag)
            told = [str(save_dir), tag, dataclasses.asdict(dataclasses.replace(options, **more))]
        return {"call": told, "saved": [self._path, self._step]}

    def hear(self, every: Sequence[Mapping[str, Any]], client_state: Any) -> Arguments:
        """What all ranks have told. Returns the arguments of the save that the others make; (): of none."""
        self._path, self._step = _newest(every)
        call = next((each["call"] for each in every if each["call"]), None)
        if call is None:
            return ()
        save_dir, tag, options = call
        options["score"] = tuple(options["score"])
        return save_dir, tag, client_state, SaveOptions(**options)


def newest_path(every: Sequence[Mapping[str, Any]]) -> str:
    """The folder of the last checkpoint of which any rank has told; "": of none."""
    return _newest(every)[0]


def _newest(every: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    step, path = max((step, path) for path, step in (each["saved"] for each in every))
    return path, step


def _path_of(save_dir: str | Path, tag: Any) -> str:
    return str(Path(save_dir).absolute() / str(tag))


__all__ = ["Arguments", "LastSave", "newest_path"]
