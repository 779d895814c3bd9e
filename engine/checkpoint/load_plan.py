"""What a load reads on this rank, and whether a valid checkpoint fits this model and engine.

All checks run before anything is changed. They raise UsageError: the sentence names what does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, final

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ...ops.optim.shard_optimizer import kind_of
from ...ops.weights.tensor_table import shown
from ...utils.errors import DamagedError, UsageError
from ...utils.views import holds
from ...zero.checkpoint.ranges import Catalogue, Differences, SavedFlat
from ...zero.checkpoint.restore import Restore
from ...zero.checkpoint.snapshot import Snapshot
from ...zero.checkpoint.targets import Target
from ..counters import Counters
from ..parts import Parts
from .hyperparameters import RATES, check_state_values
from .io.checked_file import CheckedFiles
from .io.folders import MANIFEST
from .manifest import Manifest, some_of

log = logging.getLogger("xds")
DOING = "load_checkpoint"


@dataclass(frozen=True)
class LoadOptions:
    """What to load; the names are those of `Engine.load_checkpoint`."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    fallback: bool = False

    @property
    def with_optimizer(self) -> bool:
        return self.load_optimizer_states and not self.load_module_only

    @property
    def with_scheduler(self) -> bool:
        return self.load_lr_scheduler_states and not self.load_module_only


@final
@dataclass(eq=False)
class LoadPlan:
    """A load on this rank.

    own, buffers: what belongs to this rank alone, and buffers that differ from those of the first rank.
    """

    folder: Path
    manifest: Manifest
    snapshot: Snapshot
    catalogue: Catalogue
    restore: Restore
    files: CheckedFiles
    targets: list[Target] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_same_mesh(self) -> bool:
        """It was saved by as many stages of as many ranks."""
        return self.manifest.grid == self.snapshot.mesh

    @property
    def own_file(self) -> int | None:
        """The file with what belongs to this rank alone: its own; or that of its data rank on the first stage.

        None: there was another number of data ranks.
        """
        saved, here = self.manifest.grid, self.snapshot
        if self.is_same_mesh:
            return here.rank
        return saved.rank_at(data=here.place.data) if saved.data == here.mesh.data else None

    def file_of(self, flat: SavedFlat) -> int | None:
        """The file with this data rank's own values of a flat; None: no rank of this number held it."""
        holders = self.manifest.holders_of(flat)
        if self.is_same_mesh and self.snapshot.rank in holders:
            return self.snapshot.rank
        saved, data = self.manifest.grid, self.snapshot.place.data
        return next((rank for rank in holders if saved.coordinates(rank).data == data), None)


# -- names ---------------------------------------------------------------------------------------------------


class StageReport(TypedDict):
    """What one pipeline stage does not find in a checkpoint, and a mark for each slot that it does find."""

    met: str
    missing: list[str]
    shapes: list[str]


def report(plan: LoadPlan) -> StageReport | None:
    """The report of this rank's stage; None if another rank reports the same, or all."""
    pipe, *others = plan.snapshot.place
    if plan.snapshot.mesh.pipe == 1 or any(others):
        return None
    flats = plan.snapshot.flats
    differences = plan.catalogue.compare(flats)
    return StageReport(
        met=plan.catalogue.met(flats),
        missing=list(differences.missing),
        shapes=list(differences.shapes),
    )


def check_names(
    plan: LoadPlan, reports: Sequence[StageReport | None], options: LoadOptions
) -> None:
    """Check that all stages together have the names and shapes of the checkpoint."""
    folder, stages = plan.folder, [stage for stage in reports if stage is not None]
    met = "".join(
        "1" if "1" in marks else "0"
        for marks in zip(*(stage["met"] for stage in stages), strict=True)
    )
    differences = plan.catalogue.compare(plan.snapshot.flats, met)
    differences = Differences(
        missing=tuple(sorted({*differences.missing, *(n for s in stages for n in s["missing"])})),
        extra=differences.extra,
        shapes=tuple(
            dict.fromkeys((*(t for s in stages for t in s["shapes"]), *differences.shapes))
        ),
    )
    sentences = []
    if differences.missing:
        sentences.append(f"it does not have {some_of(differences.missing)}")
    if differences.extra:
        sentences.append(f"the model does not have {some_of(differences.extra)}")
    if differences.shapes:
        raise UsageError(
            f"{folder} does not fit this model: {some_of(differences.shapes)}; nothing was changed"
        )
    if sentences and options.load_module_strict:
        raise UsageError(
            f"{folder} does not fit this model: {'; '.join(sentences)}; nothing was changed. Load what fits "
            "with load_module_strict=False"
        )
    if sentences and plan.snapshot.rank == 0:
        log.warning("%s is loaded in part: %s; all else is unchanged", folder, "; ".join(sentences))


def check_state(parts: Parts, counters: Counters, plan: LoadPlan, options: LoadOptions) -> None:
    """Check that the optimizer, the scheduler and the accumulation are like the saved ones."""
    saved, folder = plan.state, plan.folder
    try:
        check_state_values(
            saved, with_optimizer=options.with_optimizer, with_scheduler=options.with_scheduler
        )
    except ValueError as error:
        raise DamagedError(
            f"{folder / MANIFEST} contradicts itself: {error}; load the rest with load_optimizer_states=False "
            "and load_lr_scheduler_states=False"
        ) from None
    if options.with_optimizer:
        _check_optimizer(parts, saved["optimizer"], folder)
        _check_accumulation(counters, plan, folder)
    scheduler = saved["lr_scheduler"]
    if options.with_scheduler and scheduler is not None and parts.scheduler is not None:
        here = type(parts.scheduler).__name__
        if here != scheduler["type"]:
            raise UsageError(
                f"{folder} holds the state of the scheduler {scheduler['type']}, this engine has "
                f"{here}: use the same one, or load with load_lr_scheduler_states=False"
            )
        _check_scheduler(parts.scheduler, scheduler["state"], folder)


def _check_optimizer(parts: Parts, saved: dict[str, Any] | None, folder: Path) -> None:
    if saved is None:  # imported weights, or saved by an engine for inference
        if parts.sharded.collectives.rank == 0:
            log.warning("%s has no optimizer states: they start from zero", folder)
        return
    here = kind_of(parts.optimizer)
    # Adam and AdamW have the same states; the class of xds is called Adam in both cases
    if here.removesuffix("W") != saved["type"].removesuffix("W"):
        raise UsageError(
            f"{folder} holds states of the optimizer {saved['type']}, and this engine has {here}: use "
            "the same one, or load with load_optimizer_states=False"
        )
    num_here, num_saved = len(parts.optimizer.param_groups), len(saved["groups"])
    if num_here != num_saved:
        raise UsageError(
            f"{folder} holds {num_saved} parameter groups, and this engine has {num_here}: make the same "
            "groups, or load with load_optimizer_states=False"
        )
    for number, (group, values) in enumerate(
        zip(parts.optimizer.param_groups, saved["groups"], strict=True)
    ):
        for key, value in values.items():
            if not _are_alike(group.get(key), value):
                raise UsageError(
                    f"{folder} has {shown(key)} = {shown(value)} in parameter group {number}, and this engine "
                    f"has {shown(group[key])}: use the same optimizer, or load with "
                    "load_optimizer_states=False"
                )


def _check_scheduler(scheduler: Any, saved: Any, folder: Path) -> None:
    """Check the state of a schedule of torch, which sets its attributes to whatever the state says."""
    if not isinstance(scheduler, LRScheduler) or not isinstance(saved, dict):
        return
    state, is_torchs = scheduler.state_dict(), type(scheduler).__module__ == LRScheduler.__module__
    for key, value in saved.items():
        here = state.get(key)
        is_number = (is_torchs and _is_number(here)) or key in RATES
        is_method = key not in state and callable(getattr(scheduler, str(key), None))
        if is_method or key == "optimizer" or (is_number and not _are_alike(here, value)):
            raise UsageError(
                f"{folder} has {shown(key)} = {shown(value)} in the state of lr_scheduler, and this engine has "
                f"{shown(here)}: use the same one, or load with load_lr_scheduler_states=False"
            )


def _are_alike(here: Any, there: Any) -> bool:
    """Whether both are numbers, texts, or sequences of equal length of these. None here matches anything."""
    if here is None:
        return True
    if there is None:  # switches that torch sets itself, such as foreach
        return isinstance(here, bool)
    if isinstance(here, list | tuple) and isinstance(there, list | tuple):
        return len(here) == len(there) and all(map(_are_alike, here, there))
    if _is_number(here) or _is_number(there):
        return _is_number(here) and _is_number(there)
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        return here.numel() == there.numel()
    return type(here) is type(there)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, bool | int | float)


def check_views(plan: LoadPlan) -> None:
    """Check that elements that share memory have one value in the checkpoint. Call it after reading."""
    wrong = [target.name for target in plan.targets if not target.fits()]
    saved_buffers = plan.buffers
    for name, buffer in plan.restore.buffers():
        if name in saved_buffers and not holds(buffer, saved_buffers[name].to(buffer)):
            wrong.append(name)
    if wrong:
        raise UsageError(
            f"{plan.folder} does not fit this model: {some_of(wrong)} are views whose elements share memory "
            "(expanded), and the checkpoint has different values for them; nothing was changed. Give the "
            "module separate tensors: tensor.clone()"
        )


def check_groups(catalogue: Catalogue, snapshot: Snapshot, folder: Path) -> None:
    """Check that parameters are in the same groups: lr and weight decay belong to a group's number."""
    for flat in snapshot.flats:
        for slot in flat.slots if flat.kind == "param" and flat.trains else ():
            there = catalogue.group_of(slot.name)
            if there is not None and there != slot.group:
                raise UsageError(
                    f"{folder} has {slot.name} in parameter group {there}, and this engine has it in group "
                    f"{slot.group}: make the same groups in the same order, or load with "
                    "load_optimizer_states=False"
                )


def _check_accumulation(counters: Counters, plan: LoadPlan, folder: Path) -> None:
    saved = plan.state["counters"]
    if not saved["is_accumulating"]:
        return
    here = counters.accumulation.steps
    if plan.is_same_mesh and here == saved["accumulation_steps"]:
        return
    mesh = plan.manifest.grid
    stages = f" in {mesh.pipe} pipeline stages" if mesh.pipe > 1 else ""
    stages += f" with tp_size = {mesh.tensor}" if mesh.tensor > 1 else ""
    stages += f", {mesh.experts} of which share the experts of a layer," if mesh.experts > 1 else ""
    raise UsageError(
        f"{folder} was saved in the middle of an accumulation, by {mesh.size} ranks{stages} with "
        f"gradient_accumulation_steps = {saved['accumulation_steps']}: a partial step loads only with the same "
        "numbers; load a checkpoint that was saved after a whole step, or use load_optimizer_states=False"
    )


def check_restore(restore: Restore, folder: Path, options: LoadOptions) -> None:
    if restore.problems:
        raise UsageError(
            f"{folder} cannot be loaded in this layout: {some_of(restore.problems)}; nothing was changed. Use "
            "the layout it was saved with, or load_optimizer_states=False"
        )
    if restore.missing and options.load_module_strict:
        raise UsageError(
            f"{folder} does not have the optimizer states {some_of(restore.missing)}; nothing was changed. "
            "With load_module_strict=False they begin at zero, with load_optimizer_states=False all stay "
            "as they are"
        )
    if restore.missing:
        log.warning("%s does not have the optimizer states %s", folder, some_of(restore.missing))
