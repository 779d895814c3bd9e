"""The config section `elasticity`: one batch size for many numbers of ranks. Nothing here imports torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol, final

from pydantic import Field

from ...pipe.config import Pipeline
from ...tensor.config import TensorParallel
from ...utils.schema.section import Entry, NoEffect, Report, Section
from ...utils.schema.values import TUPLE, Count, Flag, Natural, checked, needs
from ..config.batch import MICRO, STEPS, TRAIN
from .rules import ElasticPlan, Limits, plan

VERSIONS = (0.1, 0.2)
SHOWN_NEAR = 3  # valid numbers of ranks on either side of one that is refused
REQUIRED = ("max_train_batch_size", "micro_batch_sizes")


class Neighbours(Protocol):
    """What the rules of this section read of the rest of the config."""

    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def tensor_parallel(self) -> TensorParallel: ...
    @property
    def sequence_parallel_size(self) -> int: ...
    @property
    def model_ranks(self) -> int: ...
    @property
    def model_fields_set(self) -> set[str]: ...


@final
class Elasticity(Section):
    """One batch size for a varying number of ranks; it sets all three batch sizes."""

    others: ClassVar[Mapping[str, Entry]] = {
        "min_time": NoEffect(
            Natural, "only schedulers that read the file use it: minutes between two changes", (0,)
        ),
    }

    enabled: Flag = Field(
        False,
        description="the batch sizes are computed from this section. The last batch of an epoch of "
        "training_data is filled up with samples of that epoch, or dropped with dataloader_drop_last",
    )
    max_train_batch_size: Count = Field(
        2000, description="the largest batch; must be given if the section is enabled"
    )
    micro_batch_sizes: Annotated[tuple[Count, ...], Field(min_length=1, fail_fast=True), TUPLE] = (
        Field(
            (2, 4, 6),
            description="micro-batches that fit in memory; must be given if the section is enabled",
        )
    )
    min_gpus: Count = Field(1, description="the smallest number of ranks")
    max_gpus: Count = Field(10000, description="the largest number of ranks")
    prefer_larger_batch: Flag = Field(
        True,
        description="if two batch sizes allow the same number of rank counts, use the larger",
    )
    ignore_non_elastic_batch_info: Flag = Field(
        False, description="other batch sizes in the file are ignored instead of an error"
    )
    version: Annotated[float, needs("0.1 or 0.2"), checked(VERSIONS.__contains__)] = Field(
        0.2, description="0.1 counts ranks, 0.2 counts whole nodes"
    )
    model_parallel_size: Count = Field(
        1,
        description="ranks that hold one model. Training needs the number pipeline.stages; planning takes any",
    )
    num_gpus_per_node: Count = Field(
        1, description="ranks per node, which join and leave together (version 0.2)"
    )

    def plan(self) -> ElasticPlan:
        """The batch size and the numbers of ranks that can train it. Raises ValueError: no size fits."""
        in_nodes = self.version == 0.2
        if self.model_parallel_size > 1 and not in_nodes:
            raise ValueError(
                f"elasticity.model_parallel_size = {self.model_parallel_size}: version 0.1 has no model "
                "parallelism; set elasticity.version to 0.2, or the size to 1"
            )
        return plan(
            Limits(
                self.max_train_batch_size,
                self.micro_batch_sizes,
                self.min_gpus,
                self.max_gpus,
                self.prefer_larger_batch,
                self.num_gpus_per_node if in_nodes else 1,
                self.model_parallel_size,
            )
        )

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`. An enabled section must suffice for training, and excludes other "
        "batch sizes."""
        if not self.enabled:
            return
        ranks = config.model_ranks
        if self.model_parallel_size != ranks:
            factors = {
                "tensor_parallel.tp_size": config.tensor_parallel.size,
                "sequence_parallel_size": config.sequence_parallel_size,
            }
            others = "".join(f" x {name} ({n})" for name, n in factors.items() if n > 1)
            report.complain(
                "elasticity.model_parallel_size",
                self.model_parallel_size,
                f"must equal pipeline.stages ({config.pipeline.stages}){others}, the number of ranks that hold "
                "one model; set both to the same number (`xds elastic` plans with any)",
            )
        for key in (TRAIN, MICRO, STEPS):
            if key not in config.model_fields_set:
                continue
            value = getattr(config, key)
            if self.ignore_non_elastic_batch_info:
                report.without_effect.append((key, "elasticity sets the batch sizes"))
            else:
                report.complain(
                    key,
                    value,
                    "elasticity sets the batch sizes; remove the key, or set "
                    "elasticity.ignore_non_elastic_batch_info to true",
                )
        report.complaints += unplannable(self, {key: True for key in self.model_fields_set})

    def batch_for(self, replicas: int) -> tuple[tuple[int, int, int], list[str]]:
        """((train, micro, steps), complaints) for `replicas` data-parallel ranks, as `solve_batch`."""
        try:
            found = self.plan()
        except ValueError as error:
            return (0, 0, 0), [str(error)]
        if replicas not in found.replicas:
            world_size = replicas * self.model_parallel_size
            return (found.batch_size, 0, 0), [
                f"world size = {world_size}: {refusal(found, world_size, found.world_sizes)}"
            ]
        return (found.batch_size, *found.split(replicas)), []


def unplannable(section: Elasticity, given: Mapping[str, Any]) -> list[str]:
    """Complaints about an enabled section; `given` holds the keys that the file gives."""
    missing = [key for key in REQUIRED if given.get(key) is None]
    if missing:
        return [
            f"elasticity.{key}: is missing; it must be given if elasticity.enabled is true"
            for key in missing
        ]
    try:
        section.plan()
    except ValueError as error:
        return [str(error)]
    return []


def refusal(found: ElasticPlan, asked: int, valid: Sequence[int]) -> str:
    """The message for a number of ranks that is not among the `valid` ones."""
    at = bisect_right(valid, asked)
    near = valid[max(0, at - SHOWN_NEAR) : at + SHOWN_NEAR]
    before = "..., " if near[0] != valid[0] else ""
    after = ", ..." if near[-1] != valid[-1] else ""
    return (
        f"elasticity trains batches of {found.batch_size} samples, which {asked} ranks cannot share; start "
        f"{before}{', '.join(map(str, near))}{after} ranks (`xds elastic` lists them all), or change the "
        "elasticity section"
    )
