"""The op `frozen_adam_`: a step of Adam whose variance stays, with the cast, in one pass over memory.

Source: Tang et al., 1-bit Adam, 2021, algorithm 1, lines 6 to 13, https://arxiv.org/abs/2102.02888. Differs: an
element whose variance is 0 does not move. It never had a gradient.
"""

from __future__ import annotations

from torch import Tensor

from .define import define, in_chunks, scaled


def frozen_adam_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    scale: Tensor | None,
    rate: float,
    beta1: float,
    root: float,
    eps: float,
    decay: float,
    is_momentum: bool,
) -> None:
    """m = is_momentum ? g : m + (1 - beta1) (g - m); p -= decay p + rate m / (root sqrt(v) + eps) where v > 0.

    Args:
        param: [n] fp32, the master. grad: [n] fp32, bf16 or fp16, multiplied by `scale` (fp32 [], None: 1).
        exp_avg, exp_avg_sq: fp32 [n], the moments m and v.
        out: [n] fp32, bf16 or fp16, receives the new values; or None.
        rate: the learning rate with the correction of m's bias. root: 1 / sqrt of the correction of v's.
        decay: the learning rate times weight decay.
        is_momentum: `grad` is the new momentum.
    """
    wide = scaled(grad, scale, param)
    if is_momentum:
        exp_avg.copy_(wide)
    else:
        exp_avg.lerp_(wide, 1 - beta1)
    change = exp_avg / (exp_avg_sq.sqrt().mul_(root).add_(eps))
    change.mul_(rate).add_(param, alpha=decay)
    param.sub_(change.masked_fill_(exp_avg_sq == 0, 0.0))
    if out is not None:
        out.copy_(param)


frozen_adam_ = define(
    "frozen_adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor exp_avg_sq, Tensor(c!)? out, "
    "Tensor? scale, float rate, float beta1, float root, float eps, float decay, bool is_momentum) -> ()",
    in_chunks(frozen_adam_reference),
)
