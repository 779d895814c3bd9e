"""The op `adagrad_`: unscale, clip, decay, Adagrad and the cast to the compute dtype in one pass over memory.

Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011, figure 1 (the diagonal form),
https://jmlr.org/papers/v12/duchi11a.html; the decays are torch.optim.Adagrad's.
"""

from __future__ import annotations

from torch import Tensor

from ..flat import take_edits
from .define import define, in_chunks, read_old, scaled, skips


def adagrad_reference(
    param: Tensor,
    grad: Tensor,
    state_sum: Tensor,
    out: Tensor | None,
    step: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    takes_edits: bool = False,
    old_param: Tensor | None = None,
    old_state_sum: Tensor | None = None,
) -> None:
    """One step. Shapes, dtypes and the arguments of the same name: see `adam_reference`.

    Args:
        state_sum: [n] fp32 or bf16, the sum of squared gradients.
    """
    if skips(found_inf):
        return
    read_old((param, old_param), (state_sum, old_state_sum))
    if takes_edits and out is not None:
        take_edits(param, out)
    wide = scaled(grad, scale, param).add_(param, alpha=weight_decay)
    total = state_sum.to(param.dtype).addcmul_(wide, wide)
    rate = lr / (1 + (float(step) - 1) * lr_decay)
    param.addcdiv_(wide, total.sqrt().add_(eps), value=-rate)
    state_sum.copy_(total)
    if out is not None:
        out.copy_(param)


adagrad_ = define(
    "adagrad_(Tensor(a!) param, Tensor grad, Tensor(b!) state_sum, Tensor(c!)? out, Tensor step, "
    "Tensor? scale, Tensor? found_inf, float lr, float lr_decay, float eps, float weight_decay, "
    "bool takes_edits=False, "
    "Tensor? old_param=None, Tensor? old_state_sum=None) -> ()",
    in_chunks(adagrad_reference),
)
