"""The config sections of what acts on the model by the step. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from ...utils.arguments import whole
from ...utils.errors import UsageError
from ...utils.schema.section import Entry, NoEffect, Refused, Report, Section, nested
from ...utils.schema.values import (
    ANY_CASE,
    TUPLE,
    Count,
    Flag,
    Names,
    Natural,
    NonNegative,
    Object,
    needs,
)

SEQLEN = "seqlen"  # the type of curriculum that the model's forward gets
_LTD = "data_efficiency.data_routing.random_ltd"


@final
class ProgressiveLayerDrop(Section):
    """Layers are skipped at random in training, more with each step. docs/dropping.md has the formula."""

    enabled: Flag = Field(False, description="layers are skipped in training")
    theta: Annotated[
        float, needs("a number, above 0 and at most 1", gt=0, le=1, allow_inf_nan=False)
    ] = Field(1.0, description="what theta falls to: the last layer is kept with this probability")
    gamma: NonNegative = Field(0.001, description="how fast theta falls from 1, in each step")
    seed: Natural = Field(0, description="of the choice of layers")
    blocks: Names = Field(
        (),
        description="class names or dotted-name globs of the residual blocks; empty: they are found in the "
        "model's lists of layers",
    )
    keywords: Flag | None = Field(
        None,
        description="the model itself skips layers: its forward gets progressive_layer_drop and pld_theta. "
        "null: if its forward reads these keywords; false: the engine skips blocks",
    )


@final
class CurriculumLearning(Section):
    """The model's forward gets a sequence length that rises: the keyword `curriculum_seqlen`."""

    enabled: Flag = Field(False, description="training forwards get curriculum_seqlen")
    curriculum_type: str = Field(
        SEQLEN,
        description='"seqlen"; for others the forward gets no keyword, and the script reads the difficulty',
    )
    min_difficulty: Natural = Field(0, description="the difficulty at the start; must be given")
    max_difficulty: Natural = Field(0, description="the difficulty at the end; must be given")
    schedule_type: Annotated[
        Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"], ANY_CASE
    ] = Field("fixed_linear", description="how it rises; must be given")
    schedule_config: Object = Field({}, description="numbers of the schedule, see docs/data.md")

    def schedule(self, function: Callable[[int], Any] | None = None) -> Any:
        """The difficulty by the step. function: that of the schedule "custom".

        Raises:
            UsageError: a key is absent, a value is impossible, or "custom" has no function.
        """
        from ..data.schedules import FixedDiscrete, curriculum  # it imports numpy

        found = curriculum(self.as_dict(), function)
        if self.curriculum_type == SEQLEN and isinstance(found, FixedDiscrete):
            for length in found.difficulty:
                whole("difficulty", length, 0)
        return found

    def check_with(self, config: object, report: Report) -> None:
        """See `Section.check_with`. The keys that the schedule needs are there, and fit together."""
        if not self.enabled:
            return
        given = self.model_fields_set
        absent = [
            key for key in ("min_difficulty", "max_difficulty", "schedule_type") if key not in given
        ]
        if absent:
            report.complain(
                "curriculum_learning.enabled", True, f"needs {', '.join(absent)} as well"
            )
            return
        if self.max_difficulty < self.min_difficulty:
            report.complain(
                "curriculum_learning.max_difficulty",
                self.max_difficulty,
                f"must be at least min_difficulty ({self.min_difficulty})",
            )
        _try(
            lambda: self.schedule(lambda step: step),
            "curriculum_learning.schedule_config",
            self,
            report,
        )


@final
class LayerTokenLr(Section):
    """A learning rate by consumed tokens."""

    others: ClassVar[Mapping[str, Entry]] = {
        "enabled": Refused(
            Flag,
            "DeepSpeed has never implemented it; set it to false, and use the section scheduler",
            harmless=(False,),
        ),
        "total_layer_tokens": NoEffect(
            Natural, "the schedule is not implemented in DeepSpeed either"
        ),
        "warmup_type": NoEffect(str, "the schedule is not implemented in DeepSpeed either"),
        "warmup_layer_tokens": NoEffect(
            Natural, "the schedule is not implemented in DeepSpeed either"
        ),
    }


@final
class RandomLtd(Section):
    """Random-LTD: chosen layers compute a random part of the tokens; the others pass by."""

    others: ClassVar[Mapping[str, Entry]] = {
        "global_batch_size": NoEffect(Count, "the engine knows it"),
        "micro_batch_size": NoEffect(Count, "the engine knows it"),
        "model_type": NoEffect(str, "rows and columns of masks are gathered for both types"),
    }

    enabled: Flag = Field(False, description="chosen layers drop tokens in training")
    total_layer_num: Natural = Field(0, description="the layers of the model")
    random_ltd_layer_num: Natural = Field(0, description="how many layers drop tokens")
    random_ltd_layer_id: Annotated[tuple[Natural, ...], Field(fail_fast=True), TUPLE] = Field(
        (),
        description="which layers drop tokens: their numbers in the model's list of layers, from 0",
    )
    model_mask_name: str | None = Field(
        None,
        description="the layer's argument with the attention mask; masks are found by name as well",
    )
    hidden_state_order: Annotated[Literal["batch_seq_dim", "seq_batch_dim"], ANY_CASE] = Field(
        "batch_seq_dim", description="the first two dimensions of a layer's input"
    )
    random_ltd_schedule: Object = Field(
        {},
        description="min_value, max_value: tokens that are kept at the start and at the end; schedule_type: "
        '"fixed_linear"; schedule_config: require_steps, seq_per_step',
    )
    layer_token_lr_schedule: LayerTokenLr = nested(LayerTokenLr)

    def check(self, report: Report) -> None:
        """The numbers of layers fit together, and the schedule is complete."""
        if not self.enabled:
            return
        ids, count = self.random_ltd_layer_id, self.random_ltd_layer_num
        if not ids:
            text = "name the layers that drop tokens, such as [1, 2, 3]"
            report.complain(f"{_LTD}.random_ltd_layer_id", list(ids), text)
        elif len({*ids}) != len(ids):
            report.complain(f"{_LTD}.random_ltd_layer_id", list(ids), "has a layer twice")
        elif count != len(ids):
            text = f"must equal the number of layers in random_ltd_layer_id ({len(ids)})"
            report.complain(f"{_LTD}.random_ltd_layer_num", count, text)
        elif self.total_layer_num <= max(ids):
            text = f"must be above every number in random_ltd_layer_id (the largest is {max(ids)})"
            report.complain(f"{_LTD}.total_layer_num", self.total_layer_num, text)
        _try(self.schedule, f"{_LTD}.random_ltd_schedule", self, report)

    def schedule(self) -> Any:
        """The number of kept tokens by the step.

        Raises:
            UsageError: a key is absent, or a value is impossible.
        """
        from ..data.schedules import tokens_kept  # it imports numpy

        return tokens_kept(self.random_ltd_schedule)


@final
class DataRouting(Section):
    """Which tokens are computed."""

    enabled: Flag = Field(
        False, description="without effect: random_ltd.enabled decides, as in DeepSpeed"
    )
    random_ltd: RandomLtd = nested(RandomLtd)

    def check(self, is_around: bool, report: Report) -> None:
        """See `RandomLtd.check`. is_around: data_efficiency.enabled is true."""
        self.random_ltd.check(report)
        if self.random_ltd.enabled and not (is_around and self.enabled):
            report.notes.append(
                f"{_LTD}.enabled = true: tokens are dropped, although an enabled around it is false (as in "
                "DeepSpeed)"
            )


def _try(make: Callable[[], Any], path: str, section: Section, report: Report) -> None:
    """Complain about what a schedule raises. Values of any type are in its config."""
    try:
        make()
    except UsageError as error:
        report.complain(path, section.shown_value(path.rpartition(".")[2]), str(error))
    except (TypeError, ValueError, ArithmeticError) as error:
        text = f"every value of it must be a number ({error})"
        report.complain(path, section.shown_value(path.rpartition(".")[2]), text)


__all__ = [
    *("SEQLEN", "CurriculumLearning", "DataRouting", "LayerTokenLr"),
    *("ProgressiveLayerDrop", "RandomLtd"),
]
