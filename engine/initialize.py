"""Reads the config once and assembles an engine: the only file that chooses a feature.

key of the config                      what it adds, imported only then
-------------------------------------  ---------------------------------------------------------------
pipeline, tensor_parallel,             parallel/division.py chooses pipeline.py, slices.py and
expert_parallel                        experts.py
tensor_parallel.vocab_parallel_lm_head parallel/slices.py: a check of the first losses
sequence_parallel_size                 parallel/sequences.py
sequence.tiled_mlp, tiled_loss         parallel/tiles.py
sparse_attention                       ops/sparse_attention/huggingface.py
offload_optimizer, offload_param       model/storage.py: the host's and the disk's stores
offload_optimizer.ratio = "auto"       zero/model/auto_ratio.py
zero_quantized_*, zero_hpz_*           parallel/messages.py: ZeRO++
optimizer.type = "OneBit..."           parallel/messages.py: one-bit messages
float8                                 model/float8.py: layers, and messages of their weights
compression_training,                  model/compressed_training.py
quantize_training
data_types.keep_in_fp32_modules        model/fp32_modules.py, in 16 bits
activation_checkpointing               model/recompute.py
compile                                model/compile.py, also at the first `engine.compile()`
scheduler                              optim/schedules.py
progressive_layer_drop,                dropping/plan.py
curriculum_learning,
data_efficiency.data_routing
tensorboard, wandb, csv_monitor, comet telemetry/monitor.py
report_folder                          telemetry/record.py
autotuning                             telemetry/experiment.py: timed steps, then the run ends
comms_logger, memory_breakdown,        telemetry/traffic.py, telemetry/memory.py, profiling/steps.py:
flops_profiler                         `StepReport` chooses them
checkpoint.preemption_save_dir         preemption.py
checkpoint.interval                    steps/save_interval.py
recovery                               recovering.py, recovery/
outer                                  meeting.py, outer/; with recovery living_groups.py
checkpoint                             checkpoint/, at the first save or load
watch                                  ops/watch/watcher.py, on several ranks
zero_optimization.stage = 3            generation/evaluation.py: what `engine.eval()` keeps gathered

argument of `initialize`               what it adds
-------------------------------------  ---------------------------------------------------------------
weights, or a model on meta            zero/construction/
training_data                          data/loaders.py; with data_packing data/packing.py and packing/;
                                       with data_efficiency.data_sampling data/curriculum.py, or
                                       data/dynamic_batches.py and optim/variable_batch.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..compression.config import ONE_BIT_OPTIMIZERS
from ..compression.scheme import BuildScheme, ExactScheme
from ..offload.stores import Stores
from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import agreeing
from ..ops.comm.mesh_groups import MeshGroups
from ..ops.comm.message_log import LogOptions
from ..ops.comm.opening import open_collectives
from ..utils.errors import ConfigError, UsageError, XdsError
from ..utils.host_memory import keep_freed_blocks, return_freed_blocks
from ..utils.quoting import quoted
from ..zero.layout.groups import FlatGroups, Policy
from ..zero.model.model_checks import check_model, move_model
from ..zero.model.sharded_model import ShardedModel
from ..zero.model.update import Updater
from .config.batch import mesh_of
from .config.config import Config
from .config.scheduler import warmup_steps
from .data.config import BATCHING, CURRICULUM
from .engine import Engine
from .means import StepMeans
from .model.arguments import (
    check_arguments,
    check_same_model,
    check_whole,
    has_compressed_layers,
    is_cut,
    is_part,
    optional_states,
    refuse_together,
    resolve_together,
    unwrap_weights,
    with_model,
)
from .model.compile import BlockCompiler
from .model.precision import (
    DTYPES,
    buffers_to_cast,
    check_statistics,
    policy_of,
    splits_masters,
)
from .optim.loss_scale import GradientFactor, build_loss_scale
from .optim.optimizers import (
    ClientOptimizer,
    Groups,
    as_shard_optimizer,
    check_masters,
    client_optimizer,
    count_states,
    load_kernels,
    named_optimizer,
    read_groups,
    split_by_kind,
)
from .parallel.division import LocalModel, divide
from .parallel.features import check_features
from .parallel.flat_groups import BuildPolicy
from .parts import (
    AfterSteps,
    KeptUnits,
    LoopFactory,
    LossCheck,
    ModelSchedules,
    OuterLoop,
    Packing,
    Parts,
    Preemption,
    Recovery,
    SaveInterval,
    UnevenForwards,
)
from .process.process import (
    is_launched,
    join,
    num_launched,
    num_sites,
    pick_device,
    rank_in_job,
    timeout_seconds,
)
from .steps.batch_loop import batch_loop
from .telemetry.report import Monitor, StepReport
from .telemetry.screen import log_notes, log_start, show_messages

if TYPE_CHECKING:
    from ..offload.host import HostStore
    from ..zero.model.auto_ratio import AutoRatio
    from .checkpoint.saver import Saver
    from .model.recompute import Recomputing
    from .optim.schedule_base import Scheduler
    from .parallel.messages import Messages
    from .parallel.sequences import Cutter
    from .telemetry.record import RunRecord

_LOAD_LATER = (
    "to ignore missing and extra names, leave out weights= and call xds.zero.load_weights(engine.module, "
    "weights, strict=False) afterwards"
)

log = logging.getLogger("xds")


def initialize(  # noqa: PLR0913 (the names users of DeepSpeed know)
    model: nn.Module,
    config: Any = None,
    *,
    optimizer: ClientOptimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    training_data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    group: dist.ProcessGroup | None = None,
    weights: Any = None,
    args: Any = None,
) -> Engine:
    """Wrap `model` in an engine that trains it as `config` says. A collective: every rank calls it.

    Starts torch.distributed from the launcher's environment unless it runs already. Rank 0's parameter and
    buffer values win. The model's parameters stay the same objects; their memory moves into flat buffers.

    Args:
        model: on any device, or on meta, or built in `xds.zero.Init`; it is moved to this rank's device.
        config: a path, JSON text, a dict (never changed), or a `Config`.
        optimizer: an optimizer without state, its class, or a callable that gets parameter groups; None
            takes the config's.
        model_parameters: the parameters to train, or groups of them; None is every trainable one.
        lr_scheduler: a scheduler of `optimizer`, or a callable that gets the optimizer; None takes the
            config's.
        training_data: a dataset; `engine.training_dataloader` then serves this rank's micro-batches. Or this
            rank's loader itself, if it has state_dict and load_state_dict.
        collate_fn: makes a micro-batch of a list of samples; None is torch's.
        group: the data-parallel ranks; None is all of them.
        weights: a state dict, a safetensors file or index, or a folder with one, to start from; each rank
            reads its own part. A model on the meta device gets its memory only then.
        args: an object with `deepspeed_config`, in place of `config`.

    Raises:
        ConfigError: every complaint about the config at once, before anything is allocated.
        UsageError: the model or the optimizer cannot be trained as asked, or ranks have different configs.
    """
    try:
        check_arguments(model, lr_scheduler=lr_scheduler, collate_fn=collate_fn, group=group)
        check_whole(model)
        config = with_model(Config.load(_config_source(config, args)), model)
    except XdsError as error:
        if is_launched():
            device = pick_device()
            world = join(device)
            refuse_together(error, group if isinstance(group, dist.ProcessGroup) else world, device)
        raise
    unwrap_weights(model)
    given = _Given(
        optimizer, model_parameters, lr_scheduler, training_data, collate_fn, weights, group
    )
    trains = is_part(model) or any(param.requires_grad for param in model.parameters())
    parts = _assemble(model, config, given, trains=trains)
    engine = Engine(parts)
    parts.report.follow(engine)
    parts.preemption.begin(engine)
    parts.recovery.begin()
    parts.outer.begin()
    for follower in parts.after_steps:
        follower.begin()
    _show_start(parts, optimizer)
    return engine


def place(
    model: nn.Module, config: Config, weights: Any = None
) -> tuple[LocalModel, MeshGroups, Collectives]:
    """This rank's part of `model` with its values, without an engine: for `xds.init_inference`. A collective.

    Nothing is moved to the device. A model on the meta device gets its memory here, and `weights` are read
    as `initialize` reads them. The last result is the group of all ranks.
    """
    check_arguments(model, lr_scheduler=None, collate_fn=None, group=None)
    check_whole(model)
    device = pick_device()
    world = join(device)
    show_messages(config.log_level)
    config = resolve_together(config, None, world, device, needs_section=False)
    log_notes(config, world.rank())
    collectives, mesh = _open_groups(config, world, device)
    check_same_model(model, collectives)
    policy = partial(policy_of, config, False)
    local = divide(model, config, mesh, collectives, policy, ExactScheme)
    with agreeing(collectives, "xds.init_inference"):
        _give_values(local.model, weights, local.groups, local.groups.data.policy, keeps_whole=True)
    local.start_proof(mesh, lambda module: nullcontext())
    return local, mesh, collectives


def _show_start(parts: Parts, given: ClientOptimizer | None) -> None:
    trains = parts.optimizer is not None
    num_states = count_states(parts.config.optimizer, given) if trains else 0
    log_start(parts.config, parts.sharded, num_states, parts.device, dist.get_backend())


@dataclass(frozen=True)
class _Given:
    """What the script passed to `initialize` beside model and config."""

    optimizer: ClientOptimizer | None
    model_parameters: Iterable[Any] | None
    lr_scheduler: Any
    training_data: Any
    collate_fn: Callable[[list[Any]], Any] | None
    weights: Any
    group: dist.ProcessGroup | None


def _assemble(model: nn.Module, config: Config, given: _Given, *, trains: bool) -> Parts:
    """The list of steps. Their order counts: values, then flat buffers, then hooks.

    A step that sends nothing may fail on one rank alone: it is inside `everywhere`, which then raises on all.
    """
    # the ranks, and a config that is the same on all
    device, num_sets = pick_device(), _num_sets(config)
    world = join(device, num_sets)
    group = given.group or world
    show_messages(config.log_level)
    needs_optimizer = trains and given.optimizer is None
    config = resolve_together(
        config,
        given.optimizer,
        group,
        device,
        needs_section=needs_optimizer,
        num_groups=num_sets,
    )
    log_notes(config, group.rank())
    outer, collectives, mesh = _open_outer(config, group, device)
    everywhere = partial(agreeing, collectives, "xds.initialize")
    with everywhere():
        compresses = _compresses(model, config, given)
    if not is_part(model):
        check_same_model(model, collectives)
    with everywhere():
        config, changes = _change(model, config, mesh)
        host = _host(config, device, given.optimizer)
        groups = None if is_part(model) else _groups(model, config, given)
    # the part of the model that this rank has
    keeps_a_part = (
        is_cut(model, config) or config.tensor_parallel.size > 1 or config.expert_parallel.enabled
    )
    if keeps_a_part or config.zero_optimization.stage == 3:
        return_freed_blocks()  # what other ranks hold leaves this process
    messages, scheme = _messages(config, collectives)
    local = divide(model, config, mesh, collectives, _policy(config, given, trains), scheme)
    local, undo_float8 = _float8(local, config)
    model, blocks = local.model, [module for run in local.runs for _, module in run]
    recomputing, undo_storing = _recomputing(config, blocks, device, mesh)
    with everywhere():
        groups = groups or _groups(model, config, given)
        compiler = BlockCompiler(model, local.compilable, config, recomputing)
    # values, flat buffers, the optimizer
    sharded = _sharded(local, config, given, groups, host)
    local.start_proof(mesh, sharded.holding)
    updater = Updater(sharded)
    with everywhere():
        optimizer = _optimizer(config, given.optimizer, updater, groups, device) if trains else None
        cutter, undo = _other_forwards(local, config, mesh, sharded, changes, compiler, recomputing)
    # the loop around it
    if device.type == "cpu":
        keep_freed_blocks()  # training takes and frees the same blocks in every step
    loss_scale = build_loss_scale(config.fp16, skips_overflow=config.bf16.skips_overflow)
    means = StepMeans(device, mesh.mesh.pipe / mesh.mesh.size, _refuses_weights(config))
    gradient_factor = GradientFactor(config, mesh.mesh, loss_scale, means)
    if messages is not None:
        messages.bind(optimizer, updater, gradient_factor.without_weights)
    with everywhere():
        record = _record(config, device, mesh, collectives, outer)
        monitor = _monitor(config, record)
        loader = _watched(_loader(given, config, mesh, collectives, outer), record)
        packing = _packing(model, config, loader, collectives)
        recovery = _recovery(config, collectives, loader, mesh, outer)
        scheduler = _scheduler(config, given.lr_scheduler, optimizer, loader) if optimizer else None
    balances = [] if local.experts is None else [local.experts.balance]
    return Parts(
        config=config,
        module=model,
        sharded=sharded,
        updater=updater,
        auto_ratio=_auto_ratio(config, sharded, updater),
        optimizer=optimizer,
        scheduler=scheduler,
        loss_scale=loss_scale,
        means=means,
        gradient_factor=gradient_factor,
        loss_check=_loss_check(config),
        kept_units=_kept_units(sharded, model),
        autocast=_autocast(config, device),
        cast_inputs=torch.float16 if config.fp16.enabled and config.fp16.auto_cast else None,
        report=StepReport(config, device, monitor, mesh.opened, sharded, record, balances),
        loader=loader,
        undo=[undo_storing, undo_float8, *undo],
        compiler=compiler,
        saver=_saver(config, collectives),
        preemption=_preemption(config, collectives, trains),
        recovery=recovery,
        saves=_saves(config, collectives),
        outer=outer,
        schedules=changes.schedules,
        after_steps=[
            *([_compressing(model)] if compresses else []),
            *balances,
            *_experiment(config, model, collectives),
        ],
        packing=packing,
        opened=mesh.opened,
        loop=_loop(local, mesh, config, sharded, cutter),
        uneven=local.experts or UnevenForwards(),
    )


def _policy(config: Config, given: _Given, trains: bool) -> BuildPolicy:
    """The policy of a ZeRO stage over a number of ranks."""
    return partial(policy_of, config, trains and splits_masters(config, given.optimizer))


def _other_forwards(
    local: LocalModel,
    config: Config,
    mesh: MeshGroups,
    sharded: ShardedModel,
    changes: _Changes,
    compiler: BlockCompiler,
    recomputing: Recomputing | None,
) -> tuple[Cutter | None, list[Callable[[], None]]]:
    """Other forwards of modules. Returns what cuts sequences, and what restores the model's own forwards."""
    local.begin()
    undo = [local.undo, _cast_borders(local), _tiles(local, config), *changes.undo]
    if recomputing is not None:
        recomputing.begin()
        undo.append(recomputing.end)
    cutter = _cut_sequences(local.model, config, mesh, local)
    if cutter is not None:
        undo.append(cutter.undo)
    undo.append(changes.schedules.attach(local.model, sharded, compiler))
    if config.compile.enabled:
        compiler.compile()
    return cutter, undo


# -- features: what a key of the config adds ----------------------------------------------------------


@dataclass
class _Changes:
    """What the config changes in the whole model, before it is divided."""

    schedules: ModelSchedules
    undo: list[Callable[[], None]]  # the last one first


def _change(model: nn.Module, config: Config, mesh: MeshGroups) -> tuple[Config, _Changes]:
    """Change the model as the config says. Returns the config with the units that this needs."""
    check_features(model, config)
    config, schedules = _schedules(model, config, mesh)
    own_configs = _own_configs(model, config)
    return config, _Changes(schedules, [own_configs, _sparse_attention(model, config)])


def _schedules(model: nn.Module, config: Config, mesh: MeshGroups) -> tuple[Config, ModelSchedules]:
    """What acts on the model by the step, and the config with the units that it needs."""
    sections = (config.progressive_layer_drop, config.curriculum_learning)
    drops_tokens = config.data_efficiency.drops_tokens
    if not (drops_tokens or any(section.enabled for section in sections)):
        return config, ModelSchedules()
    from .dropping.plan import Schedules

    found = Schedules(model, config, mesh.coordinate("data"), mesh.mesh.data)
    return found.with_units(config), found


def _compresses(model: nn.Module, config: Config, given: _Given) -> bool:
    """Layers compute with quantized or pruned weights: those that the script or this call has prepared."""
    section, old = config.compression_training, config.quantize_training
    if not section.enabled and not old.is_on:
        return not is_part(model) and has_compressed_layers(model)
    from .model.compressed_training import prepare

    prepare(model, config, given.optimizer, given.model_parameters)
    return True


def _float8(local: LocalModel, config: Config) -> tuple[LocalModel, Callable[[], None]]:
    """Let layers multiply in 8 bits: how their weights are sent, and what undoes it. For all ranks."""
    if not config.float8.enabled:
        return local, _nothing
    from .model.float8 import convert_layers

    experts = frozenset() if local.experts is None else local.experts.params
    groups, undo = convert_layers(local.model, config, local.groups, experts)
    return replace(local, groups=groups), undo


def _compressing(model: nn.Module) -> AfterSteps:
    from .model.compressed_training import Compression

    return Compression(model)


def _experiment(config: Config, model: nn.Module, collectives: Collectives) -> list[AfterSteps]:
    """Of a tuner, which ends the run."""
    if not config.autotuning.enabled:
        return []
    from .telemetry.experiment import build_experiment

    return [build_experiment(config, model, collectives)]


def _cut_sequences(
    model: nn.Module, config: Config, mesh: MeshGroups, local: LocalModel
) -> Cutter | None:
    """Cuts the sequences of batches over ranks; None: each rank has whole ones."""
    if config.sequence_parallel_size == 1:
        return None
    from .parallel.sequences import cut_sequences

    return cut_sequences(model, config, mesh, is_stage=local.found is not None)


def _loop(
    local: LocalModel,
    mesh: MeshGroups,
    config: Config,
    sharded: ShardedModel,
    cutter: Cutter | None,
) -> LoopFactory:
    if local.found is None:
        return batch_loop
    from .parallel.pipeline import build_pipeline

    of_stages = None
    if cutter is not None:
        from .parallel import sequences

        of_stages = sequences.of_stages(cutter)
    return build_pipeline(local.found, mesh, config, sharded, of_stages)


def _cast_borders(local: LocalModel) -> Callable[[], None]:
    """Casts around modules that stay fp32; returns what ends them."""
    low = local.groups.data.policy.compute
    if low is None or not local.fp32.borders:
        return _nothing
    from .model.fp32_modules import cast_borders

    return cast_borders(local.fp32.borders, low)


def _own_configs(model: nn.Module, config: Config) -> Callable[[], None]:
    """Another attention is chosen in configs of transformers: not in those that the script holds."""
    if config.sparse_attention is None and config.sequence_parallel_size == 1:
        return _nothing
    from ..utils.module_configs import own_configs

    return own_configs(model)


def _sparse_attention(model: nn.Module, config: Config) -> Callable[[], None]:
    """Lets models of transformers compute their attention over a layout; returns what undoes it."""
    section = config.sparse_attention
    if section is None or section.mode == "dense":
        return _nothing
    from ..ops.sparse_attention.huggingface import switch

    return switch(model, section)


def _tiles(local: LocalModel, config: Config) -> Callable[[], None]:
    """Forwards in tiles as the config says; returns what restores the model's own."""
    section = config.sequence
    if section.tiled_mlp is False and section.tiled_loss is False:
        return _nothing
    from .parallel.tiles import tile_layers

    return tile_layers(local, section)


def _host(
    config: Config, device: torch.device, optimizer: ClientOptimizer | None
) -> HostStore | None:
    """Host memory for what is not on the device; None: everything is on the device."""
    zero = config.zero_optimization
    if zero.offload_optimizer.device == "none" and zero.offload_param.device == "none":
        return None
    from .model.storage import build_host

    return build_host(config, device, optimizer)


def _stores(config: Config, host: HostStore | None, trained_numel: int) -> Stores:
    """The places of masters, states and shards. trained_numel: elements of all trainable parameters."""
    if host is None:
        return Stores(None)
    from .model.storage import build_stores

    return build_stores(config, host, trained_numel)


def _auto_ratio(config: Config, sharded: ShardedModel, updater: Updater) -> AutoRatio | None:
    """Moves masters from the host to the device as they fit; None: they stay where they were made."""
    section = config.zero_optimization.offload_optimizer
    if section.device == "none" or section.ratio != "auto":
        return None
    from ..offload.device_memory import memory_of
    from ..zero.model.auto_ratio import AutoRatio

    return AutoRatio(sharded, updater, memory_of(sharded.collectives.device))


def _messages(config: Config, collectives: Collectives) -> tuple[Messages | None, BuildScheme]:
    """How gradients and parameters are sent. None: exactly."""
    one_bit = config.optimizer is not None and config.optimizer.type in ONE_BIT_OPTIMIZERS
    if not (one_bit or config.zero_optimization.compresses):
        return None, ExactScheme
    from .parallel.messages import Messages

    messages = Messages(config, collectives)
    return messages, messages.scheme


def _refuses_weights(config: Config) -> str:
    """The setting with which losses have no weights: it computes no means, or messages keep errors of
    gradients, whose divisor comes too late; "": none.
    """
    if config.gradient_allreduce_op != "mean":
        return f"gradient_allreduce_op = {quoted(config.gradient_allreduce_op)}"
    if config.optimizer is not None and config.optimizer.type in ONE_BIT_OPTIMIZERS:
        return f"optimizer.type = {quoted(config.optimizer.type)}"
    has_loco = config.zero_optimization.zeropp_loco_param is not None
    return "zero_optimization.zeropp_loco_param" if has_loco else ""


def _loss_check(config: Config) -> LossCheck:
    if not config.tensor_parallel.vocab_parallel_lm_head:
        return LossCheck()
    from .parallel.slices import LogitsCheck

    return LogitsCheck()


def _kept_units(sharded: ShardedModel, model: nn.Module) -> KeptUnits:
    """What `engine.eval()` keeps gathered."""
    if not sharded.may_keep:
        return KeptUnits()
    from .generation.evaluation import EvaluationUnits

    return EvaluationUnits(sharded, model)


def _recomputing(
    config: Config, blocks: list[nn.Module], device: torch.device, mesh: MeshGroups
) -> tuple[Recomputing | None, Callable[[], None]]:
    """Activation checkpointing of `blocks`, or None; and what frees where inputs are stored."""
    section = config.activation_checkpointing
    if not section.enabled:
        return None, _nothing
    from .model.recompute import Recomputing

    activations, storing = None, None
    if section.cpu_checkpointing:
        from ..offload.activations import ActivationOffload

        activations = ActivationOffload(device)
        storing = activations.offloading
    if section.partition_activations and mesh.mesh.tensor > 1:
        from ..tensor.partition import PartitionedInputs

        moves = () if activations is None else (activations.offload, activations.restore)
        storing = PartitionedInputs(mesh.along("tensor"), *moves).cutting
    return Recomputing(blocks, storing), _nothing if activations is None else activations.close


def _saver(config: Config, collectives: Collectives) -> Saver | None:
    """What saves in the background. Raises UsageError: the process group has no store."""
    if not config.checkpoint.async_save:
        return None
    from .checkpoint.saver import build_saver

    return build_saver(config, collectives)


def _scheduler(
    config: Config, given: Any, optimizer: torch.optim.Optimizer, loader: Any
) -> Scheduler | None:
    found: Scheduler | None = None
    if given is not None:
        from .optim.schedule_base import check_schedule

        is_factory = callable(given) and not isinstance(given, torch.optim.lr_scheduler.LRScheduler)
        found = given(optimizer) if is_factory else given
        check_schedule(found)
    elif config.scheduler is not None:
        from .optim.schedules import build_scheduler

        found = build_scheduler(config.scheduler, optimizer)
    batching = config.data_efficiency.data_sampling.dynamic_batching
    if loader is None or not batching.enabled:
        return found
    from .data.dynamic_batches import sizes_of
    from .optim.variable_batch import VariableBatchSizeLR

    sizes = sizes_of(loader)
    return VariableBatchSizeLR(
        found, optimizer, sizes, config.train_batch_size, batching.lr_scaling_method
    )


def _record(
    config: Config,
    device: torch.device,
    mesh: MeshGroups,
    collectives: Collectives,
    outer: OuterLoop,
) -> RunRecord | None:
    if not config.report_folder or (outer.number and not config.recovery.enabled):
        return None
    from .telemetry.record import RunRecord

    place = mesh.mesh.coordinates(collectives.rank)
    opened, is_reserve = mesh.opened, outer.number > 0
    return RunRecord(config, device, collectives, opened, place, is_reserve=is_reserve)


def _watched(loader: Any, record: RunRecord | None) -> Any:
    """`loader`; the ledger of time knows how long steps wait for its batches."""
    if record is not None:
        from .data.loaders import watch_loader

        watch_loader(loader, record.ledger.waiting)
    return loader


def _monitor(config: Config, record: RunRecord | None) -> Monitor:
    writes = record if dist.get_rank() == 0 else None
    sections = (config.tensorboard, config.wandb, config.csv_monitor, config.comet)
    if not any(section.enabled for section in sections):
        return Monitor(record=writes)
    from .telemetry.monitor import build_monitor

    return build_monitor(config, rank_in_job(), writes)


def _preemption(config: Config, collectives: Collectives, trains: bool) -> Preemption:
    section = config.checkpoint
    if not (section.preemption_save_dir and trains):
        return Preemption()
    from .preemption import SaveOnPreemption

    return SaveOnPreemption(section, collectives)


def _saves(config: Config, collectives: Collectives) -> SaveInterval:
    if config.checkpoint.interval is None:
        return SaveInterval()
    from .steps.save_interval import TimedSaves

    return TimedSaves(config.checkpoint.interval, collectives)


def _num_sets(config: Config) -> int:
    """So many sets of ranks each have a default group of torch of their own."""
    world_size = num_launched()
    if config.outer is None or not config.recovery.enabled or world_size is None:
        return 1
    complaints = config.outer.complaints(world_size)
    if complaints:
        raise ConfigError(complaints, config.source)
    return config.outer.groups


def _recovery(
    config: Config, collectives: Collectives, loader: Any, mesh: MeshGroups, outer: OuterLoop
) -> Recovery:
    """Raises UsageError: ranks cannot recover here."""
    if not config.recovery.enabled:
        return Recovery()
    if config.outer is not None:
        return outer.calls()
    from .recovering import LiveRecovery

    return LiveRecovery(config, collectives, loader, mesh)


def _open_outer(
    config: Config, group: dist.ProcessGroup, device: torch.device
) -> tuple[OuterLoop, Collectives, MeshGroups]:
    """How groups of ranks meet, and the groups of the engine: those of `_open_groups`.

    Raises UsageError: there are no such groups of ranks.
    """
    if config.outer is None:
        if num_sites() > 1 and group.rank() == 0:
            log.warning(
                "the hostfile has %d sites, and the config has no section outer: ranks of all sites exchange "
                "gradients in every step; add outer with groups = %d",
                *(num_sites(), num_sites()),
            )
        return OuterLoop(), *_open_groups(config, group, device)
    if config.recovery.enabled:
        from .living_groups import LivingGroups

        return LivingGroups(config, group, device), *_open_groups(config, group, device)
    from .meeting import GroupsLoop, open_rank_groups

    found = open_rank_groups(config.outer, group)
    opened = _open_groups(config, found.own, device, found.sites)
    return GroupsLoop(config.outer, found), *opened


def _autocast(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    section = config.torch_autocast
    if not section.enabled:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=DTYPES[section.dtype])


def _loader(
    given: _Given,
    config: Config,
    mesh: MeshGroups,
    collectives: Collectives,
    outer: OuterLoop,
) -> Any:
    data, collate_fn = given.training_data, given.collate_fn
    packing, sampling = config.data_packing, config.data_efficiency.data_sampling
    sections = {
        "data_packing": bool(packing.tokens),
        CURRICULUM: sampling.has_curriculum,
        BATCHING: sampling.has_dynamic_batches,
    }
    chosen = [key for key, is_on in sections.items() if is_on]
    if data is None:
        if chosen and collectives.rank == 0:
            log.info("%s has no effect: there is no training_data to read", chosen[0])
        return None
    from .data.loaders import build_loader, keeps_position

    if keeps_position(data):
        if chosen:
            raise UsageError(
                f"{chosen[0]} takes the samples of a dataset, and training_data is a loader: pass its dataset, "
                "or remove the section"
            )
        return data
    common: dict[str, Any] = {
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "rank": outer.number * mesh.mesh.data + mesh.coordinate("data"),
        "world_size": outer.num_groups * mesh.mesh.data,
        "num_workers": config.dataloader_num_workers,
        "drop_last": config.dataloader_drop_last,
        "collate_fn": collate_fn,
    }
    recovers = config.recovery.enabled and config.outer is None
    if packing.tokens:
        from .data.packing import packed_loader

        common |= {"step_rows": config.train_batch_size, "recovers": recovers}
        return packed_loader(data, packing, **common)
    if sampling.num_workers is not None:
        common["num_workers"] = sampling.num_workers
    if sampling.has_curriculum:
        from .data.curriculum import curriculum_loader

        return curriculum_loader(
            data,
            sampling.curriculum_learning.metrics(),
            step_samples=config.train_batch_size,
            num_epochs=sampling.num_epochs,
            seed=config.data_efficiency.seed,
            recovers=recovers,
            **common,
        )
    if recovers:
        from .data.step_sampler import step_loader

        return step_loader(data, step_batches=config.gradient_accumulation_steps, **common)
    if sampling.has_dynamic_batches:
        from .data.dynamic_batches import dynamic_loader

        return dynamic_loader(
            data,
            sampling.dynamic_batching,
            step_batches=config.train_batch_size,
            seed=config.data_efficiency.seed,
            **common,
        )
    return build_loader(
        data,
        step_samples=config.train_batch_size if config.elasticity.enabled else 0,
        **common,
    )


def _packing(model: nn.Module, config: Config, loader: Any, collectives: Collectives) -> Packing:
    """Keeps the samples of packed rows apart in forwards, and proves it."""
    if loader is None or not config.data_packing.tokens:
        return Packing()
    from .packing.forwards import PackedForwards

    return PackedForwards(model, config, collectives, loader.order.recent)


def _give_values(
    model: nn.Module,
    weights: Any,
    groups: FlatGroups,
    policy: Policy,
    *,
    keeps_whole: bool = False,
    reads_late: bool = False,
) -> None:
    """Values for what is on the meta device, and `weights` for everything.

    keeps_whole: initial values are not sharded. reads_late: weights are read when their unit is built.
    """
    is_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if weights is None and not is_meta:
        return
    from ..zero.construction.construction import Construction, materialise
    from ..zero.construction.slices import SliceStore
    from ..zero.construction.weights import load_weights

    collectives = groups.data.everyone
    in_slices = SliceStore(collectives, reads_late=reads_late, groups=groups)
    store = in_slices if policy.shards_params else None
    if weights is not None:
        load_weights(
            model,
            weights,
            store=store,
            remedy=_LOAD_LATER,
            groups=groups,
            optional=optional_states(model),
        )
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        construction = None if keeps_whole else Construction(in_slices)
        materialise(model, construction, groups.slices)


# -- what every engine has ------------------------------------------------------------------------------


def _open_groups(
    config: Config,
    group: dist.ProcessGroup,
    device: torch.device,
    sites: Sequence[Sequence[int]] = (),
) -> tuple[Collectives, MeshGroups]:
    """The collectives of all ranks, logged and watched as the config says, and those of the mesh.

    sites: see `MeshGroups`.
    """
    section = config.communication.where(has_native_ops=config.ops.native)
    world = open_collectives(group, device, section=section)
    logged = config.comms_logger
    options = LogOptions(logged.prof_all, logged.prof_ops, logged.verbose, logged.debug)
    world.message_log.configure(options, enabled=logged.enabled)
    if config.watch.enabled:
        world.start_watching(config.watch, timeout_seconds())
    mesh = mesh_of(
        config.pipeline, config.tensor_parallel, group.size(), config.sequence_parallel_size
    )
    return world, MeshGroups(mesh, group, world, timeout_seconds(), section, sites)


def _sharded(
    local: LocalModel,
    config: Config,
    given: _Given,
    groups: Groups,
    host: HostStore | None,
) -> ShardedModel:
    """The model on this rank's device, with its values in flat buffers."""
    model, flat_groups = local.model, local.groups
    policy, names = flat_groups.data.policy, flat_groups.names
    is_on_disk = config.zero_optimization.offload_param.device == "nvme"
    _give_values(model, given.weights, flat_groups, policy, reads_late=is_on_disk)
    must_train = not names and any(param.requires_grad for param in model.parameters())
    with agreeing(flat_groups.world, "xds.initialize"):
        check_model(model, groups.index, must_train=must_train)
        if flat_groups.world.device.type == "cpu":
            check_statistics(model, config, local.fp32)
        trained_numel = sum(p.numel() for p in model.parameters() if id(p) in groups.index)
        stores = _stores(config, host, trained_numel)
    move_model(model, flat_groups.world.device)
    to_cast = buffers_to_cast(
        model, config, local.fp32.buffers
    )  # before parameters change their dtype
    zero = config.zero_optimization
    sharded = ShardedModel(model, groups.index, flat_groups, zero, stores, local.runs)
    for buffer, dtype in to_cast:
        buffer.data = buffer.data.to(dtype)
    if host is not None:
        from .model.storage import reserve

        reserve(sharded)
    return sharded


def _config_source(config: Any, args: Any) -> Any:
    from_args = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        raise UsageError(
            "both config and args.deepspeed_config are given: remove one, so that it is clear which counts"
        )
    source = config if config is not None else from_args
    if source is None:
        raise UsageError(
            "xds.initialize needs a config: a path, JSON text, a dict or an xds.Config, e.g. "
            'xds.initialize(model, "config.json")'
        )
    return source


def _groups(model: nn.Module, config: Config, given: _Given) -> Groups:
    """The hyperparameter groups of the parameters that the optimizer is to update."""
    optimizer, model_parameters = given.optimizer, given.model_parameters
    if isinstance(optimizer, torch.optim.Optimizer):
        if model_parameters is not None:
            raise UsageError(
                "model_parameters and an optimizer object are both given: the optimizer holds its groups "
                "already; drop model_parameters, or pass the optimizer's class"
            )
        return read_groups(model, [dict(g) for g in optimizer.param_groups])
    groups = read_groups(model, model_parameters)
    return split_by_kind(config.optimizer, model, groups) if optimizer is None else groups


def _optimizer(
    config: Config,
    given: ClientOptimizer | None,
    updater: Updater,
    groups: Groups,
    device: torch.device,
) -> torch.optim.Optimizer:
    """The user's or the config's, bound to the masters, with its kernels."""
    if given is not None:
        chosen = client_optimizer(
            given, updater, groups, allow_untested=config.zero_allow_untested_optimizer
        )
    else:
        assert config.optimizer is not None  # `resolve_together` came first
        more = {}
        if config.optimizer.type in ONE_BIT_OPTIMIZERS:
            more["warmup_steps"] = warmup_steps(config.scheduler)
        chosen = named_optimizer(config.optimizer, updater, groups, **more)
    check_masters(chosen, updater)
    load_kernels(config.ops, chosen, updater, device)
    updater.bind(as_shard_optimizer(chosen, updater))
    return chosen


def _nothing() -> None:
    return


__all__ = ["initialize"]
