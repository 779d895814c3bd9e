"""The config sections for precision, activation checkpointing, checkpoints, profiles, monitors and timers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Protocol, final

from pydantic import AfterValidator, BeforeValidator, Field

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...ops.optim.config import REGISTERED
from ...utils.patterns import check_expression
from ...utils.schema.section import Entry, Group, NoEffect, Refused, Report, Section, nested
from ...utils.schema.values import (
    ANY_CASE,
    LIMIT,
    TUPLE,
    WHOLE,
    Count,
    Dtype,
    Flag,
    HalfDtype,
    Names,
    Natural,
    NonNegative,
    Object,
    checked,
    needs,
)
from .optimizer import OptimizerConfig

SCALES = 1e-30, 1e30  # fp32, which scales and unscales, holds these and their inverses
_SCALE_NEED = f"0 or a number, at least {SCALES[0]:g} and at most {SCALES[1]:g}"
Scale = Annotated[
    float,
    needs(_SCALE_NEED, allow_inf_nan=False),
    checked(lambda scale: scale == 0 or SCALES[0] <= scale <= SCALES[1]),
]

ROUNDS_MASTERS = [name for name, each in REGISTERED.items() if each.rounds_masters]


class Precisions(Protocol):
    """What the rules of the precisions read of one another."""

    @property
    def optimizer(self) -> OptimizerConfig | None: ...

    @property
    def fp16(self) -> Fp16: ...
    @property
    def bf16(self) -> Bf16: ...


class LossyMessages(Protocol):
    """The section `zero_optimization`."""

    @property
    def zero_quantized_weights(self) -> bool: ...
    @property
    def zero_quantized_nontrainable_weights(self) -> bool: ...
    @property
    def zero_quantized_gradients(self) -> bool: ...


class KeptPrecisions(Precisions, Protocol):
    """The same, and what would round parameters that stay fp32."""

    @property
    def torch_autocast(self) -> TorchAutocast: ...
    @property
    def zero_optimization(self) -> LossyMessages: ...
    @property
    def optimizer_type(self) -> str: ...


def _half_dtypes(config: Precisions) -> list[str]:
    """The 16-bit dtypes that are switched on; more than one is an error."""
    sections = {"fp16": config.fp16.enabled, "bf16": config.bf16.enabled}
    return [name for name, is_on in sections.items() if is_on]


class Half(Section):
    """A precision of 16 bits: with fp32 masters, or with the parameters themselves as masters."""

    enabled: Flag = Field(False)
    master_rounding: Annotated[Literal["stochastic", "nearest"], ANY_CASE] = Field(
        "stochastic",
        description="how 16-bit masters, and their second moments in 16 bits, are rounded; to nearest they "
        "lose updates below half a unit in the last place",
    )
    rounding_seed: Natural = Field(
        0,
        description="of stochastic rounding; the same seed gives the same bits on any number of ranks",
    )

    @property
    def has_narrow_masters(self) -> bool:
        """Masters and sums of gradients have 16 bits."""
        raise NotImplementedError

    def complain_narrow(self, key: str, config: Precisions, report: Report) -> None:
        """Masters of 16 bits need the precision, and an optimizer that rounds them."""
        if not self.has_narrow_masters:
            return
        section, optimizer = key.partition(".")[0], config.optimizer
        if not self.enabled:
            report.complain(
                key, True, f"needs {section}.enabled; set it to true, or remove the key"
            )
        elif optimizer is not None and optimizer.type not in ("", *ROUNDS_MASTERS):
            *first, last = ROUNDS_MASTERS
            names = f"{', '.join(first)} and {last}"
            report.complain(
                key,
                True,
                f"optimizer.type is {optimizer.type}, but only {names} update 16-bit masters; choose one "
                "of them, or remove the key",
            )


@final
class Fp16(Half):
    """Train in fp16 with an fp32 master copy and a loss scale."""

    enabled: Flag = Field(False, description="parameters and gradients are fp16, the master fp32")
    auto_cast: Flag = Field(False, description="floating-point inputs of forward are cast to fp16")
    loss_scale: Scale = Field(0.0, description="a fixed loss scale; 0 means dynamic")
    initial_scale_power: Annotated[int, Field(ge=0, le=127), WHOLE] = Field(
        16, description="the dynamic loss scale starts at 2 to this power"
    )
    loss_scale_window: Natural = Field(
        1000,
        description="steps without overflow after which the loss scale doubles; above 0 unless loss_scale is "
        "fixed",
    )
    hysteresis: Count = Field(
        2, description="overflows that are tolerated before the loss scale is halved"
    )
    consecutive_hysteresis: Flag = Field(
        False, description="a step without overflow restores the tolerance at once"
    )
    min_loss_scale: Scale = Field(
        1.0,
        description="the dynamic loss scale never falls below this; above 0 unless loss_scale is fixed",
    )

    fp16_master_weights_and_grads: Flag = Field(
        False,
        description="the parameters are the masters, and gradients are summed in fp16: 12 bytes a parameter "
        "with fp32 states, instead of 18",
    )

    @property
    def has_narrow_masters(self) -> bool:
        return self.fp16_master_weights_and_grads

    def check_with(self, config: Precisions, report: Report) -> None:
        """See `Section.check_with`. A dynamic loss scale cannot fall to 0, and has to grow; a fixed one may."""
        self.complain_narrow("fp16.fp16_master_weights_and_grads", config, report)
        if self.enabled and config.bf16.enabled:
            report.complain(
                "fp16.enabled",
                True,
                "fp16.enabled and bf16.enabled exclude one another; switch on one of them",
            )
        is_dynamic = self.enabled and not self.loss_scale
        for key, need in (
            ("min_loss_scale", "never falls to 0: set it above 0"),
            ("loss_scale_window", "grows after so many steps: set it to 1 or more"),
        ):
            if is_dynamic and getattr(self, key) == 0:
                text = f"a dynamic loss scale {need}, or set a fixed fp16.loss_scale"
                report.complain(f"fp16.{key}", 0, text)


@final
class Bf16(Half):
    """Train in bf16 with an fp32 master copy."""

    others: ClassVar[Mapping[str, Entry]] = {
        "immediate_grad_update": NoEffect(
            Flag, "gradients are always accumulated in place immediately", same=(True,)
        ),
    }
    aliases: ClassVar[Mapping[str, str]] = {"check_overflow": "check_grad_overflow"}

    enabled: Flag = Field(False, description="parameters and gradients are bf16, the master fp32")
    check_grad_overflow: Flag = Field(
        True, description="a step whose gradients are not finite is skipped"
    )
    master_weights: Annotated[Literal["split", "fp32"], ANY_CASE] = Field(
        "split",
        description="how Adam, AdamW and Lion of the config keep fp32 masters. split: the upper 16 bits are "
        "the parameter, and 2 bytes more are the lower ones, 16 bytes a parameter instead of 18. fp32: 4 bytes "
        "beside the parameter, which is rounded to even",
    )
    bf16_master_weights_and_grads: Flag = Field(
        False,
        description="the parameters are the masters, and gradients are summed in bf16: 12 bytes a parameter "
        "with fp32 states, instead of 16",
    )
    bf16_optimizer_states: Flag = Field(
        False,
        description="the moments are bf16: 8 bytes a parameter; needs bf16_master_weights_and_grads",
    )

    @property
    def has_narrow_masters(self) -> bool:
        return self.bf16_master_weights_and_grads

    def check_with(self, config: Precisions, report: Report) -> None:
        """See `Section.check_with`."""
        self.complain_narrow("bf16.bf16_master_weights_and_grads", config, report)
        if self.bf16_optimizer_states and not self.bf16_master_weights_and_grads:
            report.complain(
                "bf16.bf16_optimizer_states",
                True,
                "needs bf16.bf16_master_weights_and_grads; set it to true as well, or remove the key",
            )
        optimizer = config.optimizer
        states = None if optimizer is None else optimizer.params.get("state_dtype")
        if self.bf16_optimizer_states and states not in (None, "bf16"):
            report.complain(
                "optimizer.params.state_dtype",
                states,
                "bf16.bf16_optimizer_states is true, which means bf16; remove one of the two keys",
            )

    @property
    def skips_overflow(self) -> bool:
        """Such steps are skipped in this config."""
        return self.enabled and self.check_grad_overflow


@final
class TorchAutocast(Section):
    """Run forward under torch.autocast; parameters keep their dtype."""

    others: ClassVar[Mapping[str, Entry]] = {
        "lower_precision_safe_modules": NoEffect(
            Names,
            "communication_data_type sets the dtype of all sent gradients",
        )
    }

    enabled: Flag = Field(False, description="forward runs under torch.autocast")
    dtype: HalfDtype = Field("bf16", description="the dtype of autocast")

    def check_with(self, config: Precisions, report: Report) -> None:
        """See `Section.check_with`. Parameters of 16 bits are computed with in another precision."""
        for name in _half_dtypes(config) if self.enabled else ():
            already = " already" if self.dtype == name else ""
            report.notes.append(
                f"torch_autocast.enabled = true: parameters are {name}{already}; forward computes in "
                f"{self.dtype}, and operations such as softmax and losses in fp32"
            )


@final
class CommsLog(Section):
    """A log of the engine's collectives: `engine.comms_summary()`; and bytes in the report of printed steps."""

    enabled: Flag = Field(
        False,
        description="collectives are counted and timed; a step's report has the bytes that rank 0 sent by kind "
        "and how many of them to other hosts; with lossy messages also the ratio to exact ones, and the norm "
        "of what was not sent",
    )
    prof_all: Flag = Field(True, description="all operations are counted and timed")
    prof_ops: Names = Field(
        (),
        description='the operations that are counted and timed where prof_all is false, e.g. "all_reduce"',
    )
    verbose: Flag = Field(False, description="rank 0 logs a line for each collective")
    debug: Flag = Field(
        False,
        description="operations are counted separately by what they are of, e.g. a unit of the model",
    )


def _check_steps(value: int | tuple[int, int]) -> int | tuple[int, int]:
    if isinstance(value, tuple) and value[0] > value[1]:
        raise ValueError(f"must be {_STEPS_NEED}, the first not above the last")
    return value


_STEPS_NEED = "a whole number, at least 0, or a list [first, last] of two of them"
Steps = Annotated[
    Natural | Annotated[tuple[Natural, Natural], Field(fail_fast=True), TUPLE],
    needs(_STEPS_NEED),
    AfterValidator(_check_steps),
]


@final
class FlopsProfiler(Section):
    """Count the operations of a training step, by module."""

    others: ClassVar[Mapping[str, Entry]] = {
        "step": NoEffect(Natural, "profile_step chooses the step, here and in DeepSpeed")
    }

    enabled: Flag = Field(False, description="a step is profiled and printed")
    recompute_fwd_factor: NonNegative = Field(
        0.0,
        description="forwards that a backward runs again; only for a backward that the script calls itself, "
        "because others are counted",
    )
    profile_step: Steps = Field(
        1,
        description="updates before the profiled step: 1 is the second step; [first, last]: the mean of "
        "several steps",
    )
    module_depth: Annotated[int, Field(ge=-1), WHOLE] = Field(
        -1, description="depth down to which modules are printed; 0 is the model itself, -1 is all"
    )
    top_modules: Count = Field(
        1, description="classes of modules that are printed at each depth, those that take most"
    )
    detailed: Flag = Field(True, description="the tree of modules is printed")
    output_file: str | None = Field(None, description="rank 0 writes this file; null: it prints")

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last profiled step, counted from 0."""
        found = self.profile_step
        return found if isinstance(found, tuple) else (found, found)


AUTO_MODULES = "auto"  # in a list of names: those that the model's class names


def _read_modules(value: object) -> object:
    if isinstance(value, str):
        return (AUTO_MODULES,) if value.casefold() == AUTO_MODULES else value
    return tuple(value) if isinstance(value, list) else value


def _check_patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        try:
            check_expression(pattern.replace("*", ".*"))
        except ValueError as error:
            raise ValueError(f'must be parts of names; "{pattern}" {error}') from None
        if not pattern:
            raise ValueError("must be parts of names; an empty text would match every name")
    return value


_NAMES_NEED = 'a list of parts of names or classes, such as ["mlp.gate.weight", "LayerNorm"]'
_Patterns = Annotated[Names, AfterValidator(_check_patterns)]
Patterns = Annotated[_Patterns, needs(_NAMES_NEED)]
Modules = Annotated[_Patterns, needs(f'"auto" or {_NAMES_NEED}'), BeforeValidator(_read_modules)]


@final
class DataTypes(Section):
    """Dtypes of gradients and buffers, and modules that stay fp32 in 16-bit training."""

    own_auto: ClassVar[frozenset[str]] = frozenset({"keep_in_fp32_modules"})

    grad_accum_dtype: Dtype | None = Field(
        None, description="the dtype in which gradients of several micro-batches are summed"
    )
    param_dtype: Dtype | None = Field(
        None, description="must equal the precision that fp16 or bf16 enables"
    )
    buffer_dtype: Dtype | None = Field(
        None,
        description="the dtype of floating-point buffers, without rotary frequencies and what stays fp32; "
        "null: that of the parameters",
    )
    keep_in_fp32_modules: Modules = Field(
        (),
        description="parameters and buffers that stay fp32 in 16-bit training, by parts of their names or the "
        "class of a module; auto: what the model's class names, as transformers reads it",
    )
    fp32_outputs: Patterns = Field(
        (), description="those of them whose outputs are fp32 as well, such as routers and heads"
    )

    @property
    def fp32_patterns(self) -> tuple[str, ...]:
        """What keep_in_fp32_modules names itself."""
        return tuple(name for name in self.keep_in_fp32_modules if name != AUTO_MODULES)

    def check_with(self, config: KeptPrecisions, report: Report) -> None:
        """See `Section.check_with`. The precision of parameters, and what would round those that stay fp32."""
        enabled = _half_dtypes(config)
        actual = [*enabled, "fp32"][0]
        if len(enabled) < 2 and self.param_dtype not in (None, actual):
            report.complain(
                "data_types.param_dtype",
                self.param_dtype,
                f"must be {actual}, the precision that the config switches on; remove it or set "
                "fp16.enabled or "
                "bf16.enabled to match",
            )
        kept = list(self.keep_in_fp32_modules)
        key = "data_types.keep_in_fp32_modules"
        if self.fp32_outputs and not self.fp32_patterns:
            report.complain(
                "data_types.fp32_outputs",
                list(self.fp32_outputs),
                f"names modules of {key}, which has no names; add them there, or remove the key",
            )
        if kept and not enabled:
            report.notes.append(f"{key} has no effect: the whole model trains in fp32")
        if not (kept and enabled):
            return
        zero, one_bit = config.zero_optimization, config.optimizer_type in ONE_BIT_OPTIMIZERS
        weights = "zero_quantized_weights", "zero_quantized_nontrainable_weights"
        rounding: dict[str, object] = {
            "torch_autocast.enabled": config.torch_autocast.enabled,
            **{
                f"zero_optimization.{each}": getattr(zero, each)
                for each in [*weights, "zero_quantized_gradients"]
            },
            "optimizer.type": one_bit and config.optimizer_type,
        }
        for other, value in rounding.items():
            if value:
                report.complain(
                    other, value, f"rounds what {key} keeps in fp32; remove one of the two keys"
                )


@final
class DataPacking(Section):
    """Samples of training_data are packed into rows; a micro-batch is a number of rows."""

    tokens: Natural = Field(0, description="tokens of a row; 0: samples are not packed")
    columns: Object = Field(
        {"input_ids": 0, "labels": -100},
        description="the columns of a sample that are packed, each with the value of its padding; labels that "
        "a sample lacks are its first column",
    )
    pad_to: Natural = Field(
        0,
        description="a micro-batch is padded to a multiple of so many tokens; 0: to tokens, always",
    )
    drop_longer: Flag = Field(
        False, description="samples with more tokens than a row are dropped; else they are an error"
    )
    cu_seqlens: Flag = Field(
        False, description="a micro-batch has cu_seqlens, where each of its samples begins"
    )
    seed: Natural = Field(0, description="of the order of the samples")

    def check_with(self, config: object, report: Report) -> None:
        """See `Section.check_with`. There is a column, and values of padding are numbers."""
        if self.tokens and not self.columns:
            report.complain("data_packing.columns", {}, 'name a column, such as {"input_ids": 0}')
        for name, pad in self.columns.items():
            is_number = isinstance(pad, int | float) and not isinstance(pad, bool)
            if not (is_number and abs(pad) < LIMIT):
                report.complain(
                    f"data_packing.columns.{name}",
                    pad,
                    "must be the value of its padding, a finite number such as 0",
                )


@final
class ActivationCheckpointing(Section):
    """Recompute the activations of the model's blocks in backward; see the rules for what enables it."""

    others: ClassVar[Mapping[str, Entry]] = {
        "contiguous_memory_optimization": NoEffect(
            Flag, "kept inputs need no common buffer", same=(False,)
        ),
        "number_checkpoints": NoEffect(Natural | Flag, "xds finds the blocks in the model"),
        "profile": NoEffect(Flag, "use wall_clock_breakdown", same=(False,)),
        "synchronize_checkpoint_boundary": NoEffect(
            Flag, "there is nothing to synchronize", same=(False,)
        ),
    }

    enabled: Flag = Field(
        False, description="the activations of the model's blocks are recomputed in backward"
    )
    partition_activations: Flag = Field(
        False,
        description="each tensor rank keeps its share of the inputs of blocks; no effect on one tensor rank",
    )
    cpu_checkpointing: Flag = Field(
        False,
        description="the inputs of recomputed blocks are in host memory between forward and backward",
    )


@final
class Checkpoint(Section):
    """How `save_checkpoint` writes checkpoints, and how many it keeps."""

    own_auto: ClassVar[frozenset[str]] = frozenset({"interval"})
    others: ClassVar[Mapping[str, Entry]] = {
        "parallel_write": Group(
            "which ranks write",
            {"pipeline_stage": NoEffect(Flag, "every rank writes its share", same=(False,))},
        ),
        "use_node_local_storage": Refused(
            Flag,
            "a folder on each node was removed; set it to false, and save into a folder that all ranks share",
            harmless=(False,),
        ),
        "checkpoint_serialization": NoEffect(
            Flag, "checkpoints are safetensors files and JSON; nothing is pickled", same=(True,)
        ),
        "async_io": NoEffect(Flag, "checkpoint.async_save writes in the background", same=(False,)),
        "writer": NoEffect(Object, "there is only one writer"),
    }

    tag_validation: Annotated[Literal["fail", "warn", "ignore"], ANY_CASE] = Field(
        "fail",
        description="ranks that give save_checkpoint different tags: fail refuses; warn and ignore save under "
        "the tag of rank 0, with a warning or without",
    )
    load_universal: Flag = Field(
        False,
        description="deepspeed's load_checkpoint takes the tag in `latest_universal`; checkpoints load at "
        "any stage and number of ranks without it",
    )
    async_save: Flag = Field(
        False,
        description="save_checkpoint returns after the states are copied to host memory; they are written in "
        "the background",
    )
    keep_last: Natural = Field(
        0,
        description="how many checkpoints are kept among those whose tags differ only in their numbers; 0 "
        "keeps all",
    )
    interval: (
        Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | Literal["auto"] | None
    ) = Field(
        None,
        description="seconds from a save until engine.should_save() is true, on all ranks after the same step. "
        '"auto": the best for what saves have cost and how often ranks have failed',
    )
    preemption_save_dir: str = Field(
        "",
        description="after SIGTERM or SIGUSR1 to any rank, all ranks save there at the same step and exit "
        'with code 143; "": such a signal ends the process as usual',
    )
    preemption_seconds: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = Field(
        30.0,
        description="a rank that has not saved this many seconds after its signal exits without saving; the "
        "launcher waits as long",
    )


@final
class TensorBoard(Section):
    """Scalars for TensorBoard, written by rank 0."""

    enabled: Flag = Field(False, description="scalars are written for TensorBoard")
    output_path: str = Field("", description="folder of the event files")
    job_name: str = Field("xds", description="name of the sub-folder")


@final
class Wandb(Section):
    """Scalars for Weights & Biases, sent by rank 0."""

    enabled: Flag = Field(False, description="scalars are sent to Weights & Biases")
    group: str | None = Field(None, description="group of runs")
    team: str | None = Field(None, description="team, also called entity")
    project: str = Field("xds", description="project")


@final
class CsvMonitor(Section):
    """Scalars as CSV files, written by rank 0. The column "step" holds global samples, as in DeepSpeed."""

    enabled: Flag = Field(
        False,
        description="scalars are written as CSV files, one for each name, with the columns step and value",
    )
    output_path: str = Field("", description="folder of the files")
    job_name: str = Field("xds", description="name of the sub-folder")


@final
class Comet(Section):
    """Scalars for Comet, sent by rank 0."""

    enabled: Flag = Field(False, description="scalars are sent to Comet")
    samples_log_interval: Count = Field(100, description="samples between two reports")
    project: str | None = Field(None, description="project")
    workspace: str | None = Field(None, description="workspace")
    api_key: str | None = Field(None, description="key; better set COMET_API_KEY", repr=False)
    experiment_name: str | None = Field(None, description="name of the experiment")
    experiment_key: str | None = Field(None, description="key of an experiment to continue")
    online: Flag | None = Field(None, description="false keeps the data on this machine")
    mode: str | None = Field(None, description="get, create or get_or_create")


@final
class Throughput(Section):
    """Samples per second."""

    enabled: Flag = Field(True, description="throughput is measured")
    synchronized: Flag = Field(
        True, description="the device is synchronized before the measurement"
    )


@final
class Timers(Section):
    """Measurements besides wall_clock_breakdown."""

    throughput: Throughput = nested(Throughput, "samples per second")
