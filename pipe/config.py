"""The section pipeline: into how many stages the model is cut, where, and in which order they work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Protocol, final

from pydantic import AfterValidator, BeforeValidator, Field

from ..utils.patterns import check_expression
from ..utils.schema.section import Entry, NoEffect, Report, Section, is_auto
from ..utils.schema.values import ANY_CASE, Count, Flag, Names, Natural, needs, read_whole, shown


@final
@dataclass(frozen=True)
class Numbers:
    """The numbers with which a schedule works.

    chunks: of each rank, if the config does not say; `any_more`: a larger number is possible too.
    micro_batches: the least number for each stage. 0: one micro-batch is enough for all stages.
    """

    chunks: int = 1
    any_more: bool = False
    micro_batches: int = 1

    def allows(self, chunks: int) -> bool:
        """Whether a rank may have this number of chunks."""
        return chunks == self.chunks or (self.any_more and chunks > self.chunks)


NUMBERS: dict[str, Numbers] = {
    "gpipe": Numbers(micro_batches=0),
    "1f1b": Numbers(),
    "interleaved_1f1b": Numbers(chunks=2, any_more=True),
    "zero_bubble": Numbers(),
    "zbv": Numbers(chunks=2),
    "dualpipev": Numbers(chunks=2, micro_batches=2),
}
AUTO_SCHEDULE = "auto"  # the shortest step in a simulation
ONE_STAGE = "used with several pipeline stages only, and pipeline.stages is 1"
_OF_STAGES = (
    *("schedule", "chunks", "partition", "reduce", "dynamic_shape", "first_stage_modules"),
    *("last_stage_modules", "activation_checkpoint_interval"),
)
METHODS = ("uniform", "parameters", "best")
BY_TYPE = "type:"


def _read_stages(value: object) -> object:
    return 1 if is_auto(value) else read_whole(value)


def _read_schedule(value: str) -> str:
    if value.casefold() not in (*NUMBERS, AUTO_SCHEDULE):
        raise ValueError
    return value.casefold()


def _read_partition(value: object) -> object:
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    if value.casefold() in METHODS:
        return value.casefold()
    kind, pattern = value[: len(BY_TYPE)], value[len(BY_TYPE) :]
    if kind.casefold() != BY_TYPE:
        raise ValueError
    try:
        check_expression(pattern)
    except ValueError as error:
        raise ValueError(f"what follows {BY_TYPE} {error}") from None
    if not pattern:
        raise ValueError(f'a regular expression must follow {BY_TYPE}, as in "type:Block"')
    return BY_TYPE + pattern


def _check_bounds(bounds: str | tuple[int, ...]) -> str | tuple[int, ...]:
    if isinstance(bounds, str):
        return bounds
    sizes = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or min(sizes, default=1) < 0 or 0 in sizes[1:-1]:
        raise ValueError(
            "bounds must begin with 0, and each must be larger than the one before it; the first two may be "
            "equal, and so may the last two"
        )
    return bounds


_SCHEDULES = ", ".join(f'"{name}"' for name in NUMBERS)
Stages = Annotated[
    int, needs('a whole number, at least 1 (or "auto")', ge=1), BeforeValidator(_read_stages)
]
Schedule = Annotated[
    str,
    needs(f'{_SCHEDULES} or "{AUTO_SCHEDULE}"'),
    AfterValidator(_read_schedule),
]
Partition = Annotated[
    str | Annotated[tuple[Natural, ...], Field(min_length=2, fail_fast=True)],
    needs('"uniform", "parameters", "type:REGEX", "best", or a list of bounds such as [0, 3, 6]'),
    BeforeValidator(_read_partition),
    AfterValidator(_check_bounds),
]


class Neighbours(Protocol):
    """What the rules of this section read of the rest of the config."""

    @property
    def managed_gradient_accumulation(self) -> bool: ...
    @property
    def recomputes_blocks(self) -> bool: ...


@final
class Pipeline(Section):
    """The model is cut into stages of consecutive layers, and each rank has one stage or several chunks."""

    others: ClassVar[Mapping[str, Entry]] = {
        "use_reentrant": NoEffect(Flag, "recomputation does not need torch's reentrant checkpoint"),
    }

    own_auto: ClassVar[frozenset[str]] = frozenset({"stages", "schedule"})

    stages: Stages = Field(
        1,
        description='ranks that share one model; the others are data-parallel ranks. "auto": 1, or the number '
        "that a PipelineModule gives",
    )
    schedule: Schedule = Field(
        "1f1b",
        description='the order of forwards and backwards of a step. "auto": the shortest step '
        "in a simulation with equal times",
    )
    pipe_partitioned: Flag = Field(
        True,
        description="each tensor rank sends its share of activations to the next stage, whose ranks exchange "
        "them; no effect on one tensor rank",
    )
    grad_partitioned: Flag = Field(
        True, description="the same for the gradients that go back to the stage before"
    )
    chunks: Count | None = Field(
        None,
        description="parts of the model on each rank; null: the schedule's own number, 1 or 2. "
        "interleaved_1f1b takes 2 or more",
    )
    partition: Partition = Field(
        "best",
        description="where the layers are cut. uniform: equal numbers of layers. parameters: equal numbers of "
        "parameters. type: equal numbers of layers whose class name matches. best: the slowest part is as fast "
        "as possible, by counted operations. Bounds: part i has the layers from bound i to before bound i + 1; "
        "the first part may have an embedding alone, and the last one a head alone",
    )
    reduce: Annotated[Literal["step", "micro_batch"], ANY_CASE] = Field(
        "step",
        description='"step": gradients are summed over the micro-batches and reduced once. "micro_batch": '
        "they are reduced after each micro-batch, which at stages 2 and 3 needs less memory",
    )
    seed_layers: Flag = Field(
        False,
        description="layers that xds builds are seeded one by one, so that values do not depend on the cut",
    )
    dynamic_shape: Flag = Field(
        False,
        description="shapes are sent with every micro-batch; false sends them once for each new input shape",
    )
    first_stage_modules: Names = Field(
        (), description="dotted-name globs of modules that belong to the first stage"
    )
    last_stage_modules: Names = Field(
        (), description="dotted-name globs of modules that belong to the last stage"
    )
    activation_checkpoint_interval: Natural = Field(
        0, description="layers that are recomputed together in backward; 0: none are recomputed"
    )
    micro_batches: Count | None = Field(
        None, description="must equal gradient_accumulation_steps, if it is given"
    )

    @property
    def num_chunks(self) -> int:
        """Chunks of each rank; 0 where "auto" decides."""
        if self.chunks is not None:
            return self.chunks
        numbers = NUMBERS.get(self.schedule)
        return numbers.chunks if numbers is not None else 0

    @property
    def least_micro_batches(self) -> int:
        """The least number of micro-batches of a step."""
        numbers = NUMBERS.get(self.schedule)
        return max(1, self.stages * numbers.micro_batches) if numbers is not None else 1

    def bubble(self, num_micro_batches: int) -> float | None:
        """The share of a step in which a stage waits, if all stages are equally fast; None: no formula.

        Source: (p-1)/(m+p-1) of GPipe (Huang et al., 2019) and of 1F1B, and (p-1)/(v m+p-1) with v chunks of
        the interleaved order (Narayanan et al., 2021, section 2.2), for p stages and m micro-batches. ZB-H1 (Qi
        et al., 2023, table 1) waits for a third of 1F1B's time, where forward, input and weight gradients take
        equal times.
        """
        waits, works = self.stages - 1, num_micro_batches
        if self.schedule == "interleaved_1f1b":
            works *= self.num_chunks
        elif self.schedule == "zero_bubble":
            works *= 3
        elif self.schedule not in ("gpipe", "1f1b"):
            return None
        return waits / (works + waits)

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`. One stage leaves most keys without effect."""
        if self.stages == 1:
            self._note_one_stage(report)
            return
        if not config.managed_gradient_accumulation:
            report.complain(
                "managed_gradient_accumulation",
                False,
                "pipeline stages run all micro-batches of an update in one call of train_batch, so the engine "
                "counts them; set it to true, or pipeline.stages to 1",
            )
        if config.recomputes_blocks and self.activation_checkpoint_interval:
            report.complain(
                "pipeline.activation_checkpoint_interval",
                self.activation_checkpoint_interval,
                "the section activation_checkpointing recomputes every block already; remove one of the two",
            )
        numbers = NUMBERS.get(self.schedule)
        if numbers is not None and self.chunks is not None and not numbers.allows(self.chunks):
            least = "at least " if numbers.any_more else ""
            others = ", ".join(name for name, each in NUMBERS.items() if each.allows(self.chunks))
            report.complain(
                "pipeline.chunks",
                self.chunks,
                f'the schedule "{self.schedule}" needs {least}{numbers.chunks} on each rank; remove chunks, or '
                f"set pipeline.schedule to one with {self.chunks}: {others}",
            )
        elif self.num_chunks and isinstance(self.partition, tuple):
            self._check_number_of_bounds(self.partition, report)
        both = sorted({*self.first_stage_modules} & {*self.last_stage_modules})
        if both:
            report.complain(
                "pipeline.last_stage_modules",
                list(self.last_stage_modules),
                f"{shown(both[0])} is in first_stage_modules too; remove it from one of the two",
            )

    def _check_number_of_bounds(self, bounds: tuple[int, ...], report: Report) -> None:
        parts = self.stages * self.num_chunks
        if len(bounds) == parts + 1:
            return
        factor = f" x pipeline.chunks ({self.num_chunks})" if self.num_chunks > 1 else ""
        report.complain(
            "pipeline.partition",
            list(bounds),
            f"these bounds make {len(bounds) - 1} parts, and pipeline.stages ({self.stages}){factor} = {parts} "
            f"are needed; give {parts + 1} bounds",
        )

    def _note_one_stage(self, report: Report) -> None:
        ignored = [
            f"pipeline.{name}"
            for name in _OF_STAGES
            if getattr(self, name) != Pipeline.model_fields[name].default
        ]
        if ignored:
            report.notes.append(f"{', '.join(ignored)}: {ONE_STAGE}")
