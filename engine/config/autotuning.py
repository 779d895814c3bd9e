"""The section autotuning: experiments that `xds --autotuning` starts, each with some timed steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from ...utils.schema.section import Entry, NoEffect, Report, Section
from ...utils.schema.values import ANY_CASE, Count, Flag, Natural, Object


@final
class ModelInfo(Section):
    """What is known of the model."""

    others: ClassVar[Mapping[str, Entry]] = {
        "hidden_size": NoEffect(Natural, "the first run counts parameters and activations"),
        "num_layers": NoEffect(Natural, "the first run counts parameters and activations"),
    }

    profile: Flag = Field(
        False,
        description="the engine writes parameters and activations after the first forward, and the run ends",
    )
    num_params: Count | None = Field(
        None, description="parameters of the model; with it there is no run that counts them"
    )


@final
class Autotuning(Section):
    """What `xds --autotuning tune|run` tries. In an experiment: which steps the engine times."""

    enabled: Flag = Field(
        False,
        description="this run is an experiment: the engine times steps, writes metrics, and ends the run",
    )
    fast: Flag = Field(
        True, description="stages and micro-batches alone are tried; false: overlap_comm as well"
    )
    results_dir: str = Field("autotuning_results", description="a folder for each experiment")
    exps_dir: str = Field("autotuning_exps", description="a file for each experiment")
    overwrite: Flag = Field(
        True, description="results of earlier runs are removed; false: they are used again"
    )
    start_profile_step: Natural = Field(3, description="steps before the timed ones")
    end_profile_step: Count = Field(5, description="the last timed step; the run ends after it")
    metric: Annotated[Literal["throughput", "latency", "flops"], ANY_CASE] = Field(
        "throughput",
        description="what is best: samples/s, milliseconds of a step, or operations of products in a second "
        "on a device (flops), where a backward counts as two forwards. All of the clock on the wall",
    )
    metric_path: str | None = Field(
        None, description="where rank 0 writes the metrics; null: autotuning_metric.json"
    )
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], ANY_CASE] = Field(
        "gridsearch",
        description="the order of experiments on keys; model_based is gridsearch: `xds tune` has a model",
    )
    tuner_early_stopping: Natural = Field(
        5,
        description="experiments on keys without a better one, after which the others are left out",
    )
    tuner_num_trials: Count = Field(50, description="the most experiments on keys of a stage")
    arg_mappings: Object | None = Field(
        None,
        description="key of the config -> argument of the script that has to have the same value",
    )
    model_info: ModelInfo | None = Field(None, description="what is known of the model")
    model_info_path: str | None = Field(
        None, description="where rank 0 writes model_info; null: autotuning_model_info.json"
    )
    mp_size: Count = Field(1, description="ranks that share one model, which the script cuts")
    max_train_batch_size: Count | None = Field(None, description="the most samples of a step")
    min_train_batch_size: Count = Field(1, description="the fewest samples of a step")
    max_train_micro_batch_size_per_gpu: Count = Field(1024, description="the largest micro-batch")
    min_train_micro_batch_size_per_gpu: Count = Field(1, description="the smallest micro-batch")
    num_tuning_micro_batch_sizes: Count = Field(
        3, description="micro-batches from a half of the largest one on that are tried"
    )

    @property
    def profiles_model(self) -> bool:
        """The run ends after the first forward."""
        return self.enabled and self.model_info is not None and self.model_info.profile

    def check_with(self, config: object, report: Report) -> None:
        """See `Section.check_with`."""
        first, last = self.start_profile_step, self.end_profile_step
        if self.enabled and last <= first:
            report.complain(
                "autotuning.end_profile_step",
                last,
                f"steps after start_profile_step ({first}) are timed up to this one; set it to {first + 2}",
            )
        if self.enabled and self.metric == "flops" and first < 1:
            report.complain(
                "autotuning.start_profile_step",
                first,
                'metric = "flops" counts operations in the first step, which is slow; set it to at least 1',
            )


__all__ = ["Autotuning", "ModelInfo"]
