"""`deepspeed.initialize`: `xds.initialize` with DeepSpeed's arguments and its four results."""

from __future__ import annotations

import argparse
import math
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ...pipe.module import PipelineModule
from ...tensor.sequence.distributed import DistributedAttention
from ...utils.arguments import whole, wrong
from ...utils.errors import ConfigError, UsageError
from ...utils.version import __version__
from ..config.config import Config, log_idle_keys, parse_config
from ..config.optimizer import BESIDE_PARAMS
from ..data.loaders import InOrder, keeps_position
from ..engine import Engine
from ..initialize import initialize as xds_initialize
from ..telemetry.screen import run_in_words
from . import stand_in as stand_in
from .errors import raises_theirs
from .library import groups as groups
from .library.comm import init_distributed
from .library.log import logger
from .library.moe import MoE
from .library.sequences import DistributedAttention as TheirAttention
from .library.sequences import UlyssesGroups
from .names import VERSION
from .params.parameters import answer_for_model
from .training.engine import DeepSpeedEngine, EngineAdapter
from .training.grads import OnlyInfers
from .training.pipeline import PipelineEngine


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to `parser`, and set this process's local rank.

    DeepSpeed's launcher appends `--local_rank=N` to the command line; `xds` and torchrun set LOCAL_RANK in
    the environment. So `args.local_rank` is LOCAL_RANK, whether the script declared the option before this
    call (then its default is replaced) or not at all. Without a launcher it is not changed.
    """
    group = parser.add_argument_group("DeepSpeed", "read by xds.deepspeed.initialize(args=...)")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script itself; the engine ignores it"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON config")
    if "LOCAL_RANK" in os.environ:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser


# the models are the script's: only here is it known which engine trains one
_engines: WeakKeyDictionary[nn.Module, ReferenceType[Engine]] = WeakKeyDictionary()


def remember_engine(model: nn.Module, engine: Engine) -> None:
    """`engine` trains `model` from now on, also where the script drops the engine and keeps the model.

    The model holds the engine, as DeepSpeed's hooks do, so that a second engine of the model can end the first.
    """
    _engines[model] = weakref.ref(engine)
    stand_in.engine_was_made()
    engine.internals.access_guards.keep_with_model(model, engine)


def end_older_engine(model: nn.Module) -> None:
    """Destroy the engine that this layer made for `model` before; the model keeps its values. A collective.

    An engine owns the parameters, so there can be only one.
    """
    found = _engines.pop(model, None)
    older = None if found is None else found()
    if older is None or older.internals.is_destroyed:
        return
    if older.global_rank == 0:
        logger.warning(
            "deepspeed.initialize: this model had an engine, which is destroyed now; the new one begins "
            "with the model's values, and with an optimizer of its own"
        )
    older.destroy()


def log_summary(show_straggler: bool = False) -> None:
    """Print the logs of the engines' collectives on rank 0, see `engine.comms_summary()`. A collective."""
    for engine in [made() for made in _engines.values()]:
        if engine is not None and not engine.internals.is_destroyed:
            summary = engine.comms_summary(show_straggler=show_straggler)
            if dist.get_rank() == 0:
                print(summary)


FALLBACK = "gpipe"


def with_schedule_for(config: Config, model: nn.Module, world_size: int) -> Config:
    """`config`, which is not resolved, with a schedule that can run the micro-batches of a step.

    With fewer micro-batches than stages the default, 1F1B, has the order of GPipe: all of them are in flight.
    xds refuses that, because most ranks wait. A schedule that the config or the model names is kept.
    """
    own = config.pipeline
    if (
        not isinstance(model, PipelineModule)
        or model.schedule
        or "schedule" in own.model_fields_set
    ):
        return config
    changed = own.model_copy(
        update={"schedule": FALLBACK, "stages": model.num_stages or own.stages}
    )
    try:
        tried = config.model_copy(update={"pipeline": changed}).resolve(world_size)
    except ConfigError:
        return config  # the engine says it
    steps = tried.gradient_accumulation_steps
    if steps is None or steps >= changed.stages:
        return config
    note = (
        f"pipeline.schedule is {FALLBACK}: a step has fewer micro-batches ({steps}) than stages "
        f"({changed.stages}), so ranks wait; more gradient_accumulation_steps use them better"
    )
    section = own.model_copy(update={"schedule": FALLBACK})
    return config.model_copy(update={"pipeline": section, "notes": (*config.notes, note)})


GRADIENT_CLIPPING = 1.0  # DeepSpeed's default since 0.19; `xds.initialize` does not clip by default

PLACEHOLDERS = ("DummyOptim", "DummyScheduler")
MPU_OF_PIPELINE = (
    "deepspeed.initialize(mpu=...) with a PipelineModule: the engine makes the groups of its stages; "
    "leave mpu out, and read engine.grid"
)

Results = tuple[EngineAdapter, Any, Any, Any]


# of models that `tp_model_init` got, until `initialize`; the models are the script's
_tensor_ranks: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@raises_theirs
def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
    tp_group: dist.ProcessGroup | None = None,
    **unused: Any,
) -> nn.Module:
    """Let `initialize` cut the layers of `model` over `tp_size` ranks; returns `model`, which is as it was.

    Args:
        dtype, config: without effect: the config that `initialize` gets has the precision.
        tp_group: neighbouring ranks, as the engine's own groups are.
    Raises:
        UsageError: `tp_group` has other ranks.
    """
    tp_size = whole("tp_model_init: tp_size", tp_size, 1)
    if tp_group is not None:
        first = dist.get_rank() // tp_size * tp_size
        if dist.get_process_group_ranks(tp_group) != list(range(first, first + tp_size)):
            raise UsageError(
                f"tp_model_init(tp_size={tp_size}, tp_group=...): the engine cuts layers over neighbouring "
                f"ranks, here {first} to {first + tp_size - 1}; leave tp_group out, or give these"
            )
    _tensor_ranks[model] = tp_size
    return model


@raises_theirs
def initialize(  # noqa: PLR0913 (DeepSpeed's arguments)
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Results:
    """Wrap `model` in an engine, as `xds.initialize` does. A collective.

    Args:
        config, config_params, args.deepspeed_config: exactly one of them; a path, JSON text or a dict.
        optimizer: an object, or a callable that gets parameter groups; None is the config's.
        model_parameters: the parameters to train; ignored where `optimizer` is an object, which has its own.
        mpu: without model parallelism, or that of `UlyssesSPAttentionHF`. None for a PipelineModule.
        mesh_param: (data ranks, sequence ranks), or both sizes in the config; the script cuts the sequences.
        distributed_port: without effect, see `comm.init_distributed`.
    Returns:
        (engine, optimizer, dataloader or None, lr_scheduler or None). The engine of a model in pipeline stages
        is a `runtime.pipe.engine.PipelineEngine`.
    Raises:
        ConfigError, UsageError: as `xds.initialize`.
    """
    model = _checked_model(model, mpu)
    _refuse_placeholders(optimizer=optimizer, lr_scheduler=lr_scheduler)
    given = _config_of(args, config, config_params)
    checked = _with_defaults(given)
    init_distributed(dist_init_required=dist_init_required)
    num_sequence = _sequence_ranks(mpu, mesh_param, checked, model)
    if num_sequence > 1:
        checked = checked.with_sequences(num_sequence, in_eval=getattr(mpu, "cuts_in_eval", True))
    checked = checked.with_tensor_ranks(_tensor_ranks.pop(model, checked.tensor_parallel.size))
    checked = _without_tensor_ranks_in_batch(checked, dist.get_world_size())
    checked = _with_expert_ranks(checked, model, dist.get_world_size())
    checked = with_schedule_for(checked, model, dist.get_world_size())
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    end_older_engine(model)
    only_infers = _frozen(model, optimizer is not None or checked.optimizer is not None)
    with only_infers:
        made = xds_initialize(
            model,
            checked,
            optimizer=optimizer,
            model_parameters=None if is_made else model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=_in_order(training_data, model),
            collate_fn=collate_fn,
            group=None if num_sequence > 1 else _group_of(mpu, checked.tensor_parallel.size),
        )
    remember_engine(model, made)
    engine = _adapter_of(made, collate_fn, isinstance(model, PipelineModule))
    engine.keep_given(
        given, only_infers, None if num_sequence == 1 else mpu or UlyssesGroups(num_sequence)
    )
    groups.follow(engine)
    _say_who_trains(made)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _in_order(data: Any, model: nn.Module) -> Any:
    """A pipeline reads `training_data` in its own order, as in DeepSpeed; other engines shuffle it."""
    is_indexed = all(hasattr(data, name) for name in ("__len__", "__getitem__"))
    if not (isinstance(model, PipelineModule) and is_indexed):
        return data
    is_served = isinstance(data, IterableDataset | DataLoader) or keeps_position(data)
    return data if is_served or not len(data) else InOrder(data)


def _refuse_placeholders(**given: Any) -> None:
    """accelerate's DummyOptim and DummyScheduler stand for sections of the config, in its `prepare` alone."""
    for argument, value in given.items():
        name = type(value).__name__
        if name in PLACEHOLDERS:
            raise UsageError(
                f"deepspeed.initialize({argument}={name}): accelerate's {name} only goes to "
                f"accelerator.prepare; leave {argument} out, the config's section is used"
            )


def _checked_model(model: nn.Module | None, mpu: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        name = type(model).__name__
        raise UsageError(f"deepspeed.initialize(model={name}): needs the torch.nn.Module to train")
    if mpu is not None and isinstance(model, PipelineModule):
        raise UsageError(MPU_OF_PIPELINE)
    return model


def _adapter_of(made: Engine, collate_fn: Any, is_cut: bool) -> EngineAdapter:
    """DeepSpeed's methods over `made`, whose parameters and collectives answer as DeepSpeed's do."""
    if made.zero_optimization_stage() == 3:
        answer_for_model(made.module)
    # stock scripts save on rank 0, and ask every rank for a state_dict
    made.internals.access_guards.let_state_dict_have_parts(warns=dist.get_rank() == 0)
    is_pipeline = is_cut or made.num_stages > 1
    return (PipelineEngine if is_pipeline else DeepSpeedEngine)(made, collate_fn)


def _frozen(model: nn.Module, trains: bool) -> OnlyInfers:
    """Without an optimizer DeepSpeed's engine only infers, and refuses backward."""
    only_infers = OnlyInfers(() if trains else model.parameters())
    if only_infers:
        logger.info(  # no warning, because a backward pass says it again, as an error
            "neither initialize nor the config has an optimizer: parameters are frozen, the engine only infers"
        )
    return only_infers


def _say_who_trains(engine: Engine) -> None:
    """Rank 0 logs what DeepSpeed logs here. Where the script asked for DeepSpeed, a line says who trains."""
    if dist.get_rank() != 0:
        return
    run = run_in_words(engine.config, dist.get_world_size())
    logger.info("DeepSpeed info: version=%s+xds; xds %s, %s", VERSION, __version__, run)
    if stand_in.is_active():
        print(f"xds {__version__} stands in for deepspeed; {run}", flush=True)


def _config_of(args: Any, config: Any, config_params: Any) -> Any:
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        names = " and ".join(found) or "none of them"
        raise UsageError(
            f"deepspeed.initialize needs exactly one of {', '.join(given)}, and got {names}: pass config= or "
            "--deepspeed_config"
        )
    return next(iter(found.values()))


def _with_defaults(source: Any) -> Config:
    """The checked config, with DeepSpeed's default where that of xds differs. A `Config` is not changed."""
    dotted = [key for key in source if "." in str(key)] if isinstance(source, dict) else []
    if dotted:
        logger.warning_once(  # type: ignore[attr-defined]
            f"config: keys with dots have no effect, as in DeepSpeed ({', '.join(dotted)}); TRL writes "
            "them for its reference models, in another script nest them as sections"
        )
        source = {key: value for key, value in source.items() if key not in dotted}
    config = parse_config(source)
    if isinstance(source, Config):
        return config
    beside = [path for path, why in config.without_effect if why == BESIDE_PARAMS]
    if beside and os.environ.get("RANK", "0") == "0":
        logger.warning("%s without effect: only optimizer.params is read", ", ".join(beside))
    log_idle_keys(config, "INFO")  # no warning: DeepSpeed's configs have such keys as a rule
    if "gradient_clipping" in config.model_fields_set:
        return config
    notes = [note for note in config.notes if not note.startswith("gradient_clipping ")]
    notes.append(
        f"gradient_clipping is not given: gradients are clipped at {GRADIENT_CLIPPING}, as DeepSpeed 0.19 does"
    )
    update = {"gradient_clipping": GRADIENT_CLIPPING, "notes": tuple(notes)}
    return config.model_copy(update=update)


def _without_tensor_ranks_in_batch(config: Config, world_size: int) -> Config:
    """DeepSpeed, and so a stock Trainer, counts the samples of each tensor rank, which have the same ones."""
    num_tensor = config.tensor_parallel.size
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if num_tensor == 1 or not (train and micro and steps):
        return config
    samples = micro * steps * (world_size // config.model_ranks)
    if train != samples * num_tensor:
        return config
    note = (
        f"train_batch_size = {train} counts {num_tensor} tensor ranks: a step has {samples} samples"
    )
    update = {"train_batch_size": samples, "notes": (*config.notes, note)}
    return config.model_copy(update=update)


def _with_expert_ranks(config: Config, model: nn.Module, world_size: int) -> Config:
    """`ep_size` of the layers `MoE` says how many ranks share experts, where the config does not."""
    sizes = [one.ep_size for one in model.modules() if isinstance(one, MoE)]
    size = math.gcd(world_size, *sizes) if sizes else 1
    if size == 1 or "enabled" in config.expert_parallel.model_fields_set:
        return config
    section = config.expert_parallel.model_copy(update={"enabled": True, "autoep_size": size})
    note = f"expert_parallel.enabled is not given: {size} ranks share experts, as ep_size of the layers says"
    return config.model_copy(update={"expert_parallel": section, "notes": (*config.notes, note)})


def _sequence_ranks(mpu: Any, mesh_param: Any, config: Config, model: nn.Module) -> int:
    """The ranks over which the script cuts its sequences; 1: it does not.

    Raises:
        UsageError: mpu, mesh_param and config name different numbers.
    """
    found: dict[str, int] = {}
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        found["mpu"] = int(mpu.get_sequence_parallel_world_size())
    if mesh_param is not None:
        data, found["mesh_param"] = mesh_param
        if data * found["mesh_param"] != dist.get_world_size():
            raise UsageError(
                f"mesh_param = {tuple(mesh_param)}: there are {dist.get_world_size()} ranks, and the product "
                "must be their number"
            )
    size = config.sequence_parallel_size
    if size > 1 and (found or config.data_parallel_size is not None or _cuts_itself(model)):
        found["sequence_parallel_size"] = size
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name}: {number}" for name, number in found.items())
        raise UsageError(f"the numbers of sequence ranks differ ({said}); make them equal")
    return next(iter(found.values()), 1)


def _cuts_itself(model: nn.Module) -> bool:
    """An attention of the model has a group of its own."""
    return any(
        isinstance(module, TheirAttention)
        or (isinstance(module, DistributedAttention) and module.has_own_group)
        for module in model.modules()
    )


def _group_of(mpu: Any, num_tensor: int) -> dist.ProcessGroup | None:
    """The data-parallel ranks; None: all, which the engine divides itself, also among `num_tensor` slices."""
    if mpu is None:
        return None
    if not hasattr(mpu, "get_model_parallel_world_size"):
        raise wrong("mpu", mpu, "an object with get_model_parallel_world_size(), or None")
    size = int(mpu.get_model_parallel_world_size())
    if size not in (1, num_tensor):
        raise UsageError(
            f"mpu with a model-parallel size of {size}, and tensor_parallel.autotp_size = {num_tensor}: layers "
            f"that the script cuts are not supported; build whole layers and set autotp_size to {size}, or "
            "leave mpu out"
        )
    if num_tensor > 1:
        first = dist.get_rank() // num_tensor * num_tensor
        here = list(range(first, first + num_tensor))
        ranks = dist.get_process_group_ranks(mpu.get_model_parallel_group()) if size > 1 else here
        if ranks != here:
            raise UsageError(
                f"mpu shares layers among ranks {ranks}, and tensor_parallel.autotp_size = {num_tensor} among "
                f"ranks {here}; make groups of consecutive ranks, or leave mpu out"
            )
        return None
    group: dist.ProcessGroup = mpu.get_data_parallel_group()
    return group
