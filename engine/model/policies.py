"""What a config shards and in which dtypes it computes, for a group of ranks."""

from __future__ import annotations

import torch

from ...zero.layout.groups import Policy
from ..config.config import Config
from .offloading import host_ratio

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
    return Policy.of_stage(
        stage,
        world_size=world_size,
        accumulation_steps=config.gradient_accumulation_steps,
        offloads=host_ratio(config) > 0,
        offloads_params=config.zero_optimization.offload_param.device != "none" and stage == 3,
        compute=compute_dtype(config),
        accumulate=DTYPES[accumulate] if accumulate else None,
        communicate=DTYPES[sent] if sent else None,
    )


__all__ = ["DTYPES", "compute_dtype", "policy_of"]
