"""Profiles the steps that the config names, while an engine trains.

Inside of these steps' regions the model is recorded; in all others nothing is installed, and a region costs one
comparison. Every rank records its part; rank 0 prints.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import nn

from ...ops.comm.collectives import Collectives
from ..config.config import Config
from ..config.sections import FlopsProfiler

if TYPE_CHECKING:  # loaded where a step is profiled
    from .profile import Profile
    from .recorder import Recorder
    from .text import Setting

log = logging.getLogger("xds")


class Profiled(Protocol):
    """The part of an engine that is read."""

    config: Config
    module: nn.Module
    device: torch.device
    global_steps: int
    micro_steps: int

    def train_batch_size(self) -> int: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...

    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def dp_world_size(self) -> int: ...


@final
class StepProfiler:
    """Records the steps from the first to the last one of the section, and reports their mean.

    last: of the last steps that were profiled, on this rank.
    """

    last: Profile | None = None

    def __init__(self, section: FlopsProfiler, collectives: Collectives) -> None:
        """collectives: of all ranks of the engine; their work is added up."""
        self._section = section
        self._collectives = collectives
        self._engine: Profiled | None = None
        self._recorder: Recorder | None = None
        self._micro_steps_before = 0

    def follow(self, engine: Profiled) -> None:
        """`engine` begins to train."""
        self._engine = engine

    def region(
        self, name: str, timer: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """The context around a region (forward, backward, step), which includes that of `timer`."""
        recorder = self._recorder or self._begun(name)
        if recorder is None:
            return timer
        if name == "forward":
            assert self._engine is not None
            trains = self._engine.module.training and torch.is_grad_enabled()
            return _in_both(recorder.forward(), timer) if trains else timer
        if name == "backward":
            return _in_both(recorder.backward(), timer)
        return _in_both(recorder.region(name), timer)

    def _begun(self, name: str) -> Recorder | None:
        """A new recorder if this is the first forward of a step that is to be profiled."""
        engine = self._engine
        first, last = self._section.steps
        if engine is None or name != "forward" or not first <= engine.global_steps <= last:
            return None
        self._micro_steps_before = engine.micro_steps
        self._recorder = _recorder(engine)
        return self._recorder

    def step(self) -> None:
        """The engine has ended an optimizer step."""
        engine, recorder, last = self._engine, self._recorder, self._section.steps[1]
        if engine is None or engine.global_steps <= last:
            return
        if recorder is None:
            if engine.global_steps > last + 1:
                return
            # this rank has run no forward: it reports none, because the others wait for its numbers
            recorder = _recorder(engine)
        self._recorder = None
        profile = recorder.profile(max(1, engine.micro_steps - self._micro_steps_before))
        self.last = profile
        totals = self._totals(profile, engine)
        if engine.global_rank == 0:
            from .text import Detail, report

            section = self._section
            detail = Detail(section.module_depth, section.top_modules, section.detailed)
            write(report(profile, self._setting(engine, totals), detail), section.output_file)

    def _totals(self, profile: Profile, engine: Profiled) -> Mapping[str, str]:
        """The work of all ranks that share one model. Sends 16 bytes to each rank."""
        if engine.world_size == 1:
            return {}
        found, both = profile.backward, profile.flops
        if found is not None:
            both += found.flops + found.recomputed_flops
        mine = torch.tensor([round(profile.flops), round(both)], device=engine.device)
        table = self._collectives.gather_small(mine, what="flops of each rank")
        models = len(table) / engine.config.model_ranks
        forward, both = (table.sum(0) / models).tolist()
        lines = {
            "fwd of a whole model, all its ranks": _work(forward),
            "fwd+bwd of a whole model, all its ranks": _work(both),
        }
        return lines if found is not None else dict([*lines.items()][:1])

    def _setting(self, engine: Profiled, totals: Mapping[str, str]) -> Setting:
        from .text import Setting

        config, (first, last) = engine.config, self._section.steps
        places: dict[str, Any] = {
            "world size": engine.world_size,
            "data parallel size": engine.dp_world_size,
            "model parallel size": config.tensor_parallel.size,
            "pipeline stages": config.pipeline.stages,
            "sequence parallel size": config.sequence_parallel_size,
            "batch size per GPU": engine.train_micro_batch_size_per_gpu(),
            "micro-batches of a step": engine.gradient_accumulation_steps(),
        }
        if engine.world_size > 1:
            places["figures are those of rank"] = engine.global_rank
        return Setting(
            step=first + 1 if first == last else f"{first + 1} to {last + 1}",
            places=places,
            samples=engine.train_batch_size(),
            num_batches=engine.gradient_accumulation_steps(),
            recompute_factor=self._section.recompute_fwd_factor,
            totals=totals,
        )


def write(text: str, path: str | None) -> None:
    """Print `text`, or write it to a file; its folder is made. A file that cannot be written is a warning."""
    if path:
        try:
            file = Path(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return
        except OSError as error:
            log.warning("flops_profiler.output_file = %s cannot be written: %s", path, error)
    sys.stdout.write(text)
    sys.stdout.flush()


def _recorder(engine: Profiled) -> Recorder:
    from .clock import ProfileClock
    from .recorder import Recorder

    return Recorder(engine.module, ProfileClock(engine.device))


def _work(flops: float) -> str:
    from .units import macs_to_string, number_to_string

    return f"{macs_to_string(flops / 2)}, {number_to_string(flops).strip()} flops"


@contextmanager
def _in_both(
    outer: AbstractContextManager[None], inner: AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


__all__ = ["Profiled", "StepProfiler", "write"]
