"""What one config means to xds and not to DeepSpeed 0.19, as a table of rules.

A rule has the key that its line begins with, when it applies, and the rest of the line. The facts are those of
DeepSpeed 0.19.8; `docs/migration.md` has what differs besides configs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...utils.schema.section import is_auto, is_comment, joined
from .config import Config, canonical_path

ZERO = "zero_optimization"
# DeepSpeed refuses a file that has one of these, whatever its value
REMOVED = (
    *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity"),
    *("graph_harvesting", "nebula", "progressive_layer_drop", "quantize_training"),
    *("sparse_attention", "sparse_gradients", f"{ZERO}.mics_shard_size"),
    *(f"{ZERO}.mics_hierarchical_params_gather", f"{ZERO}.zeropp_loco_param"),
)
# sections in which DeepSpeed refuses a key that it does not know; in others it ignores it
CLOSED = (
    *("fp16", "bf16", "bfloat16", ZERO, "compile", "comms_logger", "tensor_parallel"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "hybrid_engine", "weight_quantization"),
    *(f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", f"{ZERO}.leaf_module"),
    *("timers.throughput", "tensor_parallel.tp", "optimizer.params", "scheduler.params"),
)
ONLY_HERE = (
    *(
        "communication",
        "data_parallel_size",
        "ops",
        "sequence",
        "watch",
        "activation_checkpointing.enabled",
    ),
    *("bf16.check_overflow", "bfloat16.check_overflow", "checkpoint.async_save"),
    *("checkpoint.keep_last", "checkpoint.preemption_save_dir", "checkpoint.preemption_seconds"),
    *("compile.backend", "compile.disable", "compile.dynamic", "compile.enabled"),
    *("compile.fullgraph", "compile.kwargs", "compile.mode", "pipeline.chunks"),
    *("pipeline.dynamic_shape", "pipeline.first_stage_modules", "pipeline.last_stage_modules"),
    *("pipeline.micro_batches", "pipeline.reduce", "pipeline.schedule"),
    *("tensor_parallel.enabled", "tensor_parallel.plan", "tensor_parallel.tp_size"),
    *(f"{ZERO}.cpu_offload_params", f"{ZERO}.divergent_graphs", f"{ZERO}.grad_hooks"),
    *(f"{ZERO}.gather_fp16_weights_on_model_save", f"{ZERO}.offload_optimizer.overlap_step"),
    *(f"{ZERO}.shared_parameters", f"{ZERO}.unit_min_numel", f"{ZERO}.units"),
)
# accepted without effect here, and without one in DeepSpeed
IDLE_IN_BOTH = (
    *("allgather_size", "cuda_visible_devices", "disable_allgather", "disable_fused_adam"),
    *("optimizer.legacy_fusion", "vocabulary_size", "flops_profiler.step", "local_rank"),
    *("grandient_accumulation_steps", "optimizer.torch_adam"),
    f"{ZERO}.offload_param.device",
)
SHARDED_BY_DEEPSPEED = ("Adam", "AdamW", "Adagrad", "Lion", "Muon")
KNOWN_IN_ANY_CASE = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon")


@final
class Case:
    """A config as written and as read."""

    def __init__(self, data: Mapping[str, Any], config: Config) -> None:
        self.config = config
        self.zero = config.zero_optimization
        self.written = dict(_values(data, ""))
        self._values = {canonical_path(path): value for path, value in self.written.items()}

    def has(self, path: str) -> bool:
        """The file gives this key a value of its own."""
        value = self._values.get(path)
        return value is not None and not is_auto(value)

    def value(self, path: str) -> Any:
        """The value as written."""
        return self._values.get(path)

    @property
    def half(self) -> str:
        """The 16-bit dtype of parameters, or ""."""
        config = self.config
        return "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else ""

    @property
    def optimizer(self) -> str:
        """The type of the optimizer, or ""."""
        return "" if self.config.optimizer is None else self.config.optimizer.type

    @property
    def offloads(self) -> bool:
        return self.zero.offload_optimizer.device != "none"


def _values(section: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        here = joined(path, key)
        yield here, value
        if isinstance(value, Mapping) and not is_comment(key):
            yield from _values(value, here)


@final
@dataclass(frozen=True)
class Difference:
    """A line about the key `path`, where `applies`."""

    path: str
    text: str
    applies: Callable[[Case], bool]


def _absent(path: str, text: str, applies: Callable[[Case], bool]) -> Difference:
    """A default that differs."""
    return Difference(
        f"{path} is not given", text, lambda case: not case.has(path) and applies(case)
    )


def _given(path: str, text: str, applies: Callable[[Case], bool] = lambda case: True) -> Difference:
    return Difference(path, text, lambda case: case.has(path) and applies(case))


def _job_name(monitor: str) -> Difference:
    return _absent(
        f"{monitor}.job_name",
        '"xds" here, "DeepSpeedJobName" in DeepSpeed',
        lambda case: bool(getattr(case.config, monitor).enabled),
    )


DEFAULTS = (
    Difference(
        "gradient_clipping is not given",
        "gradients are not clipped (xds.deepspeed.initialize: at 1.0); DeepSpeed clips at 1.0",
        lambda case: case.value("gradient_clipping") is None,
    ),
    _absent(
        f"{ZERO}.overlap_comm",
        "true here, false in DeepSpeed below stage 3; the results are the same",
        lambda case: case.zero.stage in (1, 2),
    ),
    _absent(
        f"{ZERO}.max_reuse_distance",
        "5e7 here, 1e9 in DeepSpeed, which keeps more parameters gathered; the results are the same",
        lambda case: case.zero.stage == 3,
    ),
    _absent(
        "data_types.grad_accum_dtype",
        "gradients of several micro-batches are summed in fp32; DeepSpeed sums them in the parameters' dtype",
        lambda case: bool(case.half) and case.config.gradient_accumulation_steps > 1,
    ),
    _absent(
        "seq_parallel_communication_data_type",
        "heads are sent in their own dtype, by DeepSpeed in fp32",
        lambda case: case.config.sequence_parallel_size > 1,
    ),
    _absent(
        "wandb.project",
        '"xds" here, "deepspeed" in DeepSpeed',
        lambda case: case.config.wandb.enabled,
    ),
    _job_name("tensorboard"),
    _job_name("csv_monitor"),
)

MEANINGS = (
    Difference(
        "activation_checkpointing",
        "the model's blocks are recomputed in backward; in DeepSpeed the section alone does nothing, and the "
        "model calls checkpoint itself",
        lambda case: case.config.activation_checkpointing.enabled,
    ),
    Difference(
        "optimizer.type",
        "DeepSpeed 0.19 has no 1-bit optimizers any more and refuses this one",
        lambda case: case.optimizer in ONE_BIT_OPTIMIZERS,
    ),
    Difference(
        "optimizer.type",
        "DeepSpeed shards this optimizer only with zero_allow_untested_optimizer = true",
        lambda case: _is_untested(case),
    ),
    Difference(
        "optimizer.type",
        "any case is read here; DeepSpeed needs torch's spelling",
        lambda case: _is_misspelled(case, "optimizer", (*KNOWN_IN_ANY_CASE, *ONE_BIT_OPTIMIZERS)),
    ),
    Difference(
        "scheduler.type",
        "any case is read here; DeepSpeed needs the exact spelling",
        lambda case: _is_misspelled(case, "scheduler", ()),
    ),
    Difference(
        "optimizer.params.max_grad_norm",
        "without effect here; DeepSpeed refuses the key, whatever its value",
        lambda case: "optimizer.params.max_grad_norm" in case.written,
    ),
    Difference(
        "scheduler.params.warmup_num_steps",
        "0 is taken as 2 here, as in DeepSpeed before 0.19.6; later versions refuse it",
        lambda case: case.value("scheduler.params.warmup_num_steps") in (0, 0.0),
    ),
    _given(
        "gradient_allreduce_op",
        '"sum" is refused by DeepSpeed at stage 3',
        lambda case: case.zero.stage == 3 and case.config.gradient_allreduce_op == "sum",
    ),
    _given(
        "communication_data_type",
        "DeepSpeed knows the names fp32, fp16 and bf16 only",
        lambda case: (
            str(case.value("communication_data_type")).lower() not in ("fp32", "fp16", "bf16")
        ),
    ),
    _given(
        "data_types.grad_accum_dtype",
        "DeepSpeed refuses another dtype than that of the parameters at stage 0",
        lambda case: (
            case.zero.stage == 0
            and case.config.data_types.grad_accum_dtype not in (None, case.half or "fp32")
        ),
    ),
    Difference(
        "bf16.check_grad_overflow",
        "a step whose gradients are not finite raises an error here; DeepSpeed applies it",
        lambda case: case.config.bf16.enabled and not case.config.bf16.check_grad_overflow,
    ),
    Difference(
        "fp32",
        "a step whose gradients are not finite raises an error here; DeepSpeed skips it at stages 1 to 3 and "
        "applies it at stage 0",
        lambda case: not case.half,
    ),
    _given(
        "fp16.min_loss_scale",
        "DeepSpeed takes whole numbers only",
        lambda case: not float(case.config.fp16.min_loss_scale).is_integer(),
    ),
    _given(
        f"{ZERO}.param_persistence_threshold",
        "whole units of so many elements stay gathered here, single parameters in DeepSpeed",
        lambda case: case.zero.stage == 3,
    ),
    _given(
        f"{ZERO}.prefetch_bucket_size",
        "units of at most so many elements are gathered ahead here; in DeepSpeed it is the sum of all that are",
        lambda case: case.zero.stage == 3,
    ),
    _given(
        f"{ZERO}.cpu_offload_use_pin_memory",
        "sets pin_memory of both offload sections here; DeepSpeed ignores it",
    ),
    Difference(
        f"{ZERO}.offload_optimizer",
        "works at stage 0 as well; DeepSpeed offloads at stages 1 to 3 only",
        lambda case: case.offloads and case.zero.stage == 0,
    ),
    _given(
        f"{ZERO}.offload_optimizer.ratio",
        "DeepSpeed refuses a ratio below 1 at stages 0 to 2",
        lambda case: case.zero.offload_optimizer.ratio != 1.0 and case.zero.stage < 3,
    ),
    Difference(
        f"{ZERO}.offload_optimizer.ratio",
        '"auto" moves states to the device where they fit; DeepSpeed takes the default, 1.0',
        lambda case: is_auto(case.value(f"{ZERO}.offload_optimizer.ratio")),
    ),
    Difference(
        f"{ZERO}.offload_param.device",
        "without effect below stage 3, here and in DeepSpeed, unless the script builds the model in zero.Init",
        lambda case: (
            case.zero.stage < 3 and case.value(f"{ZERO}.offload_param.device") in ("cpu", "nvme")
        ),
    ),
    _given(
        f"{ZERO}.zero_quantized_gradients",
        "sends 4 bits at stages 1 and 2 as well; DeepSpeed at stage 3 only",
        lambda case: case.zero.zero_quantized_gradients and case.zero.stage in (1, 2),
    ),
    _given(
        f"{ZERO}.zero_quantized_weights",
        "DeepSpeed refuses it together with torch_autocast",
        lambda case: case.zero.zero_quantized_weights and case.config.torch_autocast.enabled,
    ),
    Difference(
        "pipeline.stages",
        "cuts the model here; DeepSpeed ignores it, and takes the stages of a PipelineModule",
        lambda case: case.config.pipeline.stages > 1,
    ),
    Difference(
        f"{ZERO}.stage",
        "pipelines run at every stage here; DeepSpeed refuses them at stages 2 and 3",
        lambda case: case.config.pipeline.stages > 1 and case.zero.stage >= 2,
    ),
    Difference(
        "checkpoints",
        "are safetensors files and JSON, which DeepSpeed does not read; `xds checkpoint import` reads those of "
        "DeepSpeed",
        lambda case: True,
    ),
)


def differences(data: Mapping[str, Any], config: Config) -> list[str]:
    """What differs from DeepSpeed 0.19 for the config read from `data`, one line each."""
    case = Case(data, config)
    return list(
        dict.fromkeys(
            [
                *_removed(case.written),
                *_only_here(case.written),
                *_unfilled(config),
                *(
                    f"{each.path}: {each.text}"
                    for each in (*DEFAULTS, *MEANINGS)
                    if each.applies(case)
                ),
                *(
                    f"{path}: without effect here; {why}"
                    for path, why in config.without_effect
                    if differs_without_effect(path)
                ),
            ]
        )
    )


def differs_without_effect(path: str) -> bool:
    """DeepSpeed does something with this key, which xds accepts without effect."""
    known = canonical_path(path)
    return known not in IDLE_IN_BOTH and path not in ONLY_HERE and path not in REMOVED


LISTED_UNKNOWN = 10  # the complaints above have named twice as many


def differences_of_refused(data: Mapping[str, Any], complaints: list[str]) -> list[str]:
    """The same for a config that xds refuses: what DeepSpeed ignores, and what it refuses as well."""
    marked = ": unknown key; "
    refused = {each.partition(" = ")[0] for each in complaints if marked in each}
    unknown = [key for key in (joined("", key) for key in data) if key in refused]
    more = len(unknown) - LISTED_UNKNOWN
    return [
        *(
            f"{key}: DeepSpeed ignores keys that it does not know"
            for key in unknown[:LISTED_UNKNOWN]
        ),
        *([f"... and {more} more unknown keys"] if more > 0 else []),
        *_removed(dict(_values(data, ""))),
    ]


def _removed(written: Mapping[str, Any]) -> Iterator[str]:
    for path in REMOVED:
        if path in written:
            yield f"{path}: DeepSpeed 0.19 has removed it, and refuses a file that has the key"


def _only_here(written: Mapping[str, Any]) -> Iterator[str]:
    for path in written:
        outer, _, key = path.rpartition(".")
        is_own_comment = is_comment(key) and outer in CLOSED
        if path in ONLY_HERE or is_own_comment:
            does = "refuses" if outer in CLOSED else "ignores"
            yield f"{path}: only xds knows this key; DeepSpeed {does} it"


def _unfilled(config: Config) -> Iterator[str]:
    """Outside of its closed sections DeepSpeed reads "auto" as text."""
    for path in config.auto_keys:
        if path.rpartition(".")[0] not in CLOSED:
            yield f'{path}: "auto" is computed or the default here; DeepSpeed needs an integration to fill it'


def _is_untested(case: Case) -> bool:
    kind = case.optimizer
    is_known = not kind or kind in SHARDED_BY_DEEPSPEED or kind in ONE_BIT_OPTIMIZERS
    return case.zero.stage > 0 and not is_known and not case.config.zero_allow_untested_optimizer


def _is_misspelled(case: Case, section: str, in_any_case: tuple[str, ...]) -> bool:
    """The type is written in another case than DeepSpeed takes."""
    read = getattr(case.config, section)
    written = case.value(f"{section}.type")
    return read is not None and read.type not in in_any_case and written != read.type


__all__ = ["differences", "differences_of_refused", "differs_without_effect"]
