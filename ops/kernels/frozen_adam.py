"""The op `frozen_adam_`: a step of Adam whose variance stays, with the cast, in one pass over memory.

Source: Tang et al., 1-bit Adam, 2021, algorithm 1, lines 6 to 13, https://arxiv.org/abs/2102.02888. Differs: an
element whose variance is 0 does not move, as it never had a gradient; and no element changes by more than
`limit` in a step.
"""

from __future__ import annotations

from torch import Tensor

from ..flat import take_edits
from .define import define, in_chunks, read_old, scaled, skips


def frozen_adam_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    scale: Tensor | None,
    found_inf: Tensor | None,
    rate: float,
    beta1: float,
    root: float,
    eps: float,
    decay: float,
    limit: float,
    is_momentum: bool,
    takes_edits: bool = False,
    old_param: Tensor | None = None,
    old_exp_avg: Tensor | None = None,
    old_exp_avg_sq: Tensor | None = None,
) -> None:
    """m = is_momentum ? g : m + (1 - beta1) (g - m); p -= decay p + change where v > 0.

    change = rate m / (root sqrt(v) + eps), at most `limit` in size.

    Shapes, dtypes and the arguments of the same name: see `adam_reference`.

    Args:
        rate: the learning rate with the correction of m's bias. root: 1 / sqrt of the correction of v's.
        decay: the learning rate times weight decay.
        limit: the most that an element changes, without weight decay.
        is_momentum: `grad` is the new momentum.
    """
    if skips(found_inf):
        return
    read_old((param, old_param), (exp_avg, old_exp_avg), (exp_avg_sq, old_exp_avg_sq))
    if takes_edits and out is not None:
        take_edits(param, out)
    wide = scaled(grad, scale, param)
    mean = wide if is_momentum else exp_avg.to(param.dtype).lerp_(wide, 1 - beta1)
    variance = exp_avg_sq.to(param.dtype)
    change = mean / (variance.sqrt().mul_(root).add_(eps))
    change.mul_(rate).clamp_(-limit, limit).add_(param, alpha=decay)
    param.sub_(change.masked_fill_(~(variance > 0), 0.0))
    exp_avg.copy_(mean)
    if out is not None:
        out.copy_(param)


frozen_adam_ = define(
    "frozen_adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(d!) exp_avg_sq, "
    "Tensor(c!)? out, Tensor? scale, Tensor? found_inf, float rate, float beta1, float root, float eps, "
    "float decay, float limit, bool is_momentum, bool takes_edits=False, Tensor? old_param=None, "
    "Tensor? old_exp_avg=None, Tensor? old_exp_avg_sq=None) -> ()",
    in_chunks(frozen_adam_reference),
)
