"""The op `adam_`: unscale, clip, decay, Adam(W) and the cast to the compute dtype in one pass over memory.

Source: Kingma and Ba, Adam, 2015, algorithm 1, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter,
Decoupled Weight Decay Regularization, 2019, algorithm 2, https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

from torch import Tensor

from ..coded import is_coded, wide, write_state
from ..flat import take_edits
from ..halves import Halves
from ..rounding import drawn, narrowed, write_rounded
from .define import define, in_chunks, read_old, scaled, skips


def corrections(step: Tensor, beta1: float, beta2: float, *, applies: bool) -> tuple[float, float]:
    """The divisors 1 - beta^step of both moments; 1 without bias correction."""
    return (1 - beta1 ** float(step), 1 - beta2 ** float(step)) if applies else (1.0, 1.0)


def adam_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    step: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    takes_edits: bool = False,
    old_param: Tensor | None = None,
    old_exp_avg: Tensor | None = None,
    old_exp_avg_sq: Tensor | None = None,
    draws: Tensor | None = None,
    low: Tensor | None = None,
    rounds_away: bool = False,
) -> None:
    """One step.

    Args:
        param: [n] fp32, bf16 or fp16, the master weights. grad: [n] fp32, bf16 or fp16, not changed.
        exp_avg, exp_avg_sq: [n], both fp32 or both bf16; or rows of 8 bits (ops/coded.py), int8 and uint8.
        out: [n] fp32, bf16 or fp16, receives the new values, rounded to nearest even; or None.
        step: fp32 [], the number of this step, from 1 on.
        scale: fp32 [], the factor of the gradient; None is 1.
        found_inf: fp32 []; where it is not 0, nothing changes.
        decoupled: weight decay as in AdamW; else it is added to the gradient (L2).
        bias_correction: divide the moments by 1 - beta^step.
        takes_edits: `out`, bf16 or fp16, equals `param` rounded, except where a script has written to it.
            Those values are copied to `param` first.
        old_param, old_exp_avg, old_exp_avg_sq: where the values before the step are, which are not changed;
            `param`, `exp_avg` and `exp_avg_sq` are undefined then. None: they hold the values themselves.
        draws: int64 [k, 3], see ops/rounding.py: a `param` of 16 bits, a bf16 `exp_avg_sq`, and states of 8
            bits are rounded stochastically. None: to nearest even.
        low: int16 [n], the lower halves of fp32 master weights, of which a bf16 `param` has the upper ones: see
            ops/halves.py. `out` and old values are None then, and `draws` for the states alone.
        rounds_away: `out`, bf16, is rounded as those upper halves.
    """
    if skips(found_inf):
        return
    read_old((param, old_param), (exp_avg, old_exp_avg), (exp_avg_sq, old_exp_avg_sq))
    if low is not None:
        value = Halves(param, low).joined()
    else:
        value = param if param.dtype.itemsize > 2 else param.float()
    if takes_edits and out is not None:
        take_edits(value, out, rounds_away=rounds_away)
    first, second = corrections(step, beta1, beta2, applies=bias_correction)
    gradient = scaled(grad, scale, value)
    if decoupled:
        value.mul_(1 - lr * weight_decay)
    else:
        gradient.add_(value, alpha=weight_decay)
    mean, square = wide(exp_avg, value.dtype), wide(exp_avg_sq, value.dtype)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    value.addcdiv_(mean, square.sqrt().div_(second**0.5).add_(eps), value=-lr / first)
    numbers = None if draws is None else drawn(draws, int(step), param.numel())
    write_state(exp_avg, mean, numbers if is_coded(exp_avg) else None)
    write_state(exp_avg_sq, square, numbers)
    if low is not None:
        Halves(param, low).write(value)
    else:
        write_rounded(param, value, numbers)
    if out is not None:
        out.copy_(narrowed(value, out.dtype, rounds_away=rounds_away))


adam_ = define(
    "adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? out, "
    "Tensor step, Tensor? scale, Tensor? found_inf, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled, bool bias_correction, bool takes_edits=False, "
    "Tensor? old_param=None, Tensor? old_exp_avg=None, Tensor? old_exp_avg_sq=None, Tensor? draws=None, "
    "Tensor(e!)? low=None, bool rounds_away=False) -> ()",
    in_chunks(adam_reference),
)
