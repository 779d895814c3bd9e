"""The dtypes in which a model computes, is reduced and is updated, and what is sharded of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from ...experts.config import BIASES
from ...ops.mesh import Mesh
from ...utils.errors import UsageError
from ...zero.layout.groups import Policy
from ..config.config import Config
from ..config.sections import ROUNDS_MASTERS, Bf16, Fp16

if TYPE_CHECKING:
    from ...utils.module_buffers import Key

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def compute_dtype(config: Config) -> torch.dtype | None:
    """The 16 bits of parameters in forward and backward; None: fp32."""
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None


@final
@dataclass(frozen=True, eq=False)
class Fp32Tensors:
    """What stays fp32 of a model that trains in 16 bits.

    params: id of parameters. buffers: by module and name.
    borders: modules whose inputs and outputs are cast -> their outputs stay fp32.
    unused: key of the config -> its patterns that match nothing.
    """

    params: frozenset[int] = frozenset()
    buffers: frozenset[Key] = frozenset()
    borders: Mapping[nn.Module, bool] = field(default_factory=dict)
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)


def splits_masters(config: Config, given: object = None) -> bool:
    """The fp32 masters of bf16 parameters are these and 16 bits more.

    The optimizer `rounds_masters`; others read and write fp32 tensors. A master on the host, or of a
    parameter that is there, has 32 bits: they are in different memories. It is rounded alike.

    given: the script's optimizer, its class or a callable; None: it is the config's, if there is one.
    """
    bf16 = config.bf16
    if not bf16.enabled or bf16.has_narrow_masters or bf16.master_weights != "split":
        return False
    if given is None:
        return config.optimizer is not None and config.optimizer.type in ROUNDS_MASTERS
    return bool(getattr(given, "rounds_masters", False))


def policy_of(config: Config, splits: bool, stage: int, world_size: int) -> Policy:
    """The policy of ZeRO stage `stage` over a group of `world_size` ranks. splits: see `splits_masters`."""
    accumulate = config.data_types.grad_accum_dtype
    sent = config.communication_data_type
    policy = Policy.of_stage(
        stage,
        world_size=world_size,
        accumulation_steps=config.gradient_accumulation_steps,
        offloads=host_ratio(config) > 0,
        offloads_params=config.zero_optimization.offload_param.device != "none" and stage == 3,
        compute=compute_dtype(config),
        accumulate=DTYPES[accumulate] if accumulate else None,
        communicate=DTYPES[sent] if sent else None,
    )
    if config.recovery.enabled and config.outer is None:
        policy = _of_units(policy, config, world_size)
    return replace(_with_narrow_states(policy, config), splits_masters=splits)


def _of_units(policy: Policy, config: Config, world_size: int) -> Policy:
    """With what the units need that are left when one is lost."""
    num_ranks, num_parts = config.data_parallel_ranks, 0
    mesh = Mesh(pipe=1, data=num_ranks, sequence=config.sequence_parallel_size)
    if config.recovery.keeps_versions(config.zero_optimization, mesh):
        return policy
    if (
        not policy.shards_optimizer
    ):  # each data rank is a unit, and groups have the same ranks of each
        num_parts = world_size // num_ranks * config.recovery.num_parts(num_ranks)
    # ranks run unequal numbers of micro-batches later, and send one dtype all the same
    return replace(policy, holds_grads=not policy.shards_grads, num_parts=num_parts)


def _with_narrow_states(policy: Policy, config: Config) -> Policy:
    """With the masters and states of fewer bits that the config asks for."""
    half: Fp16 | Bf16 = config.fp16 if config.fp16.enabled else config.bf16
    has_narrow_masters = half.enabled and half.has_narrow_masters
    states = STATE_DTYPES[config.state_dtype]
    return replace(
        policy,
        masters=policy.compute if has_narrow_masters else None,
        states=states if has_narrow_masters or states != torch.float32 else None,
        rounding_seed=half.rounding_seed if half.master_rounding == "stochastic" else None,
    )


def host_ratio(config: Config) -> float:
    """The share of the optimizer's states that starts on the host or on a disk."""
    section = config.zero_optimization.offload_optimizer
    at_first = 1.0 if section.ratio == "auto" else section.ratio
    return at_first if section.device != "none" else 0.0


FREQUENCIES = (
    "inv_freq"  # the names of rotary frequencies end so in transformers and most other libraries
)


def buffers_to_cast(
    model: nn.Module, config: Config, kept: Collection[Key]
) -> list[tuple[Tensor, torch.dtype]]:
    """The floating-point buffers that get another dtype, and which. Call it before the parameters are cast.

    kept: module and name of those that stay fp32; also if they came in 16 bits.
    """
    chosen = config.data_types.buffer_dtype
    low = DTYPES[chosen] if chosen else compute_dtype(config)
    found: dict[int, tuple[Tensor, torch.dtype]] = {}
    if low is not None:
        following = _own_buffers(model) if chosen else buffers_that_follow(model)
        found = {id(buffer): (buffer, low) for buffer in following}
    for module, name in kept:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.is_floating_point() and buffer.itemsize > 1:
            found[id(buffer)] = (buffer, torch.float32)
    return list(found.values())


def check_statistics(model: nn.Module, config: Config, kept: Fp32Tensors) -> None:
    """Raises UsageError: torch's batch norm on a CPU would fail, with a weight and statistics of two dtypes."""
    low = compute_dtype(config)
    cast = {id(buffer): dtype for buffer, dtype in buffers_to_cast(model, config, kept.buffers)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.weight is None:
            continue
        is_kept = low is None or id(module.weight) in kept.params
        weight = module.weight.dtype if is_kept else low
        for statistics in (module.running_mean, module.running_var):
            if statistics is None or cast.get(id(statistics), statistics.dtype) == weight:
                continue
            kind = type(module).__name__
            remedy = f'add "{kind}" to data_types.keep_in_fp32_modules, or ' if low else ""
            raise UsageError(
                f"data_types.buffer_dtype and keep_in_fp32_modules give statistics of {name} another dtype "
                f"than its weight's, and on a CPU torch's {kind} needs one; {remedy}remove the key"
            )


def buffers_that_follow(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers to cast to 16 bits with the parameters. Call it before these are cast.

    Buffers that are used with parameters of that dtype are cast: running statistics, and tables that are added
    to activations. These keep their dtype:

    - Rotary frequencies. An angle is position x frequency, and with 8 bits of precision it is off by radians at
      position 1000. Their modules compute in fp32 and cast the result, as `transformers` does with
      `dtype=bfloat16`.
    - Biases by which routers choose experts. They move in steps that 16 bits would round away.
    - Buffers that the model names in `_keep_in_fp32_modules_strict`.
    - Buffers of modules without parameters whose dtype differs from the model's: their author chose it.
    - Buffers of 8 bits, which are scales or have one elsewhere. Parameters of 8 bits keep their dtype too.
    """
    usual = _usual_dtype(model)
    return _own_buffers(model, lambda module, buffer: _has_params(module) or buffer.dtype == usual)


def _own_buffers(
    model: nn.Module, accepts: Callable[[nn.Module, Tensor], bool] = lambda *_: True
) -> list[Tensor]:
    """The floating-point buffers that may be cast and that `accepts` takes."""
    named = {
        name
        for module in model.modules()
        for name in getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    }
    return list(
        {
            id(buffer): buffer
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
            and buffer.itemsize > 1
            and not (name.endswith(FREQUENCIES) or name in BIASES or name in named)
            and accepts(module, buffer)
        }.values()
    )


def _has_params(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """The floating-point dtype that most elements of the model's parameters have."""
    numel: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            numel[param.dtype] += param.numel()
    return numel.most_common(1)[0][0] if numel else None


__all__ = [
    "DTYPES",
    "Fp32Tensors",
    "buffers_that_follow",
    "buffers_to_cast",
    "check_statistics",
    "compute_dtype",
    "host_ratio",
    "policy_of",
    "splits_masters",
]
