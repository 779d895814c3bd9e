"""Checks that need several sections of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...ops.config import check_ops
from ...utils.schema.keys import Report
from .compile import check_compile
from .elasticity import check_elasticity
from .messages import check_messages
from .mics import check_mics
from .offloading import check_guesses, check_old_names, check_paths
from .one_bit import check_model_ranks
from .optimizer import check_optimizer
from .precision import check_precision
from .ranks import check_sequence_ranks, check_slices, check_stages
from .scheduler import check_scheduler

if TYPE_CHECKING:
    from .config import Config


def check_together(config: Config, data: Mapping[str, Any], report: Report) -> Config:
    """Check what depends on several sections; make optimizer, scheduler and leaf modules canonical."""
    check_old_names(config.zero_optimization, report)
    zero = config.zero_optimization.with_leaf_modules().with_old_names()
    changes: dict[str, Any] = {"zero_optimization": zero}
    if config.optimizer is not None:
        changes["optimizer"] = check_optimizer(config.optimizer, report)
    if config.scheduler is not None:
        changes["scheduler"] = check_scheduler(config.scheduler, report)
    check_precision(config, config.data_types.param_dtype, report)
    if zero.offload_param.device != "none" and zero.stage < 3:
        report.complain(
            "zero_optimization.offload_param.device",
            zero.offload_param.device,
            f"parameters are sharded at stage 3 only, and the stage is {zero.stage}: set stage to 3, or the "
            'device to "none" (offload_optimizer works at every stage)',
        )
    check_guesses(changes.get("optimizer"), zero, report)
    check_paths(zero, report)
    check_mics(zero, report)
    check_messages(changes.get("optimizer"), changes.get("scheduler"), zero, report)
    check_model_ranks(changes.get("optimizer"), config.model_ranks, report)
    check_compile(config.compile, config.zero_optimization.stage, report)
    check_ops(config.ops, report)
    check_elasticity(config.elasticity, data, report)
    check_stages_of(config, report)
    chosen = changes.get("optimizer")
    check_slices(config.tensor_parallel, chosen.type if chosen is not None else None, report)
    check_sequences_of(config, report)
    if data.get("gradient_clipping") is None:
        report.notes.append(
            "gradient_clipping is not given: gradients are not clipped "
            "(DeepSpeed clips at 1.0 since version 0.19)"
        )
    return config.model_copy(update=changes)


def check_sequences_of(config: Config, report: Report) -> None:
    """Report what the sequence ranks of this config do not allow."""
    check_sequence_ranks(
        config.sequence_parallel_size,
        cuts=config.sequence.cut_by == "engine",
        stages=config.pipeline.stages,
        report=report,
    )


def check_stages_of(config: Config, report: Report) -> None:
    """Report what the pipeline stages of this config do not allow."""
    check_stages(
        config.pipeline,
        config.elasticity,
        config.zero_optimization,
        report,
        counts_micro_batches=config.managed_gradient_accumulation,
        recomputes=config.activation_checkpointing.enabled,
        tensor_ranks=config.tensor_parallel.size,
        sequence_ranks=config.sequence_parallel_size,
    )
