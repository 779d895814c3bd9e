"""Applies a loaded checkpoint to the engine. Steps that can fail come first and can be undone.

groups, scheduler, loss scale, counters, loader       each registers how to undo it
elements                                              load.py
buffers of this rank, random generators               checked before: they cannot fail
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...ops.optim.shard_optimizer import kind_of
from ...utils.errors import UsageError, XdsError
from ...utils.views import write
from ..counters import Counters
from ..data.loaders import keeps_position, resume_loader
from ..parts import Parts
from .hyperparameters import check_groups
from .load_plan import LoadOptions, LoadPlan
from .packing import unpack
from .random_state import set_random_state
from .score import Score

log = logging.getLogger("xds")


@torch.no_grad()
def set_engine(
    parts: Parts, counters: Counters, plan: LoadPlan, options: LoadOptions, undo: ExitStack
) -> None:
    """Set all states except tensor elements and random generators; closing `undo` restores the former ones.

    Raises UsageError: an object of the user refuses its saved state.
    """
    saved, optimizer, scheduler = plan.state, parts.optimizer, parts.scheduler
    if optimizer is not None:  # a scheduler writes to the groups, too
        undo.callback(_restore_groups, optimizer, _groups(optimizer))
    if options.with_optimizer and saved["optimizer"] is not None:
        with _taking(plan, "optimizer"):
            _set_groups(optimizer, saved["optimizer"]["groups"])
    load = getattr(scheduler, "load_state_dict", None)
    if options.with_scheduler and saved["lr_scheduler"] is not None and load is not None:
        undo.callback(load, scheduler.state_dict())  # type: ignore[union-attr]
        with _taking(plan, "lr_scheduler"):
            load(saved["lr_scheduler"]["state"])
            check_groups(kind_of(optimizer), optimizer.param_groups)  # it may have written there
    undo.callback(parts.loss_scale.load_state_dict, parts.loss_scale.state_dict())
    parts.loss_scale.load_state_dict(saved["loss_scale"])
    _set_counters(counters, saved["counters"], plan.own.get("means"), options, undo)
    _set_best(counters, saved["counters"], plan.manifest.score, undo)
    if parts.loader is not None:
        undo.callback(_restore_fields, parts.loader, dict(vars(parts.loader)))
        with _taking(plan, "data"):
            _set_data(parts.loader, plan)


@torch.no_grad()
def take_state(parts: Parts, counters: Counters, packed: dict[str, Any]) -> None:
    """Go on where another group of ranks is, by its `save.engine_state`. No tensors change."""
    saved = {key: unpack(value, str) for key, value in packed.items()}
    if parts.optimizer is not None and saved["optimizer"] is not None:
        _set_groups(parts.optimizer, saved["optimizer"]["groups"])
    load = getattr(parts.scheduler, "load_state_dict", None)
    if saved["lr_scheduler"] is not None and load is not None:
        load(saved["lr_scheduler"]["state"])
    for name in ("global_steps", "skipped_steps", "global_samples", "micro_steps"):
        setattr(counters, name, saved["counters"][name])
    if saved["data"] is not None:
        resume_loader(parts.loader, saved["data"])


@contextmanager
def _taking(plan: LoadPlan, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, XdsError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{plan.folder}: the saved state of {what} is refused here; nothing was changed: {reason}"
        ) from error


@torch.no_grad()
def set_own(plan: LoadPlan, device: torch.device) -> None:
    """Restore this rank's own buffers, where they differed from rank 0's, and its random generators."""
    for name, buffer in plan.restore.buffers():
        if name in plan.buffers:
            write(buffer, plan.buffers[name].to(buffer))
    if "random" in plan.own:
        set_random_state(plan.own["random"], device)


# -- one after the other ------------------------------------------------------------------------------------


def _set_data(loader: Any, plan: LoadPlan) -> None:
    """Restore the data position: of a loader of xds at any number of ranks, of a user's at the same ranks."""
    if keeps_position(loader) and "data" in plan.own:
        loader.load_state_dict(plan.own["data"])
        return
    saved = plan.state["data"]
    was_kept = saved is not None or "data" in plan.manifest.files[0].own
    if was_kept and (saved is None or not resume_loader(loader, saved)):
        log.warning(
            "the checkpoint's data position does not fit training_data: it starts from the beginning%s",
            ""
            if plan.own_file is not None
            else " (a user's loader continues only at the same number of data ranks)",
        )


def _restore_fields(one: Any, fields: dict[str, Any]) -> None:
    vars(one).clear()
    vars(one).update(fields)


def _set_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            here = group.get(key)
            if isinstance(here, Tensor):  # other objects may reference a learning-rate tensor
                here.copy_(torch.as_tensor(value).view(here.shape))
            else:
                group[key] = value


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, tuple[Any, Tensor | None]]]:
    """Every hyperparameter, with a copy of its content if it is a tensor."""
    return [
        {
            key: (value, value.clone() if isinstance(value, Tensor) else None)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]


@torch.no_grad()
def _restore_groups(
    optimizer: torch.optim.Optimizer, saved: list[dict[str, tuple[Any, Tensor | None]]]
) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.clear()
        for key, (value, content) in values.items():
            group[key] = value
            if content is not None:
                value.copy_(content)


def _set_counters(
    counters: Counters,
    saved: dict[str, Any],
    means: dict[str, Any] | None,
    options: LoadOptions,
    undo: ExitStack,
) -> None:
    for name in ("global_steps", "skipped_steps", "global_samples", "micro_steps"):
        undo.callback(setattr, counters, name, getattr(counters, name))
        setattr(counters, name, saved[name])
    here = counters.accumulation.steps
    undo.callback(counters.accumulation.resume, counters.accumulation.done)
    undo.callback(counters.means.resume, counters.means.state())
    if saved["is_accumulating"] and options.with_optimizer:
        # older checkpoints do not say it: they were saved with one number of steps throughout
        counters.accumulation.resume(saved.get("accumulated", saved["micro_steps"] % here))
        counters.means.resume(means)
        if means is None:  # of an older version
            counters.means.begin_unseen()
        return
    counters.accumulation.resume(0)
    counters.means.end()
    if here != saved["accumulation_steps"]:
        counters.micro_steps = saved["global_steps"] * here
    counters.micro_steps -= counters.micro_steps % here  # a partial step's gradients are not loaded


def _set_best(
    counters: Counters, saved: dict[str, Any], score: Score | None, undo: ExitStack
) -> None:
    """Set the record of the best save to that after the save of this checkpoint."""
    for name, older in (("best_metric", None), ("saves_since_best", 0)):
        undo.callback(setattr, counters, name, getattr(counters, name))
        setattr(counters, name, saved.get(name, older))
    if score is not None:
        counters.count_save(score.metric, score.mode)


__all__ = ["set_engine", "set_own"]
