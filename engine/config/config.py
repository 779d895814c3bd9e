"""The config of an engine: all sections, read from JSON and checked as a whole.

It uses DeepSpeed's keys with DeepSpeed's meaning. `Config.load` collects every complaint about a file
before it raises. `Config.resolve` fills in the batch sizes once the number of ranks is known. Nothing here
imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from math import lcm
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import BeforeValidator, Field

from ...compression.config import Float8
from ...compression.training.config import CompressionTraining, QuantizeTraining
from ...experts.config import ExpertParallel
from ...offload.config import Aio
from ...ops.comm.config import Communication
from ...ops.config import Ops
from ...ops.optim.config import REGISTERED
from ...ops.sparse_attention.config import SparseAttention
from ...ops.watch.config import WatchConfig
from ...outer.config import Outer
from ...pipe.config import ONE_STAGE, Pipeline
from ...recovery.config import Recovery
from ...tensor.config import LongSequences, TensorParallel
from ...utils.errors import ConfigError
from ...utils.schema.section import Entry, Report, Section, nested, read_section, subsection
from ...utils.schema.values import (
    ANY_CASE,
    LIMIT,
    Count,
    Dtype,
    Flag,
    Natural,
    NonNegative,
    needs,
    shown,
)
from ...zero.config import ZeroConfig
from ..data.config import BATCHING, DataEfficiency
from ..dropping.config import CurriculumLearning, ProgressiveLayerDrop
from ..elastic.config import Elasticity
from ..generation.config import HybridEngine
from .auto import fill_auto, note_auto
from .autotuning import Autotuning
from .batch import COMPUTED, batch_of
from .compile import Compile
from .optimizer import OptimizerConfig
from .refused import TOP_LEVEL_KEYS
from .scheduler import SchedulerConfig, warmup_steps
from .sections import (
    ActivationCheckpointing,
    Bf16,
    Checkpoint,
    Comet,
    CommsLog,
    CsvMonitor,
    DataPacking,
    DataTypes,
    FlopsProfiler,
    Fp16,
    TensorBoard,
    Timers,
    TorchAutocast,
    Wandb,
)
from .text import read_source
from .unknown import ConfigReport

MOST_NAMES = 8  # of keys, in a line of the log


def _is_never(value: object) -> bool:
    return value in ("inf", "Infinity") or (isinstance(value, (int, float)) and value >= LIMIT)


Interval = Annotated[
    Count | None,
    needs("a whole number, at least 1, or Infinity for never"),
    BeforeValidator(lambda value: None if _is_never(value) else value),
]
FlagOrNumber = Annotated[  # DeepSpeed's scripts set it to 1
    Flag,
    BeforeValidator(lambda value: bool(value) if type(value) is int and value in (0, 1) else value),
]


@final
class Config(Section):
    """A checked config. Attributes are the top-level keys of the JSON; see docs/config.md.

    `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` are 0
    where the file does not give them; after `resolve` all three are set.
    """

    others: ClassVar[Mapping[str, Entry]] = TOP_LEVEL_KEYS
    aliases: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}
    results: ClassVar[frozenset[str]] = frozenset(
        {"source", "notes", "without_effect", "auto_keys", "world_size", "data_parallel_ranks"}
    )

    train_batch_size: Count = Field(0, description="samples per step, over all ranks")
    train_micro_batch_size_per_gpu: Count = Field(
        0, description="samples per data-parallel rank in one forward and backward"
    )
    gradient_accumulation_steps: Count = Field(
        0, description="forward and backward passes before one update"
    )
    managed_gradient_accumulation: Flag = Field(
        True, description="the engine counts the passes; false makes every step() an update"
    )
    data_parallel_size: Count | None = Field(
        None, description="must equal the number of data-parallel ranks"
    )
    steps_per_print: Interval = Field(
        None, description="updates between two progress lines; null or Infinity for never"
    )
    wall_clock_breakdown: Flag = Field(False, description="each part of a step is timed and logged")
    memory_breakdown: Flag = Field(False, description="memory is logged with each progress line")
    report_folder: str = Field(
        "",
        description="rank 0 appends a record of the run to run.jsonl in this folder, for `xds report`; "
        '"": there is no record',
    )
    dump_state: Flag = Field(False, description="the resolved config is logged at the start")
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None, ANY_CASE
    ] = Field(
        None, description="what rank 0 shows of xds's messages; null: info; others show warnings"
    )
    gradient_clipping: NonNegative = Field(
        0.0, description="gradients are scaled down to this global norm; 0 for none"
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], ANY_CASE] = Field(
        "mean", description="gradients are averaged over the ranks, or summed"
    )
    communication_data_type: Dtype | None = Field(
        None, description="the dtype in which gradients are sent; null: their own dtype"
    )
    sequence_parallel_size: Count = Field(
        1, description="ranks that share the tokens of each sequence"
    )
    seq_parallel_communication_data_type: Dtype | None = Field(
        None, description="the dtype in which sequence ranks send heads; null: their own dtype"
    )
    zero_allow_untested_optimizer: FlagOrNumber = Field(
        False, description="any torch optimizer may be sharded, at the user's risk"
    )
    dataloader_drop_last: Flag = Field(
        False, description="the last, smaller batch of an epoch is dropped"
    )
    dataloader_num_workers: Natural = Field(
        0,
        description="processes of each rank that read `training_data`; 0: the rank itself reads it",
    )
    optimizer: OptimizerConfig | None = Field(
        None, description="the optimizer, unless the script passes one"
    )
    scheduler: SchedulerConfig | None = Field(
        None, description="the learning-rate schedule, unless the script passes one"
    )
    fp16: Fp16 = nested(Fp16)
    bf16: Bf16 = nested(Bf16)
    comms_logger: CommsLog = nested(CommsLog)
    flops_profiler: FlopsProfiler = nested(FlopsProfiler)
    torch_autocast: TorchAutocast = nested(TorchAutocast)
    float8: Float8 = nested(Float8)
    data_types: DataTypes = nested(DataTypes)
    data_packing: DataPacking = nested(DataPacking)
    data_efficiency: DataEfficiency = nested(DataEfficiency)
    progressive_layer_drop: ProgressiveLayerDrop = nested(ProgressiveLayerDrop)
    curriculum_learning: CurriculumLearning = nested(CurriculumLearning)
    hybrid_engine: HybridEngine = nested(HybridEngine)
    zero_optimization: ZeroConfig = nested(ZeroConfig)
    activation_checkpointing: ActivationCheckpointing = nested(ActivationCheckpointing)
    pipeline: Pipeline = nested(Pipeline)
    tensor_parallel: TensorParallel = nested(TensorParallel)
    expert_parallel: ExpertParallel = nested(ExpertParallel)
    sequence: LongSequences = nested(LongSequences)
    sparse_attention: SparseAttention | None = Field(
        None, description="attention over the blocks of a layout; null: the model's own attention"
    )
    compression_training: CompressionTraining = nested(CompressionTraining)
    quantize_training: QuantizeTraining = nested(QuantizeTraining)
    aio: Aio = nested(Aio)
    elasticity: Elasticity = nested(Elasticity)
    autotuning: Autotuning = nested(Autotuning)
    checkpoint: Checkpoint = nested(Checkpoint)
    recovery: Recovery = nested(Recovery)
    outer: Outer | None = Field(
        None,
        description="groups of ranks train alone and meet every so many steps; null: no groups",
    )
    compile: Compile = nested(Compile)
    ops: Ops = nested(Ops)
    communication: Communication = nested(Communication)
    watch: WatchConfig = nested(WatchConfig)
    tensorboard: TensorBoard = nested(TensorBoard)
    wandb: Wandb = nested(Wandb)
    csv_monitor: CsvMonitor = nested(CsvMonitor)
    comet: Comet = nested(Comet)
    timers: Timers = nested(Timers)

    source: str = Field("config", description="where the config came from")
    notes: tuple[str, ...] = Field((), description="effects that the file does not show")
    without_effect: tuple[tuple[str, str], ...] = Field(
        (), description="keys that are accepted without effect, each with the reason"
    )
    auto_keys: tuple[str, ...] = Field(
        (), description='keys whose "auto" no integration has filled'
    )
    world_size: int = Field(0, description="all ranks; 0 until resolved")
    data_parallel_ranks: int = Field(
        0, description="world_size divided by the ranks of one model; 0 until resolved"
    )

    @classmethod
    def load(
        cls,
        source: object,
        *,
        auto: Mapping[str, Any] | None = None,
        world_size: int | None = None,
    ) -> Config:
        """Read a config: a path, JSON text, base64 of it, a dict (never changed) or a Config.

        Args:
            auto: values for keys whose value is "auto", by full path.
            world_size: all ranks; if given, the result is resolved.

        Raises:
            ConfigError: every complaint at once. UsageError: `auto` is no dict of values by path.

        Rank 0 warns once which keys have no effect.
        """
        config = parse_config(source, auto=auto, world_size=world_size)
        if config is not source:
            log_idle_keys(config, "WARNING")
        return config

    def as_dict(self) -> dict[str, Any]:
        """The config as JSON values, which `load` reads; batch sizes that are not given are null."""
        unset = {key: None for key in COMPUTED if not getattr(self, key)}
        return {**super().as_dict(), **unset}

    def resolve(self, world_size: int = 1) -> Config:
        """This config with the three batch sizes filled in for `world_size` ranks.

        The data-parallel ranks are `world_size` divided by the pipeline stages.

        Raises:
            ConfigError: these ranks cannot share the batch, or are not a multiple of the stages.
        """
        complaints, sizes = batch_of(self, world_size)
        if complaints:
            raise ConfigError(complaints, self.source)
        return self if sizes["world_size"] == self.world_size else self.model_copy(update=sizes)

    @property
    def num_groups(self) -> int:
        """The groups of ranks that train alone."""
        return 1 if self.outer is None else self.outer.groups

    @property
    def model_ranks(self) -> int:
        """The ranks that train on one batch: pipeline stages x sequence ranks x tensor ranks."""
        return self.pipeline.stages * self.sequence_parallel_size * self.tensor_parallel.size

    # what the rules of sections read

    @property
    def optimizer_type(self) -> str:
        """The type of the optimizer; "" where the script passes it."""
        return "" if self.optimizer is None else str(self.optimizer.type)

    @property
    def state_dtype(self) -> str:
        """Of the optimizer's states that have an element for each of a parameter: "fp32", "bf16" or "int8"."""
        if self.bf16.bf16_optimizer_states:
            return "bf16"
        return "fp32" if self.optimizer is None else self.optimizer.state_dtype

    @property
    def needs_whole_tensors(self) -> bool:
        """The optimizer uses norms or products of whole tensors."""
        found = REGISTERED.get(self.optimizer_type)
        return found is not None and not found.is_elementwise

    @property
    def warmup_steps(self) -> int:
        """The steps in which the schedule raises the learning rate."""
        return warmup_steps(self.scheduler)

    @property
    def pipeline_stages(self) -> int:
        return self.pipeline.stages

    @property
    def tensor_ranks(self) -> int:
        return self.tensor_parallel.size

    @property
    def recomputes_blocks(self) -> bool:
        """Every block of the model is recomputed in backward."""
        return self.activation_checkpointing.enabled

    @property
    def drops_tokens(self) -> bool:
        return self.data_efficiency.drops_tokens

    def with_stages(self, stages: int) -> Config:
        """This config, which is not resolved, with the number of pipeline stages that a model gives.

        Raises:
            ConfigError: the file gives another number, or settings that several stages do not allow.
        """
        section, report = self.pipeline, Report()
        if stages == section.stages:
            return self
        if section.stages != 1:
            text = f"must equal the stages of the model ({stages}); remove it, or change one of the two"
            report.complain("pipeline.stages", section.stages, text)
        notes = tuple(note for note in self.notes if not note.endswith(ONE_STAGE))
        pipeline = section.model_copy(update={"stages": stages})
        return self._changed({"pipeline": pipeline, "notes": notes}, report)

    def with_tensor_ranks(self, ranks: int) -> Config:
        """This config, which is not resolved, with the number of tensor ranks that the script gives.

        Raises:
            ConfigError: the file gives another number, or settings that do not allow it.
        """
        section, report = self.tensor_parallel, Report()
        if ranks == section.size:
            return self
        if section.size != 1:
            text = f"must equal the number that the script gives ({ranks}); remove it, or change one of the two"
            report.complain("tensor_parallel.tp_size", section.size, text)
        return self._changed(
            {"tensor_parallel": section.model_copy(update={"tp_size": ranks})}, report
        )

    def with_sequences(self, ranks: int, *, in_eval: bool = True) -> Config:
        """This config, which is not resolved, with so many sequence ranks, whose batches the script cuts.

        Args:
            in_eval: it cuts them after `eval()` as well.

        Raises:
            ConfigError: the file has settings that do not allow it.
        """
        update = {"cut_by": "script", "cut_in_eval": in_eval and self.sequence.cut_in_eval}
        section = self.sequence.model_copy(update=update)
        return self._changed({"sequence_parallel_size": ranks, "sequence": section}, Report())

    def _changed(self, update: dict[str, Any], report: Report) -> Config:
        """A copy with other values. Raises ConfigError: `report` has complaints, or the copy gets some."""
        changed = self.model_copy(update=update)
        changed.check_sections(report)
        if report.complaints:
            raise ConfigError(report.complaints, self.source)
        return changed

    def check_sections(self, report: Report) -> None:
        """Call `check_with` of every section."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, Section):
                section.check_with(self, report)


def parse_config(
    source: object,
    *,
    auto: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    one_replica: bool = False,
) -> Config:
    """`Config.load` without logging. `one_replica` stands for the number of ranks that hold one model."""
    if isinstance(source, Config):
        return source if world_size is None else source.resolve(world_size)
    data, name, complaints = read_source(source)
    report = ConfigReport(complaints=complaints, model=Config)
    if isinstance(data, dict):
        _write_out(data, report)
        fill_auto(data, {} if auto is None else auto, canonical_path, report)
    read = read_section(Config, data, "", report)
    if read is None or report.complaints:
        raise ConfigError(report.complaints, name, report.without_effect)
    for section in (read.optimizer, read.scheduler):
        if section is not None and not report.complaints:
            section.check(report)
    if report.complaints:
        raise ConfigError(report.complaints, name, report.without_effect)
    zero = read.zero_optimization.canonical(report)
    config = read.model_copy(update={"zero_optimization": zero})
    config.check_sections(report)
    _note_nulls(data, report)
    results: dict[str, Any] = {"auto_keys": tuple(report.auto_keys)}
    note_auto(report, config.model_copy(update=results), canonical_path)
    if one_replica:
        # of experts on several ranks, each rank has a part of the model
        stages = config.pipeline.stages
        world_size = stages * lcm(config.model_ranks // stages, config.expert_parallel.num_ranks)
    if world_size is not None:
        wrong, sizes = batch_of(config.model_copy(update=results), world_size)
        report.complaints.extend(each for each in wrong if each not in report.complaints)
        results.update(sizes)
    if report.complaints:
        raise ConfigError(report.complaints, name, report.without_effect)
    results.update(
        source=name, notes=tuple(report.notes), without_effect=tuple(report.without_effect)
    )
    return config.model_copy(update=results)


def _write_out(data: dict[str, Any], report: Report) -> None:
    """Short forms of DeepSpeed's configs: a flag for a stage, and a section that is there for its flag."""
    zero, recompute = data.get("zero_optimization"), data.get("activation_checkpointing")
    if isinstance(zero, bool):
        data["zero_optimization"] = {"stage": int(zero)}
        report.notes.append(f"zero_optimization = {shown(zero)}: means stage {int(zero)}")
    if not isinstance(recompute, dict):
        return
    if recompute.get("enabled") is None:
        flags = [value for value in recompute.values() if isinstance(value, bool)]
        recompute["enabled"] = any(flags) or not flags
        if not recompute["enabled"]:
            report.notes.append(
                "activation_checkpointing: all its flags are false, so nothing is recomputed; set enabled to "
                "true to recompute the model's blocks in backward"
            )
    if recompute["enabled"] is True:
        report.notes.append(
            "activation_checkpointing: the model's blocks are recomputed in backward "
            "(in DeepSpeed the section alone does nothing)"
        )


def _note_nulls(data: Mapping[str, Any], report: Report) -> None:
    """Keys where null, or nothing, means another value than in DeepSpeed."""
    given: Any = data
    for key in BATCHING.split("."):
        given = given.get(key) or {}
    if given.get("lr_scaling_method", "") is None:
        report.notes.append(
            f'{BATCHING}.lr_scaling_method = null: means the default, "linear"; DeepSpeed takes it for "none"'
        )
    if data.get("gradient_clipping") is None:
        report.notes.append(
            "gradient_clipping is not given: gradients are not clipped "
            "(DeepSpeed clips at 1.0 since version 0.19)"
        )


def canonical_path(path: str) -> str:
    """A key path with every alias replaced by the name of its field."""
    model: type[Section] | None = Config
    parts = []
    for part in path.split("."):
        name = part if model is None else model.aliases.get(part, part)
        known = model is not None and name in model.model_fields
        model = subsection(model, name) if known and model is not None else None
        parts.append(name)
    return ".".join(parts)


def log_idle_keys(config: Config, level: str) -> None:
    """Log, in one line, which keys of `config` have no effect. Rank 0 says it, once for each config."""
    idle = config.without_effect
    if idle and os.environ.get("RANK", "0") == "0":
        path, why = idle[0]
        text = f"{path} has no effect: {why}"
        if len(idle) > 1:
            names = ", ".join(path for path, _ in idle[:MOST_NAMES])
            more = f" and {len(idle) - MOST_NAMES} more" if len(idle) > MOST_NAMES else ""
            text = f"{len(idle)} keys have no effect ({names}{more}); `xds check` says why"
        _log_once(level, f"{config.source}: {text}")


@cache
def _log_once(level: str, text: str) -> None:
    import logging  # imported late: a tenth of the time of `xds check`, which logs nothing

    logging.getLogger("xds").log(logging.getLevelName(level), "%s", text)
