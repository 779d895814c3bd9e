"""Loading: every rank reads the ranges it needs, checks all of them, and only then changes anything.

tag  ->  manifest  ->  plan by name and range  ->  verify every chunk  ->  fill  ->  publish, counters, RNG
         all ranks go on, or all raise, and nothing has changed       |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ...ops.errors import DamagedError, UsageError
from ...zero.ranges import Catalogue, Copy
from ...zero.restore import Restore, Target
from ...zero.snapshot import Snapshot
from ..data import keeps_position, resume_loader
from .agreement import together
from .checked_file import CheckedFile
from .folders import (
    MANIFEST,
    check_tag,
    newest_checkpoint,
    older_checkpoint,
    read_latest,
    read_manifest,
)
from .format import Manifest, catalogue_of, unpack
from .random_state import set_random_state
from .save import Counters

if TYPE_CHECKING:
    from ...ops.collectives import Collectives
    from ..parts import Parts

log = logging.getLogger("xds")
DOING = "load_checkpoint"
MAX_NAMES = 50  # of a sentence


@dataclass(frozen=True)
class LoadOptions:
    """What is to be loaded; the names are `Engine.load_checkpoint`'s."""

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
class _Plan:
    """One load on this rank, checked and ready."""

    manifest: Manifest
    restore: Restore
    files: dict[int, CheckedFile]
    targets: list[Target] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    is_same_world: bool = True


def load_checkpoint(
    parts: Parts,
    counters: Counters,
    load_dir: str | Path,
    tag: str | None,
    options: LoadOptions,
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load_checkpoint`."""
    load_dir = Path(load_dir)
    if parts.optimizer is None:  # this engine only infers
        options = replace(options, load_optimizer_states=False)
    chosen = _choose(parts.sharded.collectives, load_dir, tag, options)
    if chosen is None:
        log.warning(
            "no checkpoint loaded: there is no file `latest` in %s, and no tag was given", load_dir
        )
        return None, None
    refused: list[str] = []
    while True:
        try:
            return _load(parts, counters, load_dir, chosen, options)
        except DamagedError as error:
            if not options.fallback:
                raise
            refused.append(chosen)
            chosen = _fall_back(parts.sharded.collectives, load_dir, refused, error)


def _choose(
    collectives: Collectives, load_dir: Path, tag: str | None, options: LoadOptions
) -> str | None:
    """The tag to load: rank 0 looks. None where nobody names one."""

    def look() -> str | None:
        if collectives.rank or tag is not None:
            return tag if tag is None else str(tag)
        try:
            found = read_latest(load_dir)
        except DamagedError as error:
            found = newest_checkpoint(load_dir)
            if not options.fallback or found is None:
                raise
            log.warning("%s; falling back to %s", error, load_dir / found)
        return found

    return together(collectives, DOING, look, tell=lambda found: found)[1][0]  # type: ignore[no-any-return]


def _fall_back(
    collectives: Collectives, load_dir: Path, refused: list[str], error: DamagedError
) -> str:
    """The newest checkpoint older than the ones refused, the same on every rank.

    Raises DamagedError: there is none.
    """

    def look() -> str | None:
        return None if collectives.rank else older_checkpoint(load_dir, refused[-1], refused)

    older: str | None = together(collectives, DOING, look, tell=lambda found: found)[1][0]
    if older is None:
        raise DamagedError(
            f"{error}; there is no older checkpoint in {load_dir} to fall back to"
        ) from error
    if collectives.rank == 0:
        log.warning("%s; falling back to %s", error, load_dir / older)
    return older


def _load(
    parts: Parts, counters: Counters, load_dir: Path, tag: str, options: LoadOptions
) -> tuple[str, dict[str, Any]]:
    collectives = parts.sharded.collectives
    manifest, digests = together(
        collectives,
        DOING,
        partial(_read, load_dir, tag),
        tell=lambda m: [m.tag, m.files[0].path],
    )
    if any(digest != digests[0] for digest in digests):
        raise UsageError(
            f"{DOING}: the ranks find different checkpoints under {load_dir / tag}: load_dir must be one "
            "folder that all of them share"
        )
    folder = load_dir / tag
    with ExitStack() as stack:
        plan, _ = together(
            collectives, DOING, partial(_prepare, parts, counters, folder, manifest, options, stack)
        )
        plan.restore.begin()
        together(
            collectives, f"{DOING}, half-way (load again before going on)", partial(_fill, plan)
        )
        plan.restore.finish(plan.targets)
    _set_buffers(plan)
    if not options.load_module_only:
        _set_engine(parts, counters, plan, options)
    if collectives.rank == 0:
        log.info("loaded checkpoint %s", folder)
    client_state: dict[str, Any] = plan.state["client_state"]
    return str(folder), client_state


def _read(load_dir: Path, tag: str) -> Manifest:
    check_tag(tag)
    return read_manifest(load_dir, tag)


# -- before anything changes --------------------------------------------------------------------------------


def _prepare(  # noqa: PLR0913
    parts: Parts,
    counters: Counters,
    folder: Path,
    manifest: Manifest,
    options: LoadOptions,
    stack: ExitStack,
) -> _Plan:
    parts.sharded.settle_reductions()
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater, parts.optimizer)
    catalogue = catalogue_of(manifest, str(folder / MANIFEST))
    if uncovered := catalogue.uncovered():
        raise DamagedError(
            f"{folder / MANIFEST} contradicts itself: elements of {_shown(uncovered)} are in no file"
        )
    _check_names(catalogue, snapshot, folder, options)
    restore = Restore(snapshot, catalogue)
    plan = _Plan(manifest, restore, {}, is_same_world=manifest.world_size == snapshot.world_size)
    rank = snapshot.rank

    pool = stack.enter_context(ThreadPoolExecutor(1))

    def opened(number: int) -> CheckedFile:
        if number not in plan.files:
            plan.files[number] = CheckedFile(folder, manifest.files[number], pool)
            stack.callback(plan.files[number].close)
        return plan.files[number]

    plan.state = unpack(manifest.state, lambda name: opened(0).tensor(name))
    _check_state(parts, counters, plan, options, folder)
    if options.with_optimizer and plan.state["optimizer"] is not None:
        _check_groups(catalogue, snapshot, folder)
    if plan.is_same_world:
        plan.own = _own(manifest.files[rank].own, lambda name: opened(rank).tensor(name), options)
    plan.targets = restore.plan_values()
    if options.with_optimizer:
        plan.targets += restore.plan_states()
        if plan.state["counters"]["is_accumulating"]:
            plan.targets += restore.plan_grads()
            restore.plan_locals(plan.own["grads"])
    _check_restore(restore, folder, options)
    _check_files(plan, rank, opened)
    return plan


def _check_files(plan: _Plan, rank: int, opened: Callable[[int], CheckedFile]) -> None:
    """Every byte that this rank needs is checked, and what is fresh is filled, file by file."""
    by_file: dict[int, list[tuple[Copy, Tensor | None]]] = {}
    for target in plan.targets:
        receiver = target.receiver if target.is_fresh else None
        for copy in target.copies:
            by_file.setdefault(copy.file, []).append((copy, receiver))
    # each rank begins with another file
    for number in sorted(by_file, key=lambda number: (number < rank, number)):
        file = opened(number)
        file.check(by_file[number])
        file.close()
    for file in plan.files.values():
        file.close()


def _own(packed: Any, get: Any, options: LoadOptions) -> dict[str, Any]:
    """This rank's own values; tensors that the options leave out are not read. Imports have none."""
    wanted = ["buffers"]
    if not options.load_module_only:
        wanted += ["random", "data"]
    if options.with_optimizer:
        wanted.append("grads")
    return {key: unpack(packed[key], get) for key in wanted if key in packed}


def _shown(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more


def _check_names(
    catalogue: Catalogue, snapshot: Snapshot, folder: Path, options: LoadOptions
) -> None:
    found = catalogue.compare(snapshot.flats)
    sentences = []
    if found.missing:
        sentences.append(f"it does not have {_shown(found.missing)}")
    if found.extra:
        sentences.append(f"the model does not have {_shown(found.extra)}")
    if found.shapes:
        raise UsageError(
            f"{folder} does not fit this model: {_shown(found.shapes)}; nothing was changed"
        )
    if sentences and options.load_module_strict:
        raise UsageError(
            f"{folder} does not fit this model: {'; '.join(sentences)}; nothing was changed. Load what fits "
            "with load_module_strict=False"
        )
    if sentences and snapshot.rank == 0:
        log.warning(
            "%s is loaded in part: %s; the rest stays as it is", folder, "; ".join(sentences)
        )


def _check_state(
    parts: Parts, counters: Counters, plan: _Plan, options: LoadOptions, folder: Path
) -> None:
    saved = plan.state
    if options.with_optimizer:
        _check_optimizer(parts, saved["optimizer"], folder)
        _check_accumulation(counters, plan, folder)
    scheduler = saved["lr_scheduler"]
    if options.with_scheduler and scheduler is not None and parts.scheduler is not None:
        here = type(parts.scheduler).__name__
        if here != scheduler["type"]:
            raise UsageError(
                f"{folder} holds the state of the scheduler {scheduler['type']}, this engine has {here}: use "
                "the same one, or load with load_lr_scheduler_states=False"
            )


def _check_optimizer(parts: Parts, saved: dict[str, Any] | None, folder: Path) -> None:
    if saved is None:  # weights that were imported, or an engine that only inferred
        if parts.sharded.collectives.rank == 0:
            log.warning("%s has no optimizer states: they begin anew", folder)
        return
    here = type(parts.optimizer).__name__
    # Adam and AdamW keep the same states; ours is called Adam in both cases
    if here.removesuffix("W") != saved["type"].removesuffix("W"):
        raise UsageError(
            f"{folder} holds states of the optimizer {saved['type']}, and this engine has {here}: use the same "
            "one, or load with load_optimizer_states=False"
        )
    num_here, num_saved = len(parts.optimizer.param_groups), len(saved["groups"])
    if num_here != num_saved:
        raise UsageError(
            f"{folder} holds {num_saved} parameter groups, and this engine has {num_here}: make the same "
            "groups, or load with load_optimizer_states=False"
        )


def _check_groups(catalogue: Catalogue, snapshot: Snapshot, folder: Path) -> None:
    """Rates and decays are a group's, and a scheduler knows groups by their numbers."""
    for flat in snapshot.flats:
        for slot in flat.slots if flat.kind == "param" and flat.trains else ():
            there = catalogue.group_of(slot.name)
            if there is not None and there != slot.group:
                raise UsageError(
                    f"{folder} has {slot.name} in parameter group {there}, and this engine has it in group "
                    f"{slot.group}: make the same groups in the same order, or load with "
                    "load_optimizer_states=False"
                )


def _check_accumulation(counters: Counters, plan: _Plan, folder: Path) -> None:
    saved = plan.state["counters"]
    if not saved["is_accumulating"]:
        return
    here = counters.gradient_accumulation_steps()
    if plan.is_same_world and here == saved["accumulation_steps"]:
        return
    raise UsageError(
        f"{folder} was saved in the middle of an accumulation, by {plan.manifest.world_size} ranks with "
        f"gradient_accumulation_steps = {saved['accumulation_steps']}: half a step loads only with the same "
        "two numbers; load a checkpoint that was saved after a whole step, or use load_optimizer_states=False"
    )


def _check_restore(restore: Restore, folder: Path, options: LoadOptions) -> None:
    if restore.problems:
        raise UsageError(
            f"{folder} cannot be loaded in this layout: {_shown(restore.problems)}; nothing was changed. Use "
            "the layout it was saved with, or load_optimizer_states=False"
        )
    if restore.missing and options.load_module_strict:
        raise UsageError(
            f"{folder} does not have the optimizer states {_shown(restore.missing)}; nothing was changed. With "
            "load_module_strict=False they begin at zero, with load_optimizer_states=False all stay as they are"
        )
    if restore.missing:
        log.warning("%s does not have the optimizer states %s", folder, _shown(restore.missing))


# -- changing -----------------------------------------------------------------------------------------------


def _fill(plan: _Plan) -> None:
    """Only what is alive is left; its bytes are in the page cache now."""
    by_file: dict[int, list[tuple[Copy, Tensor]]] = {}
    for target in plan.targets:
        for copy in target.copies if not target.is_fresh else ():
            by_file.setdefault(copy.file, []).append((copy, target.receiver))
    for number, copies in by_file.items():
        with plan.files[number].opened():
            for copy, receiver in copies:
                plan.files[number].fill(receiver, copy)


@torch.no_grad()
def _set_buffers(plan: _Plan) -> None:
    """Where this rank's buffers were not rank 0's, and it is the same rank, it gets its own."""
    own: dict[str, Tensor] = plan.own.get("buffers", {})
    for name, buffer in plan.restore.buffers():
        if name in own:
            buffer.copy_(own[name])


def _set_engine(parts: Parts, counters: Counters, plan: _Plan, options: LoadOptions) -> None:
    saved = plan.state
    if options.with_optimizer and saved["optimizer"] is not None:
        _set_groups(parts.optimizer, saved["optimizer"]["groups"])
    if options.with_scheduler and saved["lr_scheduler"] is not None:
        load = getattr(parts.scheduler, "load_state_dict", None)
        if load is not None:
            load(saved["lr_scheduler"]["state"])
    parts.loss_scale.load_state_dict(saved["loss_scale"])
    _set_counters(counters, saved["counters"], options)
    _set_data(parts.loader, plan)
    if "random" in plan.own:
        set_random_state(plan.own["random"], parts.device)


def _set_data(loader: Any, plan: _Plan) -> None:
    """The loader goes on: ours at any number of ranks, the user's where there was such a rank."""
    if loader is None:
        return
    if keeps_position(loader) and "data" in plan.own:
        loader.load_state_dict(plan.own["data"])
        return
    saved = plan.state["data"]
    was_kept = saved is not None or "data" in plan.manifest.files[0].own
    if was_kept and (saved is None or not resume_loader(loader, saved)):
        log.warning(
            "the checkpoint's data position does not fit training_data: it starts anew%s",
            "" if plan.is_same_world else " (a loader of one's own goes on at the same ranks only)",
        )


def _set_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # a learning rate that others hold stays that tensor
            else:
                group[key] = value


def _set_counters(counters: Counters, saved: dict[str, Any], options: LoadOptions) -> None:
    counters.global_steps = saved["global_steps"]
    counters.skipped_steps = saved["skipped_steps"]
    counters.global_samples = saved["global_samples"]
    here = counters.gradient_accumulation_steps()
    counters.micro_steps = saved["micro_steps"]
    if saved["is_accumulating"] and options.with_optimizer:
        return
    if here != saved["accumulation_steps"]:
        counters.micro_steps = saved["global_steps"] * here
    counters.micro_steps -= counters.micro_steps % here  # half a step's gradients are not there
