"""The op `sgd_`: unscale, clip, decay, SGD with momentum and the cast to the compute dtype in one pass.

Source: Sutskever et al., On the importance of initialization and momentum, 2013, section 2,
https://proceedings.mlr.press/v28/sutskever13.html, in torch.optim.SGD's form: the rate multiplies velocity.
"""

from __future__ import annotations

from torch import Tensor

from ..flat import take_edits
from .define import define, in_chunks, read_old, scaled, skips


def sgd_reference(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    out: Tensor | None,
    step: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    takes_edits: bool = False,
    old_param: Tensor | None = None,
    old_momentum_buffer: Tensor | None = None,
) -> None:
    """One step. Shapes, dtypes and the arguments of the same name: see `adam_reference`.

    Args:
        momentum_buffer: [n] fp32 or bf16; None: no momentum. At step 1 it becomes the gradient.
    """
    if skips(found_inf):
        return
    read_old((param, old_param), (momentum_buffer, old_momentum_buffer))
    if takes_edits and out is not None:
        take_edits(param, out)
    wide = scaled(grad, scale, param).add_(param, alpha=weight_decay)
    if momentum_buffer is not None:
        if float(step) <= 1:
            moving = wide.clone()
        else:
            moving = momentum_buffer.to(param.dtype).mul_(momentum).add_(wide, alpha=1 - dampening)
        momentum_buffer.copy_(moving)
        wide = wide.add_(moving, alpha=momentum) if nesterov else moving
    param.add_(wide, alpha=-lr)
    if out is not None:
        out.copy_(param)


sgd_ = define(
    "sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor(c!)? out, Tensor step, "
    "Tensor? scale, Tensor? found_inf, float lr, float momentum, float dampening, float weight_decay, "
    "bool nesterov, bool takes_edits=False, "
    "Tensor? old_param=None, Tensor? old_momentum_buffer=None) -> ()",
    in_chunks(sgd_reference),
)
