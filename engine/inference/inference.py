"""`xds.init_inference`: brings a model to its place, and returns the engine that runs it.

zero.stage     parameters                                        where
-------------  ------------------------------------------------  ----------------------
0, 1, 2        whole on each rank, or in slices of tensor ranks  initialize.py: `place`
3              sharded, or streamed from host memory or a disk   initialize.py: `initialize`

Nothing is trained: parameters are frozen, and there is no optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...offload.device_memory import free_bytes
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agreeing
from ...ops.comm.opening import open_collectives
from ...ops.device import device_of
from ...ops.torch_internals import tree_map
from ...tensor.same_batches import checksum
from ...utils.arguments import wrong
from ...utils.errors import ConfigError, UsageError
from ...utils.version import __version__
from ...zero.construction.sources import WeightSource
from ...zero.core.owners import find_owner, is_trained
from ...zero.model.model_checks import move_model
from ..config.config import Config
from ..engine import Engine
from ..initialize import initialize, place
from ..integrations.optional import need
from ..model.arguments import is_part
from ..model.precision import DTYPES, buffers_that_follow
from ..process.process import join, pick_device
from .config import InferenceConfig
from .engine import InferenceEngine, is_offloaded, prove_slices
from .policies import plan_of_policy

log = logging.getLogger("xds")


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """An engine that runs `model` in evaluation mode: names and meanings are DeepSpeed's. A collective.

    Parameters are cast to `dtype` (default fp16), frozen, and moved to this rank's device. The keys are in
    docs/inference.md.

    Args:
        model: on any device; or on meta, with the key `checkpoint`.
        config: a dict, a path or JSON text; None is {}.
        kwargs: more keys. A key that is in both needs the same value.

    Raises:
        ConfigError: every complaint about the keys at once, before anything is moved.
        UsageError: the model cannot be cut, loaded or stored as asked, or a package is missing.
    """
    if not isinstance(model, nn.Module):
        raise wrong("init_inference: model", model, "a torch.nn.Module object")
    settings = InferenceConfig.load(config, kwargs)
    if settings.bit_groups:
        need("torchao", "weights in few bits (dtype int8, or quant)", "torchao")
    device = pick_device()
    join(device)
    num_slices = _num_slices(settings)
    setup = _setup(settings, model, num_slices)
    _check_model(model, settings, setup)
    weights = _weights(settings, model)
    _cast(model, settings)
    model.eval()
    if setup.zero_optimization.stage == 3:
        engine = _streamed(model, settings, setup, weights)
    else:
        engine = _placed(model, settings, setup, weights)
    _say(settings, engine, num_slices)
    return engine


def _setup(settings: InferenceConfig, model: nn.Module, num_slices: int) -> Config:
    """The config of an engine that has these settings."""
    slices: dict[str, Any] = {"tp_size": num_slices}
    if num_slices > 1:
        own = settings.tensor_parallel.plan
        slices["plan"] = plan_of_policy(model, settings.injection_policy) if own is None else own
    sections: dict[str, Any] = {"tensor_parallel": slices, "zero_optimization": settings.zero}
    if settings.num_expert_ranks > 1:
        experts = {"enabled": True, "autoep_size": settings.num_expert_ranks}
        sections["expert_parallel"] = experts
    if settings.dtype in ("fp16", "bf16"):
        sections[settings.dtype] = {"enabled": True}
    try:
        config = Config.load({"train_micro_batch_size_per_gpu": 1, **sections})
    except ConfigError as error:  # its key has another name here
        complaints = [text.replace("zero_optimization", "zero") for text in error.complaints]
        raise ConfigError(complaints, "init_inference") from None
    if config.zero_optimization.stage == 3 and num_slices > 1 and settings.bit_groups:
        raise UsageError(
            f"quant with tensor_parallel.tp_size = {num_slices} and zero.stage = 3: weights in few bits are "
            "either sharded or in slices; leave zero or tp_size out"
        )
    return config


def _check_model(model: nn.Module, settings: InferenceConfig, setup: Config) -> None:
    """

    Raises:
        UsageError: the model belongs to another engine, or is in a form that this way cannot take.
    """
    if is_part(model):
        raise UsageError(
            "init_inference: a PipelineModule runs with xds.initialize and eval_batch; give a plain model here"
        )
    params = list(model.parameters())
    if any(is_trained(param) for param in params):
        raise UsageError(
            "init_inference: the model belongs to an engine that trains it; call destroy() on that engine first"
        )
    if not any(find_owner(param) is not None for param in params):
        return
    if setup.zero_optimization.stage != 3:
        raise UsageError(
            'init_inference: the model was built in xds.zero.Init, in shards; give zero={"stage": 3}, or build '
            "it without"
        )
    if settings.bit_groups:
        raise UsageError(
            "quant: the model was built in xds.zero.Init, in shards of 16 or 32 bits; build it on the meta "
            "device and give checkpoint"
        )


def _num_slices(settings: InferenceConfig) -> int:
    """The ranks that share a layer, from tp_size, an mpu or a group.

    Raises:
        UsageError: they are no neighbours, or not all ranks fall into groups of them.
    """
    section = settings.tensor_parallel
    mpu, group = section.mpu or settings.mpu, section.tp_group
    if mpu is not None and group is None:
        group = mpu.get_model_parallel_group()
    size, world = settings.num_slices, dist.get_world_size()
    if group is not None:
        size = dist.get_world_size(group)
        first = dist.get_rank() // size * size
        if dist.get_process_group_ranks(group) != list(range(first, first + size)):
            raise UsageError(
                f"tensor_parallel.tp_group or mpu: layers are cut over neighbouring ranks, here {first} to "
                f"{first + size - 1}; leave it out, or give these"
            )
    if world % size:
        raise UsageError(
            f"tensor_parallel.tp_size = {size}: {world} ranks do not fall into groups of {size}; start the "
            f"script with `xds --nproc-per-node {size}`, or take a divisor of {world}"
        )
    return size


def _weights(settings: InferenceConfig, model: nn.Module) -> WeightSource | None:
    source = settings.checkpoint_source
    is_meta = any(param.is_meta for param in model.parameters())
    if source is None and is_meta:
        raise UsageError(
            "init_inference: the model is on the meta device and has no values; give checkpoint, a folder with "
            "its weights"
        )
    if settings.save_path and dist.get_rank() == 0:
        from .checkpoints import save_whole

        save_whole(model, settings)
    if source is None:
        return None
    from .checkpoints import open_checkpoint

    return open_checkpoint(source, settings.folder, model)


def _cast(model: nn.Module, settings: InferenceConfig) -> None:
    """Parameters, and buffers that are used with them, in `dtype`; int8 keeps what the model has."""
    if settings.dtype == "int8":
        return
    dtype = DTYPES[settings.dtype]
    tensors: list[Tensor] = [*buffers_that_follow(model)]
    tensors += [param for param in model.parameters() if find_owner(param) is None]
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.data = tensor.data.to(dtype)


# -- the two ways -----------------------------------------------------------------------------------------


def _streamed(
    model: nn.Module, settings: InferenceConfig, setup: Config, weights: WeightSource | None
) -> InferenceEngine:
    """Parameters in shards, gathered or streamed unit by unit."""
    if settings.num_expert_ranks > 1 and is_offloaded(setup):
        raise UsageError(
            f"ep_size = {settings.num_expert_ranks} with zero.offload_param: ranks stop at different lengths, "
            "and would wait for one another's parameters and tokens at once; leave one of them out"
        )
    model.requires_grad_(False)
    weights = _in_bits(model, settings, weights)
    made = initialize(model, setup, weights=weights)
    if not is_offloaded(setup):
        made.eval()  # units stay gathered while memory allows
    is_proven = setup.tensor_parallel.size == 1 or _prove(made.module, made.device)
    with agreeing(open_collectives(dist.group.WORLD, made.device), "xds.init_inference"):
        _check_cache(settings, model, made.device)
    if asked := _asked_to_compile(settings):
        log.info("%s: weights are streamed; torch's own kernels run, without a graph", asked)
    group = _tensor_group(made)
    return InferenceEngine(
        made.module, settings, group=group, streams=made, needs_proof=not is_proven
    )


def _tensor_group(engine: Engine) -> Collectives | None:
    """The ranks that have slices of the same layers; None: layers are whole."""
    ranks = next(
        own for own in engine.internals.rank_mesh.groups("tensor") if engine.global_rank in own
    )
    for group in engine.internals.process_groups():
        if len(ranks) > 1 and dist.get_process_group_ranks(group) == list(ranks):
            return open_collectives(group, engine.device)
    return None


def _placed(
    model: nn.Module, settings: InferenceConfig, setup: Config, weights: WeightSource | None
) -> InferenceEngine:
    """Parameters whole on each rank, or in slices."""
    is_cut = setup.tensor_parallel.size > 1
    is_meta = weights is not None and all(param.is_meta for param in model.parameters())
    if is_meta and not is_cut:  # whole weights in memory one at a time
        weights = _in_bits(model, settings, weights)
    local, mesh, world = place(model, setup, weights)
    local.begin()
    group = mesh.along("tensor") if is_cut else None
    if not settings.keep_module_on_host:
        move_model(local.model, world.device)
    is_proven = True
    cut = local.groups.slices
    if local.experts is not None:
        rest = {id(param) for param in local.model.parameters()} - cut.keys()
        _check_same_values(local.model, rest, world)
    if group is not None:
        assert local.sliced is not None
        _check_same_values(local.model, local.sliced.whole - cut.keys(), group)
        is_proven = settings.keep_module_on_host or _prove(local.model, world.device)
    model.requires_grad_(False)
    if is_cut or not is_meta:
        _in_bits(model, settings, None)
    with agreeing(world, "xds.init_inference"):
        _check_cache(settings, model, world.device)
        cache = _compiled(settings, model, world.device)
    needs_proof = not is_proven and not settings.bit_groups
    return InferenceEngine(
        model, settings, group=group, cache=cache, local=local, needs_proof=needs_proof
    )


def _in_bits(
    model: nn.Module, settings: InferenceConfig, weights: WeightSource | None
) -> WeightSource | None:
    """Weights in few bits as `quant` says, and where they are read from then."""
    groups = settings.bit_groups
    if not groups:
        return weights
    from .bits import BitWeights, store_in_bits

    packings = store_in_bits(model, groups)
    return weights if weights is None else BitWeights(weights, packings)


# -- checks -------------------------------------------------------------------------------------------------


def _check_same_values(model: nn.Module, whole: set[int], group: Collectives) -> None:
    """What every rank has whole has the same values: so slices and experts are of one model. A collective."""
    params = [param for param in model.parameters() if id(param) in whole]
    mine = checksum([param.data.view(-1)[:64] for param in params])
    table = group.gather_small(torch.tensor([mine], device=group.device), what="sums of weights")
    if bool((table != table[0]).any()):
        raise UsageError(
            f"init_inference: the ranks of a group of {group.world_size} have other weights, and each keeps a "
            "slice of its own: load the same weights on all, or call torch.manual_seed with one number"
        )


def _prove(model: nn.Module, device: torch.device) -> bool:
    """Run the model once, so that its slices are compared with whole layers; False: its inputs are not known.

    Raises:
        UsageError: they compute something else.
    """
    inputs = dict(getattr(model, "dummy_inputs", None) or {})
    if "use_cache" in signature(model.forward).parameters:
        inputs["use_cache"] = False
    moved = tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, inputs)
    try:
        prove_slices(model, (), moved)
    except UsageError:
        raise
    except Exception as error:  # a model of another kind of input
        log.debug("%s does not run with %s: %s", type(model).__name__, list(inputs), error)
        return False
    return True


def _check_cache(settings: InferenceConfig, model: nn.Module, device: torch.device) -> None:
    """The keys and values of `min_out_tokens` tokens of one sequence fit the free memory."""
    config: Any = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", 0)
    heads = getattr(config, "num_key_value_heads", None) or getattr(
        config, "num_attention_heads", 0
    )
    if not (layers and heads):
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 2 if settings.dtype in ("fp16", "bf16") else 4
    token_bytes = 2 * layers * heads * width * size
    free = free_bytes(device)
    if free is not None and settings.min_out_tokens * token_bytes > free:
        raise UsageError(
            f"min_out_tokens = {settings.min_out_tokens}: the cache of a sequence takes {token_bytes:,} bytes "
            f"a token, and {free:,} bytes are free, enough for {free // token_bytes:,}; set it lower, or shard "
            "the weights with tp_size or zero"
        )


def _asked_to_compile(settings: InferenceConfig) -> str:
    """The keys that ask for compiled code; empty: none does."""
    keys = ("enable_cuda_graph", "replace_with_kernel_inject")
    return " and ".join(key for key in keys if getattr(settings, key))


def _compiled(
    settings: InferenceConfig, model: nn.Module, device: torch.device
) -> Mapping[str, Any]:
    """Arguments of `generate` that let transformers compile it with a static cache."""
    asked = _asked_to_compile(settings)
    if not asked:
        return {}
    if not device_of(device).has_streams:
        log.info("%s: there is no GPU; torch's own kernels run, without a graph", asked)
        return {}
    mode = "reduce-overhead" if settings.enable_cuda_graph else "default"
    if not getattr(model, "_can_compile_fullgraph", False) or not hasattr(model, "generate"):
        model.compile(mode=mode)
        log.info("%s: the forward is compiled, mode %s", asked, mode)
        return {}
    from transformers import CompileConfig

    log.info("%s: generate is compiled, mode %s, with a static cache", asked, mode)
    return {"cache_implementation": "static", "compile_config": CompileConfig(mode=mode)}


def _say(settings: InferenceConfig, engine: InferenceEngine, num_slices: int) -> None:
    """What rank 0 logs."""
    if dist.get_rank() != 0:
        return
    for key, why in settings.without_effect:
        log.info("init_inference: %s has no effect: %s", key, why)
    bits = sorted({groups.num_bits for groups in settings.bit_groups.values()})
    parts: Sequence[str] = [
        f"{num_slices} slices" if num_slices > 1 else "whole layers",
        *([f"weights of {' and '.join(map(str, bits))} bits"] if bits else []),
        settings.dtype if settings.dtype != "int8" else "the model's dtype",
    ]
    ranks = dist.get_world_size()
    say = "%d ranks" if ranks > 1 else "%d rank"
    log.info(f"xds %s infers: %s, {say}", __version__, ", ".join(parts), ranks)


__all__ = ["init_inference"]
