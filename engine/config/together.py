"""Checks that need several sections of the config. They run where every value could be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ops.config import check_ops
from ...utils.schema.keys import Report
from .compile import check_compile
from .elasticity import check_elasticity
from .messages import check_messages
from .offloading import check_guesses, check_old_names, check_paths, without_idle_offload
from .precision import check_precision
from .ranks import check_sequence_ranks, check_slices, check_stages


def check_together(config: Any, data: Mapping[str, Any], report: Report) -> Any:
    """Check what depends on several sections; make offload and leaf modules canonical.

    config: the `Config` as read, without complaints; data: what it was read from. Returns the changed `Config`.
    """
    check_old_names(config.zero_optimization, report)
    zero = config.zero_optimization.with_leaf_modules().with_old_names()
    zero = without_idle_offload(zero, report)
    config = config.model_copy(update={"zero_optimization": zero})
    check_precision(config, config.data_types.param_dtype, report)
    _check_states(config, report)
    check_elasticity(config.elasticity, data, report)
    check_stages_of(config, report)
    kind = None if config.optimizer is None else config.optimizer.type
    check_slices(config.tensor_parallel, kind, report)
    check_sequences_of(config, report)
    check_compile(config.compile, zero.stage, report)
    check_ops(config.ops, report)
    if data.get("gradient_clipping") is None:
        report.notes.append(
            "gradient_clipping is not given: gradients are not clipped "
            "(DeepSpeed clips at 1.0 since version 0.19)"
        )
    return config


def _check_states(config: Any, report: Report) -> None:
    """Report what optimizer, stage, offload and messages do not allow one another."""
    zero, optimizer = config.zero_optimization, config.optimizer
    if config.gradient_clipping > 0 and not zero.shows_grad_norm:
        report.complain(
            "zero_optimization.compute_grad_norm",
            False,
            "requires gradient_clipping=0, because clipping needs the norm; remove the key",
        )
    check_guesses(optimizer, zero, report)
    check_paths(zero, report)
    check_messages(optimizer, config.scheduler, zero, config.communication, report)


def check_sequences_of(config: Any, report: Report) -> None:
    """Report what the sequence ranks of this config do not allow."""
    check_sequence_ranks(
        config.sequence_parallel_size,
        cuts=config.sequence.cut_by == "engine",
        stages=config.pipeline.stages,
        report=report,
    )


def check_stages_of(config: Any, report: Report) -> None:
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
