"""Settings of ZeRO that xds would train with, and DeepSpeed refuses: the layer refuses them too.

A script that expects the error, or a config that is shared with DeepSpeed, behaves the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ....compression.config import ONE_BIT_OPTIMIZERS
from ....engine.config.differences import SHARDED_BY_DEEPSPEED
from ....utils.errors import UsageError
from ...ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad
from ...ops.adam.cpu_adam import DeepSpeedCPUAdam
from ...ops.adam.fused_adam import FusedAdam
from ...ops.lion.cpu_lion import DeepSpeedCPULion
from ...ops.lion.fused_lion import FusedLion
from .utils import ZeRORuntimeException

_TESTED: tuple[type[torch.optim.Optimizer], ...] = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedLion),
)

_NORM = "zero_optimization.compute_grad_norm = false"


def check_zero(config: Mapping[str, Any], optimizer: Any) -> None:
    """Raises ZeRORuntimeException for the first of `_refusals`.

    config: the keys as they were given. optimizer: what the script passed to `initialize`.
    """
    for refusal in _refusals(config, optimizer):
        raise ZeRORuntimeException(refusal)
    stage = _section(config, "zero_optimization").get("stage", 0)
    if stage and config.get("zero_allow_untested_optimizer") is False:
        _check_tested(config, optimizer)


def _check_tested(config: Mapping[str, Any], optimizer: Any) -> None:
    """Raises UsageError: the config forbids optimizers that DeepSpeed does not know at stages above 0."""
    name: str | None
    if isinstance(optimizer, torch.optim.Optimizer):
        name, is_known = type(optimizer).__name__, type(optimizer) in _TESTED
    else:
        name = _section(config, "optimizer").get("type")
        known = (None, *SHARDED_BY_DEEPSPEED, *ONE_BIT_OPTIMIZERS)
        is_known = optimizer is not None or name in known
    if not is_known:
        raise UsageError(
            f"{name} with zero_allow_untested_optimizer = false: DeepSpeed shards "
            f"{', '.join(sorted({one.__name__ for one in _TESTED}))} alone; set the key to true, or remove it"
        )


def _refusals(config: Mapping[str, Any], optimizer: Any) -> Iterator[str]:
    zero = _section(config, "zero_optimization")
    stage, size = zero.get("stage", 0), zero.get("allgather_bucket_size")
    offloads = _section(zero, "offload_optimizer").get("device", "none") != "none"
    is_own = isinstance(optimizer, torch.optim.Optimizer)
    is_slow = is_own and not isinstance(optimizer, DeepSpeedCPUAdam | DeepSpeedCPULion)
    if offloads and is_slow and config.get("zero_force_ds_cpu_optimizer") is True:
        yield (
            "zero_force_ds_cpu_optimizer = true with an optimizer of the script, "
            f"{type(optimizer).__name__}: needs deepspeed.ops.adam.DeepSpeedCPUAdam, or an optimizer of the "
            "config; remove the key to use it"
        )
    if stage not in (1, 2):
        return
    if isinstance(size, int) and size % 2:
        yield (
            f"zero_optimization.allgather_bucket_size = {size}: in DeepSpeed allgather_bucket_size must be a "
            "multiple of nccl_start_alignment_factor, which is 2; use an even number"
        )
    if zero.get("compute_grad_norm") is not False:
        return
    if offloads:
        yield f"{_NORM}: in DeepSpeed it does not support optimizer offload; remove the key"
    in_fp32 = _section(config, "data_types").get("grad_accum_dtype") == "fp32"
    if stage == 1 and in_fp32 and _section(config, "bf16").get("enabled") is True:
        yield (
            f"{_NORM}: in DeepSpeed it does not support stage 1 with BF16 parameters and FP32 gradient "
            "accumulation; remove the key"
        )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


__all__ = ["check_zero"]
