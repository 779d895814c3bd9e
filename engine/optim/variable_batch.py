"""A schedule times a factor that follows the samples of each step, for steps of unequal numbers of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from ...utils.errors import UsageError
from ..data.length_batches import scale_lr
from .schedule_base import HasParamGroups, group_lrs


@final
class VariableBatchSizeLR:
    """The learning rates of another schedule, scaled for the number of samples of the step that comes next.

    Names and values are those of DeepSpeed, except that a skipped step takes the size of its batch with it: the
    sizes stay those of the loader's steps.

    Args:
        base: the schedule; None: the learning rates that the optimizer has.
        optimizer: whose `lr` is written.
        batch_sizes: the samples of each step of an epoch; the next epoch has the same.
        base_batch_size: the samples for which the learning rates were chosen.
        lr_scaling_method: "linear", "sqrt" or "none", see `scale_lr`.
    """

    def __init__(
        self,
        base: Any,
        optimizer: HasParamGroups,
        batch_sizes: Sequence[int],
        base_batch_size: int,
        lr_scaling_method: str | None = "linear",
    ) -> None:
        self.base_lr_scheduler, self.optimizer = base, optimizer
        self.batch_sizes, self.base_batch_size = list(batch_sizes), base_batch_size
        self.lr_scaling_method = lr_scaling_method
        self._at = 0  # the step of the loader that comes next
        self._unscaled = group_lrs(optimizer)
        self._write()

    def step(self, epoch: int | None = None) -> None:
        """Go to the next step, or to the one given; both the schedule and the sizes."""
        self._set(self._unscaled)  # schedules of torch compute from it
        if self.base_lr_scheduler is not None:
            if epoch is None:
                self.base_lr_scheduler.step()
            else:
                self.base_lr_scheduler.step(epoch)
        self._at = self._at + 1 if epoch is None else epoch
        self._unscaled = group_lrs(self.optimizer)
        self._write()

    def skip_step(self) -> None:
        """A step was not applied: the schedule stays, and the sizes go on."""
        self._at += 1
        self._write()

    def get_lr(self) -> list[float]:
        """The lr of each group for the step that comes next."""
        return group_lrs(self.optimizer)

    def get_last_lr(self) -> list[float]:
        """The same."""
        return group_lrs(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        base = self.base_lr_scheduler
        return {
            "step": self._at,
            "unscaled": list(self._unscaled),
            "base": None if base is None else base.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the saved step.

        Raises:
            UsageError: `state` is not that of such a schedule.
        """
        step, unscaled = state.get("step"), state.get("unscaled")
        is_right = isinstance(step, int) and isinstance(unscaled, list) and "base" in state
        if not is_right or len(unscaled) != len(self.optimizer.param_groups):  # type: ignore[arg-type]
            raise UsageError(
                "VariableBatchSizeLR.load_state_dict needs step, base, and unscaled with a number for each "
                f"of the {len(self.optimizer.param_groups)} parameter groups; another schedule saved this state"
            )
        if self.base_lr_scheduler is not None and state["base"] is not None:
            self.base_lr_scheduler.load_state_dict(state["base"])
        self._at, self._unscaled = step, [float(lr) for lr in unscaled]  # type: ignore[assignment, union-attr]
        self._write()

    def _write(self) -> None:
        size = self.batch_sizes[self._at % len(self.batch_sizes)]
        factor = scale_lr(self.base_batch_size, size, 1, self.lr_scaling_method)
        self._set([lr * factor for lr in self._unscaled])

    def _set(self, rates: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


__all__ = ["VariableBatchSizeLR"]
