"""The dtypes in which a model computes, is reduced and is updated, and what is sharded of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...experts.config import BIASES
from ...zero.layout.groups import Policy
from ..config.config import Config
from ..config.sections import Bf16, Fp16

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compute_dtype(config: Config) -> torch.dtype | None:
    """The 16 bits of parameters in forward and backward; None: fp32."""
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None


def policy_of(config: Config, stage: int, world_size: int) -> Policy:
    """The policy of ZeRO stage `stage` over a group of `world_size` ranks."""
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
    return _with_narrow_states(policy, config)


def _with_narrow_states(policy: Policy, config: Config) -> Policy:
    """With the masters and states of fewer bits that the config asks for."""
    half: Fp16 | Bf16 = config.fp16 if config.fp16.enabled else config.bf16
    has_narrow_masters = half.enabled and half.has_narrow_masters
    states = DTYPES[config.state_dtype]
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
    named = {
        name
        for module in model.modules()
        for name in getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    }
    found: dict[int, Tensor] = {}
    for module in model.modules():
        has_params = any(True for _ in module.parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            is_kept_by_name = name.endswith(FREQUENCIES) or name in named or name in BIASES
            is_chosen = not has_params and buffer.dtype != usual
            is_float = buffer.is_floating_point() and buffer.itemsize > 1
            if is_float and not is_kept_by_name and not is_chosen:
                found[id(buffer)] = buffer
    return list(found.values())


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """The floating-point dtype that most elements of the model's parameters have."""
    numel: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            numel[param.dtype] += param.numel()
    return numel.most_common(1)[0][0] if numel else None


__all__ = ["DTYPES", "buffers_that_follow", "compute_dtype", "host_ratio", "policy_of"]
