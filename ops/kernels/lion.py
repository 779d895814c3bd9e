"""The op `lion_`: unscale, clip, decay, Lion and the cast to the compute dtype in one pass over memory.

Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1,
https://arxiv.org/abs/2302.06675.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..coded import wide, write_state
from ..flat import take_edits
from ..halves import Halves
from ..rounding import drawn, narrowed, write_rounded
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
    step: Tensor | None = None,
    draws: Tensor | None = None,
    low: Tensor | None = None,
    rounds_away: bool = False,
) -> None:
    """One step. Shapes, dtypes and the arguments of the same name: see `adam_reference`.

    step: needed with `draws`, which round a bf16 `exp_avg` too.
    """
    if skips(found_inf):
        return
    read_old((param, old_param), (exp_avg, old_exp_avg))
    if low is not None:
        value = Halves(param, low).joined()
    else:
        value = param if param.dtype.itemsize > 2 else param.float()
    if takes_edits and out is not None:
        take_edits(value, out, rounds_away=rounds_away)
    gradient, mean = scaled(grad, scale, value), wide(exp_avg, value.dtype)
    direction = torch.lerp(mean, gradient, 1 - beta1).sign_()
    value.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
    numbers = None if draws is None or step is None else drawn(draws, int(step), param.numel())
    write_state(exp_avg, mean.lerp_(gradient, 1 - beta2), numbers)
    if low is not None:
        Halves(param, low).write(value)
    else:
        write_rounded(param, value, numbers)
    if out is not None:
        out.copy_(narrowed(value, out.dtype, rounds_away=rounds_away))


lion_ = define(
    "lion_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!)? out, Tensor? scale, "
    "Tensor? found_inf, float lr, float beta1, float beta2, float weight_decay, bool takes_edits=False, "
    "Tensor? old_param=None, Tensor? old_exp_avg=None, Tensor? step=None, Tensor? draws=None, "
    "Tensor(d!)? low=None, bool rounds_away=False) -> ()",
    in_chunks(lion_reference),
)
