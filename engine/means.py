"""Means over the items of a step, such as tokens: what each micro-batch counts for, and the mean of the losses.

    gradient = sum of weight * gradient / sum of weight        over all micro-batches and ranks
    loss     = sum of weight * loss     / sum of weight

The loss of a micro-batch is multiplied by its weight before its backward. The sum of the weights comes with the
message of the gradient norm, so it is known when the update needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..ops.device import wide, wide_place
from ..utils.arguments import wrong
from ..utils.errors import UsageError

# Losses are multiplied by weight / UNIT: numbers of tokens are near 1 then, which fp16 needs. It is a power of
# 2, so it changes no digit of a gradient.
UNIT = 1024.0
LEAST = 1e-30  # fp32, in which losses are multiplied, holds it and its inverse

Weight = float | Tensor  # a scalar


@final
class StepMeans:
    """The weights and losses of the micro-batches of one step on this rank, and then those of all ranks."""

    def __init__(self, device: torch.device, share: float, refused_by: str = "") -> None:
        """
        Args:
            share: of this rank in the mean over all ranks that compute losses.
            refused_by: the setting with which losses cannot have weights; "": none.
        """
        self.loss = math.nan  # the mean of the last step
        self.weight: float | None = (
            None  # of the last step, in items / UNIT and rank; None: there was none
        )
        self._refused_by = refused_by
        self._device, self._share = wide_place(device), share
        self._num_means = round(1 / share)  # of losses of the mean, at any number of ranks
        self._forget()

    def _forget(self) -> None:
        self._losses: list[Tensor] = []  # their sum is this rank's part of the mean
        self._weights: list[Weight] = []
        self._is_weighted: bool | None = None  # None: no backward yet
        self._has_all = True
        self._total: float | None = None

    def state(self) -> dict[str, float | None] | None:
        """The sums of a step that is not over; None: none has begun.

        weight: None without weights. loss: None if it is not known.
        """
        if self._is_weighted is None:
            return None
        loss = float(sum(self._losses)) if self._has_all else math.nan
        return {
            "weight": float(sum(self._weights)) if self._is_weighted else None,
            "loss": loss if math.isfinite(loss) else None,
        }

    def resume(self, state: Mapping[str, float | None] | None) -> None:
        """Go on with a step that has this `state`."""
        self._forget()
        if state is None:
            return
        weight, loss = state["weight"], state["loss"]
        self._is_weighted, self._has_all = weight is not None, loss is not None
        self._weights = [] if weight is None else [weight]
        self._losses = [torch.full((), loss or 0.0, dtype=torch.float64, device=self._device)]

    def checked(self, weight: Any) -> Weight:
        """`weight` of a loss, if it is valid.

        Raises:
            UsageError: it is not, or the config computes no means, or messages keep errors of gradients, whose
                divisor comes too late.
        """
        if self._refused_by:
            raise UsageError(
                f"backward: weight does not work with {self._refused_by}: the sum of all weights, which "
                "divides gradients, is known after they are sent; multiply the loss yourself, or change the "
                "config"
            )
        return _checked(weight)

    def begin(self, *, is_weighted: bool) -> None:
        """A backward begins.

        Raises:
            UsageError: others of this step have a weight, and this one has none, or the reverse.
        """
        if self._is_weighted is not None and self._is_weighted != is_weighted:
            raise UsageError(
                "backward(loss, weight=...) and backward without weight in one step: give each micro-batch a "
                "weight, or none; zero_grad() drops those before"
            )
        self._is_weighted, self._total = is_weighted, None

    def begin_unseen(self) -> None:
        """A backward begins that user code has started, whose loss is not known."""
        self.begin(is_weighted=False)
        self._has_all = False

    def add(self, loss: Tensor, weight: Weight | None) -> None:
        """A micro-batch ends. loss: [], with a weight its mean, else its share of the mean over the step."""
        self._losses.append(weighted(loss, weight))
        if weight is not None:
            self._weights.append(weight)

    def add_all(
        self, losses: Sequence[Tensor], weights: Sequence[Weight | None], divisor: int
    ) -> None:
        """What a pipeline has computed. Both are empty on the ranks without its last stage.

        divisor: of losses without weights, as of their gradients.
        Raises UsageError: as `begin`.
        """
        for loss, weight in zip(losses, weights, strict=True):
            self.begin(is_weighted=weight is not None)
            self.add(loss if weight is not None else loss / divisor, weight)

    @property
    def is_weighted(self) -> bool:
        """The micro-batches of this rank have weights."""
        return bool(self._is_weighted)

    def message(self) -> Tensor:
        """What this rank says, fp64 [2].

        With weights: its part of their mean over the ranks, and of the weighted losses, both / UNIT. Without
        weights: -1 and its loss. On a rank without losses: 0 and 0.
        """
        loss: Any = sum(self._losses) if self._has_all else math.nan
        weight: Any = -1.0 if self._losses or not self._has_all else 0.0
        if self._is_weighted:
            part = self._share / UNIT
            weight, loss = sum(self._weights) * part, loss * part
        # filled, not copied from the host, which would wait for the device
        return torch.stack([self._on_device(weight), self._on_device(loss)])

    def _on_device(self, value: Weight) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device).double()
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def arrived(self, messages: Sequence[tuple[float, float]]) -> None:
        """The `message` of every rank, in rank order.

        Raises:
            UsageError: on every rank: some have given weights, and others have not.
        """
        weights = [weight for weight, _ in messages]
        if min(weights) < 0 and max(weights) > 0:
            rank = next(rank for rank, weight in enumerate(weights) if weight > 0)
            raise UsageError(
                f"the losses of rank {rank} have a weight in this step, and those of others have none: give "
                "every micro-batch of every rank a weight, or none"
            )
        self._total = losses = 0.0
        for weight, loss in messages:  # `sum` compensates rounding in some versions of Python
            self._total += weight
            losses += loss
        self.weight = self._total if self._total >= 0 else None
        divisor = self._total if self._total >= 0 else self._num_means
        self.loss = losses / divisor if divisor else 0.0

    @property
    def has_no_items(self) -> bool:
        """After `arrived`: all weights of the step are 0."""
        return self._total == 0

    def divisor(self) -> float:
        """What the sums of gradients are divided by beside the number of ranks: 1 without weights.

        With weights: their mean over the ranks / UNIT, after `arrived`; 1 where all are 0.

        Raises:
            UsageError: it is not known yet.
        """
        if self._total is None and self._is_weighted:
            raise UsageError(
                "gradients of backward(loss, weight=...) have no mean before the sum of all weights is known: "
                "call engine.clip_grad_norm(inf) before reading or changing them"
            )
        return self._total if self._total is not None and self._total > 0 else 1.0

    def end(self) -> None:
        """The step is over, or its gradients are dropped."""
        self._forget()


def weighted(loss: Tensor, weight: Weight | None) -> Tensor:
    """`loss` times `weight`, [] fp64, detached. The mean of no items may be NaN, and counts for nothing."""
    value = wide(loss.detach()).reshape(())
    if weight is None:
        return value
    if isinstance(weight, Tensor):
        weight = weight.to(value.device)
        return (value * weight).where(weight != 0, 0.0)
    return value * weight if weight else torch.zeros_like(value)


def _checked(weight: Any) -> Weight:
    """Raises UsageError unless `weight` is 0 or a number that fp32 holds, or a tensor of one element."""
    need = f"a finite number of items, 0 or {LEAST} to {1 / LEAST:g}, or a tensor with one"
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise UsageError(
                f"backward: weight is a tensor of shape {tuple(weight.shape)}: must be {need}"
            )
        if weight.device.type != "cpu":  # not read: the host would wait for the device
            return weight.detach().reshape(())
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise wrong("backward: weight", weight, need)
    if weight != 0 and not LEAST <= weight <= 1 / LEAST:
        raise wrong("backward: weight", weight, need)
    return float(weight)


__all__ = ["UNIT", "StepMeans", "Weight", "weighted"]
