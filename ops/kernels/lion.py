"""The op `lion_`: unscale, clip, decay, Lion and the cast to the compute dtype in one pass over memory.

Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1,
https://arxiv.org/abs/2302.06675.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..flat import take_edits
from .define import define, in_chunks, read_old, scaled, skips


def lion_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    out: Tensor | None,
    scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    takes_edits: bool = False,
    old_param: Tensor | None = None,
    old_exp_avg: Tensor | None = None,
) -> None:
    """One step. Shapes, dtypes and the arguments of the same name: see `adam_reference`."""
    if skips(found_inf):
        return
    read_old((param, old_param), (exp_avg, old_exp_avg))
    if takes_edits and out is not None:
        take_edits(param, out)
    wide = scaled(grad, scale, param)
    mean = exp_avg.to(param.dtype)
    direction = torch.lerp(mean, wide, 1 - beta1).sign_()
    param.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
    exp_avg.copy_(mean.lerp_(wide, 1 - beta2))
    if out is not None:
        out.copy_(param)


lion_ = define(
    "lion_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!)? out, Tensor? scale, "
    "Tensor? found_inf, float lr, float beta1, float beta2, float weight_decay, bool takes_edits=False, "
    "Tensor? old_param=None, Tensor? old_exp_avg=None) -> ()",
    in_chunks(lion_reference),
)
