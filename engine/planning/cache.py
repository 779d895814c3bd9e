"""What plans of one model have in common, so that a search makes it once.

A plan needs the model, the parts of its ranks, forwards and a schedule in time. Many configs share most of
them: the micro-batch changes the forward alone, the order of a pipeline the schedule alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from typing import Any, TypeVar, final

from torch import nn

from ...ops.mesh import Mesh
from ...pipe.schedules.build import SCHEDULES
from ...utils.errors import ConfigError, UsageError
from ..config.batch import COMPUTED, mesh_of
from ..config.config import Config
from ..model.arguments import is_part, with_model
from ..parallel.pipeline import plan_schedule
from .activations import Activations
from .models import ModelSource
from .observing import Observations
from .shares import Share, Shares
from .timeline import Timeline

_T = TypeVar("_T")
_NO_TRACE = ("train_batch_size", "train_micro_batch_size_per_gpu", "data_parallel_size")
_NO_PART = (*COMPUTED, "activation_checkpointing", "data_parallel_size")
_NO_FORWARD = (
    *("train_batch_size", "gradient_accumulation_steps", "data_parallel_size", "pipeline"),
    *("optimizer", "scheduler", "gradient_clipping", "activation_checkpointing"),
)


@final
class PlanCache:
    """Keeps what was made for one model."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._made: dict[tuple[Any, ...], Any] = {}

    def model(self) -> nn.Module:
        """The whole model on the meta device; a new one where it is built stage by stage."""
        model = self._once(("model",), self._source.on_meta)
        return self._source.on_meta() if is_part(model) else model

    def shares(
        self, config: Config, mesh: Mesh, ranks_per_host: int, *, traced: Collection[int] = ()
    ) -> tuple[Shares, Callable[[], list[Share]]]:
        """What divides the model, and what makes the parts of the ranks. `config` is resolved for them.

        traced: see `Shares`. Traces depend on the order of the pipeline, the number of micro-batches and what
        is recomputed, so fewer configs have them in common.

        Raises:
            UsageError: the model cannot be divided as the config says.
        """
        model = self.model()
        section = config.pipeline
        order = SCHEDULES.get(section.schedule)
        placement: Any = section.schedule
        left_out: tuple[str, ...] = _NO_PART
        if order is not None and section.stages > 1:
            placement = order.placement(section.stages, section.chunks or 0)
            left_out = (*_NO_PART, "pipeline.schedule", "pipeline.chunks")
        steps: int = config.gradient_accumulation_steps
        without = min(steps, 2)  # gradients are summed, or not
        plain = _values(config, left_out), mesh, ranks_per_host, without, placement
        key: tuple[Any, ...] = plain
        if traced:
            key = (_values(config, _NO_TRACE), mesh, ranks_per_host, steps, placement, *traced)

        def make() -> Shares:
            return Shares(
                self._source,
                model,
                config,
                mesh,
                ranks_per_host,
                traced=traced,
                once=self._once,
            )

        if is_part(model):
            made = make()
            return made, lambda: made.all()
        made = self._once(("shares", *key), make)

        def parts() -> list[Share]:
            known = self._made.get(("parts", *plain)) if traced else None
            known = known if isinstance(known, list) else []
            return self._once(("parts", *key), lambda: made.all(known))

        if made.schedule is None:
            return made, parts
        with_order = copy(made)
        cut = (section.partition, section.first_stage_modules, section.last_stage_modules)
        steps = config.gradient_accumulation_steps
        schedule = ("schedule", section.schedule, placement, *cut, steps)
        with_order.schedule = self._once(
            schedule, lambda: plan_schedule(model, made.blocks, config)
        )
        return with_order, parts

    def forward(
        self, config: Config, world_size: int, ranks_per_host: int
    ) -> tuple[dict[int, Activations] | str, Config]:
        """`observed` on the first tensor rank alone, and the config resolved for these ranks.

        Raises ConfigError, UsageError: as a plan of it.
        """
        config = with_model(config, self.model()).resolve(world_size)
        sequence = config.sequence_parallel_size
        num_ranks = world_size // config.num_groups
        mesh = mesh_of(config.pipeline, config.tensor_parallel, num_ranks, sequence)
        shares, _ = self.shares(config, mesh, ranks_per_host)
        return self.observed(shares, config, mesh, (0,))[0], config

    def observed(
        self, shares: Shares, config: Config, mesh: Mesh, tensors: Sequence[int]
    ) -> tuple[dict[int, Activations] | str, list[str]]:
        """See `Observations.of` and `Observations.notes`."""

        def observe() -> tuple[dict[int, Activations] | str, list[str]]:
            observations = Observations(self._source, shares, config, mesh)
            return observations.of(tensors), observations.notes

        if is_part(shares.model):
            return observe()
        zero = config.zero_optimization
        ranks = mesh if shares.num_expert_ranks > 1 else (mesh.tensor, mesh.sequence)
        values = _values(config, (*_NO_FORWARD, "zero_optimization"))
        units = (zero.units, zero.unit_min_numel)
        return self._once(("observed", values, units, ranks, tuple(tensors)), observe)

    def timeline(self, shares: Shares, make: Callable[[], Timeline]) -> Timeline:
        """What `make` makes of the schedule of `shares`, whose cut depends on the placement alone."""
        return make() if is_part(shares.model) else self._once(("time", id(shares.schedule)), make)

    def _once(self, key: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        if key not in self._made:
            try:
                self._made[key] = make()
            except (ConfigError, UsageError) as error:
                self._made[key] = error
        found = self._made[key]
        if isinstance(found, (ConfigError, UsageError)):
            raise found
        made: _T = found
        return made


def _values(config: Config, left_out: Iterable[str]) -> str:
    """The values of the file, without those of some keys."""
    values = config.as_dict()
    for path in left_out:
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section[name]
        section.pop(key, None)
    return json.dumps(values, default=str)


__all__ = ["PlanCache"]
