"""The config of an engine: all sections, read from JSON and checked as a whole.

It uses DeepSpeed's keys with DeepSpeed's meaning. `Config.load` collects every complaint about a file
before it raises. `Config.resolve` fills in the batch sizes once the number of ranks is known. Nothing here
imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from ...offload.config import Aio
from ...ops.comm.config import Communication
from ...ops.config import Ops
from ...ops.watch.config import WatchConfig
from ...pipe.config import ONE_STAGE, Pipeline
from ...tensor.config import LongSequences, TensorParallel
from ...utils.errors import ConfigError
from ...utils.schema.keys import Entry, Report
from ...utils.schema.rules import FLAG, NULL, Rule, dtype_name, either, number, one_of, shown, whole
from ...utils.schema.section import AsRead, Section, read_section, subsection
from ...zero.config import ZeroConfig
from .auto import COMPUTED, fill_auto, note_auto
from .batch import DATA_RANKS, WORLD_SIZE, solve_batch
from .checkpoint import Checkpoint
from .compile import Compile
from .elasticity import Elasticity, elastic_batch
from .meanings import Meanings
from .messages import complaints_of_ranks
from .optimizer import OptimizerConfig, check_optimizer
from .profiling import FlopsProfiler
from .ranks import check_micro_batches, check_slices, mesh_of
from .refused import TOP_LEVEL_KEYS
from .scheduler import SchedulerConfig, check_scheduler
from .sections import (
    ActivationCheckpointing,
    Bf16,
    Comet,
    CommsLog,
    CsvMonitor,
    DataTypes,
    Fp16,
    TensorBoard,
    Timers,
    TorchAutocast,
    Wandb,
)
from .short_forms import write_out
from .text import read_source
from .together import check_sequences_of, check_stages_of, check_together

Flag = Annotated[bool, FLAG]
Count = Annotated[int, whole(1)]


def _read_flag_or_number(value: object) -> object:
    return bool(value) if isinstance(value, int) and value in (0, 1) else FLAG.read(value)


FLAG_OR_NUMBER = Rule(FLAG.need, _read_flag_or_number)  # for keys that DeepSpeed's scripts set to 1


def _read_interval(value: object) -> int | None:
    """Integrations write inf (also as text) for "never"."""
    if value in (float("inf"), "inf", "Infinity"):
        return None
    return None if value is None else int(whole(1).read(value))


_MOST_NAMES = 8  # of keys, in a line of the log
_INTERVAL = Rule("a whole number, at least 1, or Infinity for never", _read_interval)


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
    data_parallel_size: Annotated[int | None, either(whole(1), NULL)] = Field(
        None, description="must equal the number of data-parallel ranks"
    )
    steps_per_print: Annotated[int | None, _INTERVAL] = Field(
        None, description="updates between two progress lines; null or Infinity for never"
    )
    wall_clock_breakdown: Flag = Field(False, description="each part of a step is timed and logged")
    memory_breakdown: Flag = Field(False, description="memory is logged with each progress line")
    dump_state: Flag = Field(False, description="the resolved config is logged at the start")
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None,
        either(one_of("debug", "info", "warning", "error", "critical"), NULL),
    ] = Field(
        None, description="what rank 0 shows of xds's messages; null: info; others show warnings"
    )
    gradient_clipping: Annotated[float, number(0)] = Field(
        0.0, description="gradients are scaled down to this global norm; 0 for none"
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], one_of("mean", "sum")] = Field(
        "mean", description="gradients are averaged over the ranks, or summed"
    )
    communication_data_type: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, either(dtype_name("fp32", "fp16", "bf16"), NULL)
    ] = Field(None, description="the dtype in which gradients are sent; null: their own dtype")
    sequence_parallel_size: Annotated[int, whole(1)] = Field(
        1, description="ranks that share the tokens of each sequence"
    )
    seq_parallel_communication_data_type: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, either(dtype_name("fp32", "fp16", "bf16"), NULL)
    ] = Field(
        None, description="the dtype in which sequence ranks send heads; null: their own dtype"
    )
    zero_allow_untested_optimizer: Annotated[bool, FLAG_OR_NUMBER] = Field(
        False, description="any torch optimizer may be sharded, at the user's risk"
    )
    dataloader_drop_last: Flag = Field(
        False, description="the last, smaller batch of an epoch is dropped"
    )
    optimizer: Annotated[OptimizerConfig | None, AsRead()] = Field(
        None, description="the optimizer, unless the script passes one"
    )
    scheduler: Annotated[SchedulerConfig | None, AsRead()] = Field(
        None, description="the learning-rate schedule, unless the script passes one"
    )
    fp16: Annotated[Fp16, AsRead()] = Field(default_factory=Fp16.model_construct)
    bf16: Annotated[Bf16, AsRead()] = Field(default_factory=Bf16.model_construct)
    comms_logger: Annotated[CommsLog, AsRead()] = Field(default_factory=CommsLog.model_construct)
    flops_profiler: Annotated[FlopsProfiler, AsRead()] = Field(
        default_factory=FlopsProfiler.model_construct
    )
    torch_autocast: Annotated[TorchAutocast, AsRead()] = Field(
        default_factory=TorchAutocast.model_construct
    )
    data_types: Annotated[DataTypes, AsRead()] = Field(default_factory=DataTypes.model_construct)
    zero_optimization: Annotated[ZeroConfig, AsRead()] = Field(
        default_factory=ZeroConfig.model_construct
    )
    activation_checkpointing: Annotated[ActivationCheckpointing, AsRead()] = Field(
        default_factory=ActivationCheckpointing.model_construct
    )
    pipeline: Annotated[Pipeline, AsRead()] = Field(default_factory=Pipeline.model_construct)
    tensor_parallel: Annotated[TensorParallel, AsRead()] = Field(
        default_factory=TensorParallel.model_construct
    )
    sequence: Annotated[LongSequences, AsRead()] = Field(
        default_factory=LongSequences.model_construct
    )
    aio: Annotated[Aio, AsRead()] = Field(default_factory=Aio.model_construct)
    elasticity: Annotated[Elasticity, AsRead()] = Field(default_factory=Elasticity.model_construct)
    checkpoint: Annotated[Checkpoint, AsRead()] = Field(default_factory=Checkpoint.model_construct)
    compile: Annotated[Compile, AsRead()] = Field(default_factory=Compile.model_construct)
    ops: Annotated[Ops, AsRead()] = Field(default_factory=Ops.model_construct)
    communication: Annotated[Communication, AsRead()] = Field(
        default_factory=Communication.model_construct
    )
    watch: Annotated[WatchConfig, AsRead()] = Field(default_factory=WatchConfig.model_construct)
    tensorboard: Annotated[TensorBoard, AsRead()] = Field(
        default_factory=TensorBoard.model_construct
    )
    wandb: Annotated[Wandb, AsRead()] = Field(default_factory=Wandb.model_construct)
    csv_monitor: Annotated[CsvMonitor, AsRead()] = Field(default_factory=CsvMonitor.model_construct)
    comet: Annotated[Comet, AsRead()] = Field(default_factory=Comet.model_construct)
    timers: Annotated[Timers, AsRead()] = Field(default_factory=Timers.model_construct)

    source: str = Field("config", description="where the config came from")
    notes: tuple[str, ...] = Field((), description="effects that the file does not show")
    without_effect: tuple[tuple[str, str], ...] = Field(
        (), description="keys that are accepted without effect, each with the reason"
    )
    auto_keys: tuple[str, ...] = Field((), description='keys whose "auto" means the default')
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
            ConfigError: every complaint at once.

        Rank 0 warns once which keys have no effect.
        """
        config = parse_config(source, auto=auto, world_size=world_size)
        if config is not source:
            log_idle_keys(config, "WARNING")
        return config

    def resolve(self, world_size: int = 1) -> Config:
        """This config with the three batch sizes filled in for `world_size` ranks.

        The data-parallel ranks are `world_size` divided by the pipeline stages.

        Raises:
            ConfigError: these ranks cannot share the batch, or are not a multiple of the stages.
        """
        complaints, sizes = _batch(self, world_size)
        if complaints:
            raise ConfigError(complaints, self.source)
        return self if sizes["world_size"] == self.world_size else self.model_copy(update=sizes)

    @property
    def model_ranks(self) -> int:
        """The ranks that train on one batch: pipeline stages x sequence ranks x tensor ranks."""
        return self.pipeline.stages * self.sequence_parallel_size * self.tensor_parallel.size

    def with_stages(self, stages: int) -> Config:
        """This config, which is not resolved, with the number of pipeline stages that a model gives.

        Raises:
            ConfigError: the file gives another number, or settings that several stages do not allow.
        """
        own = self.pipeline.stages
        if stages == own:
            return self
        report = Report()
        if own != 1:
            report.complain(
                "pipeline.stages",
                own,
                f"must equal the number of stages of the model ({stages}); remove it, or change one of the two",
            )
        pipeline = self.pipeline.model_copy(update={"stages": stages})
        notes = tuple(note for note in self.notes if not note.endswith(ONE_STAGE))
        changed = self.model_copy(update={"pipeline": pipeline, "notes": notes})
        check_stages_of(changed, report)
        if report.complaints:
            raise ConfigError(report.complaints, self.source)
        return changed

    def with_tensor_ranks(self, ranks: int) -> Config:
        """This config, which is not resolved, with the number of tensor ranks that the script gives.

        Raises:
            ConfigError: the file gives another number, or settings that do not allow it.
        """
        own = self.tensor_parallel.size
        if ranks == own:
            return self
        report = Report()
        if own != 1:
            report.complain(
                "tensor_parallel.tp_size",
                own,
                f"must equal the number that the script gives ({ranks}); remove it, or change one of the two",
            )
        section = self.tensor_parallel.model_copy(update={"tp_size": ranks})
        changed = self.model_copy(update={"tensor_parallel": section})
        check_slices(section, None if self.optimizer is None else self.optimizer.type, report)
        if report.complaints:
            raise ConfigError(report.complaints, self.source)
        return changed

    def with_sequences(self, ranks: int, *, in_eval: bool = True) -> Config:
        """This config, which is not resolved, with so many sequence ranks, whose batches the script cuts.

        Args:
            in_eval: it cuts them after `eval()` as well.
        Raises:
            ConfigError: the file has settings that do not allow it.
        """
        update = {"cut_by": "script", "cut_in_eval": in_eval and self.sequence.cut_in_eval}
        section = self.sequence.model_copy(update=update)
        changed = self.model_copy(update={"sequence_parallel_size": ranks, "sequence": section})
        report = Report()
        check_sequences_of(changed, report)
        if report.complaints:
            raise ConfigError(report.complaints, self.source)
        return changed


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
    report = Report(complaints=complaints, meant=_meant)
    if not isinstance(data, dict):
        report.complain("config", data, "must be an object {...}")
        raise ConfigError(report.complaints, name)
    fill_auto(write_out(data, report), auto or {}, canonical_path, report)
    config: Config = _read(data, report)
    if report.complaints:  # what several sections say of one another could be their consequence
        raise ConfigError(report.complaints, name)
    config = check_together(config, data, report)
    note_auto(report, lambda path: _default_of(config, path))
    config = config.model_copy(update={"auto_keys": tuple(report.auto_keys)})
    sizes: dict[str, int] = {}
    if one_replica:
        world_size = config.model_ranks
    if world_size is not None:
        wrong, sizes = _batch(config, world_size)
        report.complaints.extend(each for each in wrong if each not in report.complaints)
    if report.complaints:
        raise ConfigError(report.complaints, name)
    results = {
        "source": name,
        "notes": tuple(report.notes),
        "without_effect": tuple(report.without_effect),
    }
    return config.model_copy(update={**results, **sizes})


def _read(data: dict[str, Any], report: Report) -> Config:
    """The sections of a file. Every value that cannot be read is in `report`."""
    config = read_section(Config, data, "", report)
    changes: dict[str, Any] = {}
    if config.optimizer is not None:
        changes["optimizer"] = check_optimizer(config.optimizer, report)
    if config.scheduler is not None:
        changes["scheduler"] = check_scheduler(config.scheduler, report)
    read: Config = config.model_copy(update=changes)
    return read


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


@cache
def _meanings() -> Meanings:
    return Meanings(Config)


def _meant(section: str, key: str, names: list[str]) -> str | None:
    return _meanings()(section, key, names)  # built only where some key is unknown


def _batch(config: Config, world_size: int) -> tuple[list[str], dict[str, int]]:
    """(complaints, sizes) for so many ranks."""
    if world_size < 1:
        return [f"world size = {world_size}: must be at least 1"], {}
    model_ranks = config.model_ranks
    try:
        mesh = mesh_of(
            config.pipeline, config.tensor_parallel, world_size, config.sequence_parallel_size
        )
    except ValueError as error:
        return [str(error)], {}
    ranks = mesh.data
    if config.elasticity.enabled:
        (train, micro, steps), complaints = elastic_batch(config.elasticity, ranks)
    else:
        (train, micro, steps), complaints = solve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            ranks,
            auto=tuple(key for key in config.auto_keys if key in COMPUTED),
            named=WORLD_SIZE if model_ranks == 1 else DATA_RANKS,
        )
    complaints += check_micro_batches(config.pipeline, steps)
    complaints += complaints_of_ranks(config.zero_optimization, mesh)
    wanted = config.data_parallel_size
    if wanted is not None and wanted != ranks:
        complaints.append(
            f"data_parallel_size = {wanted}: must equal the number of data-parallel ranks "
            f"({ranks}); remove it or start {wanted * model_ranks}"
        )
    return complaints, {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "world_size": world_size,
        "data_parallel_ranks": ranks,
    }


def _default_of(config: Config, path: str) -> str:
    found: Any = config
    for part in canonical_path(path).split("."):
        found = getattr(found, part, None)
    return shown(found)


def log_idle_keys(config: Config, level: str) -> None:
    """Log, in one line, which keys of `config` have no effect. Rank 0 says it, once for each config."""
    idle = config.without_effect
    if idle and os.environ.get("RANK", "0") == "0":
        path, why = idle[0]
        text = f"{path} has no effect: {why}"
        if len(idle) > 1:
            names = ", ".join(path for path, _ in idle[:_MOST_NAMES])
            more = f" and {len(idle) - _MOST_NAMES} more" if len(idle) > _MOST_NAMES else ""
            text = f"{len(idle)} keys have no effect ({names}{more}); `xds check` says why"
        _log_once(level, f"{config.source}: {text}")


@cache
def _log_once(level: str, text: str) -> None:
    import logging  # imported late: a tenth of the time of `xds check`, which logs nothing

    logging.getLogger("xds").log(logging.getLevelName(level), "%s", text)
