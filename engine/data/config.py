"""The section `data_efficiency`: which samples a step takes, how many, and what it drops of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, final

from pydantic import Field

from ...utils.schema.section import Entry, NoEffect, Report, Section, nested, read_section
from ...utils.schema.values import (
    WHOLE,
    Count,
    Flag,
    Natural,
    Object,
    checked,
    needs,
)
from ..config.sections import DataPacking
from ..dropping.config import DataRouting

Whole = Annotated[int, WHOLE]
CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
BATCHING = "data_efficiency.data_sampling.dynamic_batching"
ORDERS = "dataloader", "random", "seqlen"
METHODS = "linear", "sqrt", "none"


@final
class CurriculumMetric(Section):
    """One entry of `curriculum_metrics`: which samples the difficulty of a step selects."""

    index_to_sample_path: str = Field(
        "", description="the analyzer's NAME_index_to_sample, without .bin and .idx"
    )
    index_to_metric_path: str = Field("", description="the analyzer's NAME_index_to_metric")
    difficulty_type: Literal["value", "percentile"] = Field(
        "value",
        description="the difficulty is a value of the metric, or a part of the samples: that of max_difficulty "
        "equal parts",
    )
    clustering_type: Literal["schedule_based", "single_cluster"] = Field(
        "schedule_based",
        description="samples up to the difficulty are selected, or the metric selects none: for truncation",
    )
    min_difficulty: Whole = Field(0, description="the difficulty at the beginning")
    max_difficulty: Whole = Field(0, description="the difficulty at the end")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = Field(
        "fixed_linear", description="how it rises"
    )
    schedule_config: Object = Field({}, description="of the schedule")

    @property
    def selects(self) -> bool:
        """Samples are selected by this metric."""
        return self.clustering_type == "schedule_based"

    def check_at(self, path: str, report: Report) -> None:
        """What is needed is there, and the schedule is possible."""
        given = self.model_fields_set
        needed = ["min_difficulty", "max_difficulty", "schedule_type"]
        if self.selects:
            needed += ["index_to_sample_path", "difficulty_type"]
        if self.selects and self.difficulty_type == "value":
            needed += ["index_to_metric_path"]
        lacking = [key for key in needed if key not in given]
        if lacking:
            report.complain(path, self.schedule_type, f"needs the key {', '.join(lacking)}")
            return
        if self.min_difficulty > self.max_difficulty:
            report.complain(
                f"{path}.min_difficulty",
                self.min_difficulty,
                f"must be at most max_difficulty = {self.max_difficulty}",
            )
        if self.selects and self.difficulty_type == "percentile" and self.max_difficulty < 1:
            report.complain(
                f"{path}.max_difficulty",
                self.max_difficulty,
                "must be at least 1, the number of parts that the samples are divided into",
            )
        if self.schedule_type == "custom":
            return  # its function comes later
        from ...utils.errors import UsageError
        from .schedules import curriculum  # imported late: most configs need no numpy

        try:
            curriculum(self.schedule()).at(1)
        except UsageError as error:
            report.complain(f"{path}.schedule_config", self.schedule_config, str(error))
        except (TypeError, ArithmeticError) as error:
            text = f"its values must be numbers, and lists of numbers ({error})"
            report.complain(f"{path}.schedule_config", self.schedule_config, text)

    def schedule(self) -> dict[str, Any]:
        """The keys of the schedule, as `curriculum` takes them."""
        names = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
        return {name: getattr(self, name) for name in names}


@final
class CurriculumLearning(Section):
    """Easy samples first: `data_efficiency.data_sampling.curriculum_learning`, see docs/data.md."""

    others: ClassVar[Mapping[str, Entry]] = {
        "data_cluster_path": NoEffect(
            str, "no cluster files are written: a batch is computed from the metric's files"
        )
    }

    enabled: Flag = Field(
        False, description="training_data is sampled by a curriculum; DeepSpeed asks this key alone"
    )
    curriculum_metrics: Object = Field(
        {}, description="the name of each metric, with its keys: see docs/data.md"
    )

    def metrics(self) -> dict[str, CurriculumMetric]:
        """The metrics by name. The config was checked."""
        report = Report()
        found = self._read(report)
        assert not report.complaints, report.complaints
        return found

    def _read(self, report: Report) -> dict[str, CurriculumMetric]:
        found = {}
        for name, given in self.curriculum_metrics.items():
            metric = read_section(
                CurriculumMetric, given, f"{CURRICULUM}.curriculum_metrics.{name}", report
            )
            if metric is not None:
                found[name] = metric
        return found

    def check(self, report: Report) -> None:
        """There are metrics, and each of them is complete."""
        if not self.enabled:
            return
        if not self.curriculum_metrics:
            report.complain(
                f"{CURRICULUM}.curriculum_metrics", {}, "name at least one metric, with its keys"
            )
        for name, metric in self._read(report).items():
            metric.check_at(f"{CURRICULUM}.curriculum_metrics.{name}", report)


@final
class DynamicBatching(Section):
    """Few long samples or many short ones: `data_efficiency.data_sampling.dynamic_batching`."""

    enabled: Flag = Field(False, description="training_data is cut into batches by tokens")
    max_tokens: Natural = Field(0, description="tokens of a batch of samples; required")
    metrics_path: str = Field(
        "",
        description="the analyzer's folder, for the lengths in its seqlen/seqlen_sample_to_metric; "
        '"": the attribute `lengths` of training_data',
    )
    lr_scaling_method: Annotated[
        str,
        needs('"linear", "sqrt" or "none"'),
        checked(lambda name: name.lower() in METHODS),
    ] = Field(
        "linear",
        description="how the learning rate follows the samples of a step; it was chosen for "
        "train_batch_size samples",
    )
    min_batch_size: Count = Field(1, description="samples of a batch, at least")
    max_batch_size: Count | None = Field(None, description="samples of a batch, at most")
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = Field(
        "dataloader", description="samples as they are, at random, or the shortest first"
    )
    verbose: Flag = Field(False, description="each step is logged at the start")

    def check(self, report: Report) -> None:
        """There is a budget, and the limits fit together."""
        if not self.enabled:
            return
        if not self.max_tokens:
            report.complain(f"{BATCHING}.max_tokens", 0, "name the tokens of a batch, such as 4096")
        most = self.max_batch_size
        if most is not None and self.min_batch_size > most:
            report.complain(
                f"{BATCHING}.min_batch_size",
                self.min_batch_size,
                f"must be at most max_batch_size = {most}",
            )


@final
class DataSampling(Section):
    """Which samples of training_data a step takes."""

    others: ClassVar[Mapping[str, Entry]] = {
        "pin_memory": NoEffect(Flag, "batches are pinned where there is a GPU")
    }

    enabled: Flag = Field(False, description="without effect: the sections in it have switches")
    num_epochs: Count = Field(
        1000,
        description="an iteration over the loader of a curriculum gives so many times the number of samples",
    )
    num_workers: Natural | None = Field(
        None, description="processes that read; null: dataloader_num_workers"
    )
    curriculum_learning: CurriculumLearning = nested(CurriculumLearning)
    dynamic_batching: DynamicBatching = nested(DynamicBatching)

    @property
    def has_curriculum(self) -> bool:
        return self.curriculum_learning.enabled

    @property
    def has_dynamic_batches(self) -> bool:
        return self.dynamic_batching.enabled

    def check(self, is_off: bool, report: Report) -> None:
        """is_off: `data_efficiency.enabled` is false, and was given."""
        inner = {"curriculum_learning": self.curriculum_learning.enabled}
        inner["dynamic_batching"] = self.dynamic_batching.enabled
        outer = {"data_efficiency.enabled": is_off}
        outer["data_efficiency.data_sampling.enabled"] = (
            "enabled" in self.model_fields_set and not self.enabled
        )
        for name in [name for name, is_on in inner.items() if is_on]:
            for path in [path for path, is_false in outer.items() if is_false]:
                report.notes.append(
                    f"{path} = false: {name}.enabled is true in it, which counts (as in DeepSpeed)"
                )
        if all(inner.values()):
            report.complain(
                f"{BATCHING}.enabled",
                True,
                "a curriculum takes train_batch_size samples a step, and batches by tokens take others; switch "
                "on one of them",
            )
        self.curriculum_learning.check(report)
        self.dynamic_batching.check(report)


class Neighbours(Protocol):
    """What the rules of this section read of the rest of the config."""

    @property
    def data_packing(self) -> DataPacking: ...


@final
class DataEfficiency(Section):
    """Fewer samples and tokens for the same loss."""

    enabled: Flag = Field(False, description="without effect: the sections in it have switches")
    seed: Natural = Field(1234, description="of the samples' order, and of the choice of tokens")
    data_sampling: DataSampling = nested(DataSampling)
    data_routing: DataRouting = nested(DataRouting)

    @property
    def drops_tokens(self) -> bool:
        """Random-LTD is on."""
        return self.data_routing.random_ltd.enabled

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`, `DataSampling.check` and `DataRouting.check`."""
        sampling = self.data_sampling
        sampling.check("enabled" in self.model_fields_set and not self.enabled, report)
        self.data_routing.check(self.enabled, report)
        for name, is_on in (
            ("curriculum_learning", sampling.has_curriculum),
            ("dynamic_batching", sampling.has_dynamic_batches),
        ):
            if is_on and config.data_packing.tokens:
                report.complain(
                    "data_packing.tokens",
                    config.data_packing.tokens,
                    f"data_efficiency.data_sampling.{name} chooses the samples as well; remove one of the two",
                )


__all__ = [
    *("BATCHING", "CURRICULUM", "CurriculumLearning", "CurriculumMetric", "DataEfficiency"),
    *("DataSampling", "DynamicBatching"),
]
