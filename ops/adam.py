"""Adam and AdamW on flat shards.

Source: Kingma and Ba, Adam, 2015, algorithm 1, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter,
Decoupled Weight Decay Regularization, 2019, algorithm 2, https://arxiv.org/abs/1711.05101.
torch's fused kernel does the arithmetic, so results are torch.optim.Adam(W)(fused=True)'s bit for bit; the
plain version here is for `bias_correction=False`, and is the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .flat import chunks
from .shard_optimizer import ShardOptimizer, Update, World


@final
class Adam(ShardOptimizer):
    """Adam with decoupled (AdamW) or coupled (L2) weight decay.

    Args:
        params: 1-D fp32 tensors or groups of them.
        adam_w_mode: decoupled weight decay.
        bias_correction: divide the moments by 1 - beta^t. False as in DeepSpeed's BERT recipes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self._adam_w_mode = adam_w_mode

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: float, world: World) -> None:
        divisor = None if scale == 1.0 else 1.0 / scale
        for update in updates:
            master = update.item.master
            state = self.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"] = torch.zeros_like(master)
                state["exp_avg_sq"] = torch.zeros_like(master)
            state["step"] += 1
            group = self.param_groups[update.item.group]
            grad = update.grad
            if not group["bias_correction"] or grad.dtype != master.dtype:
                grad = grad.to(master.dtype)
            if world.collectives.world_size == 1 and group["bias_correction"]:
                # one call a parameter, as torch makes it: its kernel rounds the ragged tail of a tensor
                # differently, and one rank shall equal plain torch bit for bit
                here = [slice(part.start, part.stop) for part in update.item.parts]
                self._fused(
                    [[t[at] for at in here] for t in (master, grad, *_moments(state))],
                    state["step"],
                    group,
                    divisor,
                )
                if update.out is not None:
                    update.out.copy_(master)
                continue
            on_cpu = master.device.type == "cpu"
            # a piece stays in the cache from the update to the cast; without a cast one call is best
            for piece in chunks(master.numel(), on_cpu and update.out is not None):
                tensors = (
                    master[piece],
                    grad[piece],
                    state["exp_avg"][piece],
                    state["exp_avg_sq"][piece],
                )
                if group["bias_correction"]:
                    self._fused([[t] for t in tensors], state["step"], group, divisor)
                else:
                    adam_reference(*tensors, group, scale, decoupled=self._adam_w_mode)
                if update.out is not None:
                    update.out[piece].copy_(tensors[0])

    def _fused(
        self,
        lists: Sequence[list[Tensor]],
        step: Tensor,
        group: dict[str, Any],
        divisor: float | None,
    ) -> None:
        params, grads, exp_avgs, exp_avg_sqs = lists
        call = torch._fused_adamw_ if self._adam_w_mode else torch._fused_adam_
        call(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(params),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None if divisor is None else torch.tensor(divisor, device=step.device),
            found_inf=None,
        )


def _moments(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return state["exp_avg"], state["exp_avg_sq"]


def adam_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    group: dict[str, Any],
    scale: float,
    *,
    decoupled: bool,
) -> None:
    """One step without bias correction, in plain torch. Shapes: every tensor [n]; `grad` is overwritten."""
    lr, decay = float(group["lr"]), group["weight_decay"]
    beta1, beta2 = group["betas"]
    grad.mul_(scale)
    if decoupled:
        param.mul_(1 - lr * decay)
    elif decay:
        grad.add_(param, alpha=decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    param.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-lr)
