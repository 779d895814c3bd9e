"""AdamW without a learning-rate schedule, on flat shards.

Source: Defazio et al., The Road Less Scheduled, 2024, algorithm 1, https://arxiv.org/abs/2405.15682, with the
warmup and the weights of the average of the authors' package `schedulefree`. Three sequences of weights:

    z                            the steps of Adam
    x                            their weighted average, for evaluation
    y = (1 - beta1) z + beta1 x  for gradients

The master is y, or x after `eval()`. Differs: the state is z - y and not z. It begins with zeros, and a script
that writes weights moves all three of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ..flat import chunks, take_edits
from .scale import Scale
from .shard_optimizer import Item, ShardOptimizer, Update, World, mark_written


@final
class AdamWScheduleFree(ShardOptimizer):
    """Adam's steps on z with the gradient at y. Training begins without a call of `train()`.

    Args:
        warmup_steps: the learning rate rises from lr / warmup_steps to lr.
        r: step t has the weight t^r lr^weight_lr_power in the average, with the largest lr so far.
    """

    takes_edits = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.0025,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "r": r,
            "weight_lr_power": weight_lr_power,
            "train_mode": True,
        }
        super().__init__(params, defaults)

    @property
    def counts_in_tensors(self) -> bool:
        return False

    def gains_from_kernels(self, *, casts: bool) -> bool:
        return False

    def states_before(self, item: Item) -> dict[str, Any]:
        return {
            "step": 0,
            "weight_sum": 0.0,
            "lr_max": 0.0,
            "exp_avg_sq": item.new_state(),
            "z_minus_y": item.new_state(),
        }

    @torch.no_grad()
    def train(self) -> None:
        """Make the weights those for training, y."""
        self._switch(train_mode=True)

    @torch.no_grad()
    def eval(self) -> None:
        """Make the weights those for evaluation and export, x."""
        self._switch(train_mode=False)

    def _switch(self, *, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train_mode:
                continue
            group["train_mode"] = train_mode
            beta1 = group["betas"][0]
            factor = (1 - beta1) / beta1
            for master in group["params"]:
                offset = self.state.get(master, {}).get("z_minus_y")
                if offset is not None:
                    master.add_(offset, alpha=factor if train_mode else -factor)

    def check_step(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise UsageError(
                "engine.step() after optimizer.eval(): the weights are the averages for evaluation; call "
                "optimizer.train() before the forward of the next step"
            )

    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        for update in updates:
            state, master = self.state_of(update.item), update.item.master
            if update.old is not None:
                update.old.copy_to(master, state)
            rates = _Rates.after(state, update.group)
            for piece in chunks(master.numel(), master.device.type == "cpu"):
                out = None if update.out is None else update.out[piece]
                if update.takes_edits and out is not None:
                    take_edits(master[piece], out)
                grad = update.grad[piece].to(master.dtype)
                if not scale.is_one:
                    grad = grad * scale.value
                rates.step(
                    master[piece], grad, state["exp_avg_sq"][piece], state["z_minus_y"][piece]
                )
                if out is not None:
                    out.copy_(master[piece])
            mark_written(update)


@final
class _Rates:
    """The numbers of one step. weight: of the new z in the average x."""

    def __init__(self, group: dict[str, Any], step: int, lr: float, weight: float) -> None:
        self._beta1, self._beta2 = group["betas"]
        self._eps, self._decay = group["eps"], group["weight_decay"]
        self._correction = 1 - self._beta2**step
        self._lr, self._weight = lr, weight

    @classmethod
    def after(cls, state: dict[str, Any], group: dict[str, Any]) -> _Rates:
        """Count a step in `state`."""
        state["step"] += 1
        step = int(state["step"])
        lr = float(group["lr"]) * min(1.0, step / max(1, group["warmup_steps"]))
        state["lr_max"] = max(lr, state["lr_max"])
        weight = step ** group["r"] * state["lr_max"] ** group["weight_lr_power"]
        state["weight_sum"] += weight
        return cls(group, step, lr, weight / state["weight_sum"] if state["weight_sum"] else 0.0)

    def step(self, y: Tensor, grad: Tensor, exp_avg_sq: Tensor, z_minus_y: Tensor) -> None:
        """Update all but `grad`, [n] each."""
        exp_avg_sq.mul_(self._beta2).addcmul_(grad, grad, value=1 - self._beta2)
        direction = grad / (exp_avg_sq / self._correction).sqrt_().add_(self._eps)
        if self._decay:
            direction.add_(y, alpha=self._decay)
        kept = 1 - self._weight
        y.add_(z_minus_y, alpha=self._weight)
        y.sub_(direction, alpha=self._lr * (1 - self._beta1 * kept))
        z_minus_y.sub_(direction, alpha=self._lr * self._beta1).mul_(kept)


__all__ = ["AdamWScheduleFree"]
