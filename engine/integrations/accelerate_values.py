"""Config values from a script's arguments to accelerate: loaders, placeholders, accumulation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from .given import Given


def batch_values(objects: Iterable[Any], accelerator: Any, data_ranks: int) -> dict[str, Given]:
    """The accumulation steps, and the batch sizes from the first loader that has a batch size.

    data_ranks: the data-parallel ones of the accelerator's processes.
    """
    steps = accelerator.gradient_accumulation_steps
    values = {
        "gradient_accumulation_steps": Given(
            steps, "Accelerator.gradient_accumulation_steps", is_default=True
        )
    }
    micro = next(filter(None, map(_batch_size, objects)), None)
    if micro is not None:
        if accelerator.split_batches:
            micro = max(1, micro // accelerator.num_processes)
        values["train_micro_batch_size_per_gpu"] = Given(
            micro, "the DataLoader's batch_size", is_default=True
        )
        values["train_batch_size"] = Given(
            micro * steps * data_ranks,
            "the DataLoader's batch_size x gradient_accumulation_steps x data-parallel processes",
        )
    return values


def _batch_size(loader: Any) -> int | None:
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_size is not None:
        return int(loader.batch_size)
    size = getattr(loader.batch_sampler, "batch_size", None)
    return int(size) if size else None


def optimizer_values(optimizer: Any) -> dict[str, Given]:
    """lr and weight decay of a DummyOptim, for the config's optimizer; lr for a schedule."""
    if not hasattr(optimizer, "weight_decay"):  # a real optimizer, which has its own lr
        lr = float(optimizer.param_groups[0]["lr"])
        return {"scheduler.params.warmup_max_lr": Given(lr, is_checked=False)}
    values = {
        "optimizer.params.lr": optimizer.lr,
        "optimizer.params.weight_decay": optimizer.weight_decay,
        "scheduler.params.warmup_max_lr": optimizer.lr,
    }
    return {path: Given(value, is_checked=False) for path, value in values.items()}


def schedule_values(scheduler: Any) -> dict[str, Given]:
    """The steps of a DummyScheduler."""
    values = {"scheduler.params.warmup_min_lr": Given(0, is_checked=False)}
    if scheduler is None:
        return values
    if scheduler.total_num_steps is not None:
        values["scheduler.params.total_num_steps"] = Given(
            scheduler.total_num_steps, "DummyScheduler(total_num_steps)"
        )
    values["scheduler.params.warmup_num_steps"] = Given(
        max(1, scheduler.warmup_num_steps), "DummyScheduler(warmup_num_steps)", is_checked=False
    )
    return values
