"""Checks that need several sections of the config.

A check is left out where one of its keys could not be read: what it would say may be wrong as soon as that key
is right. `tests/engine/test_config_mended.py` tries a wrong value for every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ops.config import check_ops
from ...utils.schema.keys import Report
from .compile import check_compile
from .elasticity import ELASTIC_KEYS, check_elasticity
from .messages import check_messages
from .mics import check_mics
from .offloading import check_guesses, check_old_names, check_paths, without_idle_offload
from .optimizer import check_optimizer
from .precision import check_precision
from .ranks import check_sequence_ranks, check_slices, check_stages
from .scheduler import check_scheduler
from .shared_parameters import check_shared_parameters

ZERO = "zero_optimization"
_DEVICES = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")
_OLD_NAMES = (f"{ZERO}.cpu_offload", f"{ZERO}.cpu_offload_param", f"{ZERO}.cpu_offload_params")
_PATHS = (f"{ZERO}.offload_optimizer.nvme_path", f"{ZERO}.offload_param.nvme_path")
_STAGE = f"{ZERO}.stage"
_NORM = f"{ZERO}.compute_grad_norm"
_TYPE = "optimizer.type"
_WEIGHTS = tuple(
    f"{ZERO}.{name}"
    for name in (
        *("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
        *("zero_quantized_gradients", "zero_hpz_partition_size", "zeropp_loco_param"),
    )
)
_MICS = (f"{ZERO}.mics_shard_size", f"{ZERO}.mics_hierarchical_params_gather")
_RANKS = ("pipeline.stages", "sequence_parallel_size", "tensor_parallel.tp_size")
_COMPILE = tuple(f"compile.{name}" for name in ("enabled", "backend", "mode", "kwargs"))
_PIPELINE = tuple(f"pipeline.{name}" for name in ("schedule", "chunks", "partition"))


def check_together(config: Any, data: Mapping[str, Any], report: Report) -> Any:
    """Check what depends on several sections; make optimizer, scheduler and leaf modules canonical.

    config: the `Config` as read; data: what it was read from. Returns the changed `Config`.
    """
    changes: dict[str, Any] = {}
    if config.optimizer is not None:
        changes["optimizer"] = check_optimizer(config.optimizer, report)
    if config.scheduler is not None:
        changes["scheduler"] = check_scheduler(config.scheduler, report)
    report.end_reading()
    if not report.doubts(*_OLD_NAMES, *_DEVICES):
        check_old_names(config.zero_optimization, report)
    zero = config.zero_optimization.with_leaf_modules().with_old_names()
    changes["zero_optimization"] = without_idle_offload(zero, report)
    config = config.model_copy(update=changes)
    check_precision(config, config.data_types.param_dtype, report)
    _check_states(config, report)
    _check_ranks(config, data, report)
    if not report.doubts(*_COMPILE, _STAGE):
        check_compile(config.compile, config.zero_optimization.stage, report)
    if not report.doubts("ops.native", "ops.require"):
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
    is_read = not report.doubts(_NORM, _STAGE, "gradient_clipping")
    if is_read and config.gradient_clipping > 0 and not zero.shows_grad_norm:
        report.complain(
            _NORM,
            False,
            "requires gradient_clipping=0, because clipping needs the norm; remove the key",
        )
    if not report.doubts(f"{ZERO}.offload_optimizer.super_offload", _DEVICES[0], _TYPE):
        check_guesses(optimizer, zero, report)
    if not report.doubts(*_DEVICES, *_PATHS):
        check_paths(zero, report)
    if not report.doubts(_STAGE, *_MICS, *_WEIGHTS, _DEVICES[1]):
        check_mics(zero, report)
    shared = f"{ZERO}.shared_parameters"
    if not report.doubts(shared, _STAGE, _TYPE, _DEVICES[0], "communication.shared_memory"):
        chosen = None if optimizer is None else optimizer.type
        check_shared_parameters(zero, config.communication, chosen, report)
    warmups = (
        "optimizer.params.freeze_step",
        "scheduler.type",
        "scheduler.params.warmup_num_steps",
    )
    divergent = f"{ZERO}.divergent_graphs"
    if not report.doubts(_STAGE, _TYPE, *_MICS, *_WEIGHTS, *_DEVICES, divergent):
        is_known = not report.doubts(*warmups, "scheduler.params.cycle_first_step_size")
        check_messages(optimizer, config.scheduler if is_known else None, zero, report)


def _check_ranks(config: Any, data: Mapping[str, Any], report: Report) -> None:
    """Report what the ranks along the axes of the mesh do not allow."""
    if not report.doubts(*ELASTIC_KEYS):
        check_elasticity(config.elasticity, data, report)
    if not report.doubts(*_RANKS, *_PIPELINE, *ELASTIC_KEYS, "activation_checkpointing.enabled"):
        check_stages_of(config, report)
    if not report.doubts(_RANKS[2], _TYPE):
        chosen = config.optimizer
        check_slices(config.tensor_parallel, None if chosen is None else chosen.type, report)
    if not report.doubts(*_RANKS, "sequence.cut_by"):
        check_sequences_of(config, report)


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
