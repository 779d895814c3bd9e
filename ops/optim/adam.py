"""Adam and AdamW on flat shards.

Source: Kingma and Ba, Adam, 2015, algorithm 1, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter,
Decoupled Weight Decay Regularization, 2019, algorithm 2, https://arxiv.org/abs/1711.05101.
Without casts torch's fused kernel does the arithmetic, so results equal torch.optim.Adam(W)(fused=True) bit for
bit. Where parameters have a narrower dtype than their masters, the op `adam_` updates and casts in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..flat import chunks, take_edits
from ..kernels.adam import adam_
from ..libraries import is_loaded, optimizer_library
from ..rounding import narrowed
from .scale import Scale
from .shard_optimizer import Item, ShardOptimizer, Update, World, mark_written


class Adam(ShardOptimizer):
    """Adam with decoupled (AdamW) or coupled (L2) weight decay.

    Args:
        params: 1-D fp32 tensors or groups of them.
        adam_w_mode: decoupled weight decay.
        bias_correction: divide the moments by 1 - beta^t. DeepSpeed's BERT recipes set it to False.
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
        self._rule = AdamRule(adam_w_mode)
        self.adam_w_mode = adam_w_mode

    def gains_from_kernels(self, *, casts: bool) -> bool:
        return casts or not all(group["bias_correction"] for group in self.param_groups)

    takes_edits = True

    counts_together = True

    rounds_masters = True

    square_states = ("exp_avg_sq",)

    def states_before(self, item: Item) -> dict[str, Any]:
        return new_moments(item)

    def takes_decisions(self, device: torch.device, *, casts: bool) -> bool:
        """torch's kernel takes them where nothing is cast, and a kernel of a library anywhere."""
        return not self.gains_from_kernels(casts=casts) or is_loaded(optimizer_library(device))

    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        for update in updates:
            state = self.state_of(update.item)
            if not update.is_counted:
                state["step"] += 1
            self._rule.step(update, state, scale, world)


def new_moments(item: Item) -> dict[str, Tensor]:
    """The states of Adam before its first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=item.master.device),
        "exp_avg": item.new_state(),
        "exp_avg_sq": item.new_state(of_squares=True),
    }


@final
class AdamRule:
    """The arithmetic of one step of Adam on one item."""

    def __init__(self, adam_w_mode: bool) -> None:
        self._adam_w_mode = adam_w_mode

    def step(self, update: Update, state: dict[str, Any], scale: Scale, world: World) -> None:
        """Update master, moments and `out`. state["step"] counts this step."""
        if self._is_one_pass(update, update.group):
            self._one_pass(update, state, update.group, scale)
        else:
            self._torch(update, state, update.group, scale, world)

    def _is_one_pass(self, update: Update, group: dict[str, Any]) -> bool:
        """Whether there are casts to fuse with the update, and a kernel for it."""
        item = update.item
        if update.halves is not None and is_loaded(optimizer_library(update.grad.device)):
            return True
        if not group["bias_correction"] or min(item.master.itemsize, item.state_dtype.itemsize) < 4:
            return True
        has_casts = update.out is not None or update.grad.dtype != item.master.dtype
        return has_casts and is_loaded(optimizer_library(update.grad.device))

    def _one_pass(
        self, update: Update, state: dict[str, Any], group: dict[str, Any], scale: Scale
    ) -> None:
        high, low = update.halves or (update.item.master, None)
        adam_(
            high,
            update.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            update.out,
            state["step"],
            scale.on(update.grad.device),
            scale.found_inf,
            float(group["lr"]),
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            self._adam_w_mode,
            group["bias_correction"],
            update.takes_edits,
            *update.old_values(state, "exp_avg", "exp_avg_sq"),
            draws=update.item.draws,
            low=low,
            rounds_away=update.item.rounds_away,
        )
        mark_written(update)

    def _torch(
        self,
        update: Update,
        state: dict[str, Any],
        group: dict[str, Any],
        scale: Scale,
        world: World,
    ) -> None:
        """torch's own kernel: the same bits as plain torch where nothing is cast."""
        master, out = update.item.master, update.out
        rounds_away = update.item.rounds_away
        grad = update.grad.to(master.dtype)
        is_alone = world.flat_of(update.item).collectives.world_size == 1
        if update.halves is not None:
            pieces = (
                update.item.runs if is_alone else chunks(grad.numel(), grad.device.type == "cpu")
            )
            for piece in pieces:
                halves = update.halves.part(piece.start, piece.stop)
                values = halves.joined()
                states = (state[key][piece] for key in ("exp_avg", "exp_avg_sq"))
                lists = [[tensor] for tensor in (values, grad[piece], *states)]
                self._fused(lists, state["step"], group, scale)
                halves.write(values)
            return
        if update.old is not None:
            update.old.copy_to(master, state)
            # the kernel writes the unscaled gradient back
            grad = grad.clone() if grad is update.grad and not scale.is_one else grad
        tensors = (master, grad, state["exp_avg"], state["exp_avg_sq"])
        if is_alone:
            if update.takes_edits and out is not None:
                take_edits(master, out, rounds_away=rounds_away)
            # as one call for each parameter: a single rank must equal plain torch bit for bit
            runs = update.item.runs
            self._fused([[t[run] for run in runs] for t in tensors], state["step"], group, scale)
            if out is not None:
                out.copy_(narrowed(master, out.dtype, rounds_away=rounds_away))
            return
        on_cpu = master.device.type == "cpu"
        # a piece stays in the cache from the update to the cast; without a cast one call is fastest
        for piece in chunks(master.numel(), on_cpu and out is not None):
            if update.takes_edits and out is not None:
                take_edits(master[piece], out[piece], rounds_away=rounds_away)
            self._fused([[t[piece]] for t in tensors], state["step"], group, scale)
            if out is not None:
                out[piece].copy_(narrowed(master[piece], out.dtype, rounds_away=rounds_away))

    def _fused(
        self,
        lists: Sequence[list[Tensor]],
        step: Tensor,
        group: dict[str, Any],
        scale: Scale,
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
            grad_scale=scale.inverse_on(step.device),
            found_inf=scale.found_inf,
        )


__all__ = ["Adam", "AdamRule", "new_moments"]
