"""Loads a checkpoint: every rank reads and checks the ranges it needs before anything is changed.

tag  ->  manifest  ->  plan by name and range  ->  verify every chunk  ->  fill  ->  publish, counters, RNG
         all ranks continue, or all raise with nothing changed        |
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...utils.errors import DamagedError, UsageError
from ...utils.quoting import printable
from ...zero.checkpoint.ranges import Copy
from ...zero.checkpoint.restore import Restore
from ...zero.checkpoint.snapshot import Snapshot
from ..counters import Counters
from ..parts import Parts
from .agreement import together
from .format import catalogue_of
from .io.checked_file import CheckedFiles
from .io.folders import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    check_folder,
    check_tag,
    holds_checkpoints,
    meant_tag,
    newest_checkpoint,
    older_checkpoint,
    read_latest,
    read_manifest,
)
from .io.storage import storage_of
from .load_effect import set_engine, set_own
from .load_plan import (
    DOING,
    LoadOptions,
    LoadPlan,
    StageReport,
    check_groups,
    check_names,
    check_restore,
    check_state,
    check_views,
    report,
)
from .manifest import Manifest, lacking, some_of
from .packing import unpack
from .random_state import check_random_state
from .saved_values import OwnValues

log = logging.getLogger("xds")
MAX_NEWER = 20  # checkpoints that other processes replace while this one loads


def load_checkpoint(
    parts: Parts,
    counters: Counters,
    load_dir: str | Path,
    tag: str | None,
    options: LoadOptions,
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load_checkpoint`."""
    if parts.optimizer is None:  # an engine for inference
        options = replace(options, load_optimizer_states=False)
    collectives = parts.sharded.collectives
    chosen = find_tag(collectives, load_dir, tag, falls_back=options.fallback)
    load_dir = Path(load_dir)
    if chosen is None:
        hint = "" if options.fallback else "; fallback=True loads the newest checkpoint there"
        log.warning(
            "no checkpoint loaded: there is no file `latest` in %s, and no tag was given%s",
            *(load_dir, hint if storage_of(load_dir).names(load_dir) else ""),
        )
        return None, None
    refused: list[str] = []
    while True:
        before = _stamp(load_dir, chosen) if collectives.rank == 0 else 0
        try:
            with parts.updater.in_memory():
                return _load(parts, counters, load_dir, chosen, options)
        except UsageError as error:
            refused.append(chosen)
            newer = _find_newer(collectives, load_dir, tag, refused, before)
            if newer is None and not (options.fallback and isinstance(error, DamagedError)):
                raise
            chosen = newer or _find_older(collectives, load_dir, tag, refused, error)


def _load(
    parts: Parts,
    counters: Counters,
    load_dir: Path,
    tag: str,
    options: LoadOptions,
) -> tuple[str, dict[str, Any]]:
    collectives, folder = parts.sharded.collectives, load_dir / tag
    step = partial(together, collectives, DOING)  # on all ranks, or all raise
    manifest, checkpoints = step(
        lambda: read_manifest(load_dir, tag), share=lambda m: [m.tag, m.files[0].path]
    )
    if any(checkpoint != checkpoints[0] for checkpoint in checkpoints):
        raise UsageError(
            f"{DOING}: the ranks find different checkpoints under {folder}: load_dir must be one folder that "
            "all of them share"
        )
    with ExitStack() as undo, CheckedFiles(folder, manifest) as files:
        plan, reports = step(lambda: _begin(parts, folder, manifest, files, options), report)
        step(lambda: prepare(parts, counters, plan, reports, options))
        if not options.load_module_only:
            step(lambda: set_engine(parts, counters, plan, options, undo))
        plan.restore.begin()
        half_way = f"{DOING}, half-way (load again before continuing)"
        together(collectives, half_way, lambda: read_files(plan, is_fresh=False))
        undo.pop_all()  # nothing below can fail
        plan.restore.finish(plan.targets)
    parts.outer.restored(plan.state.get("outer") if options.with_optimizer else None)
    set_own(plan, parts.device)
    if collectives.rank == 0:
        log.info("loaded checkpoint %s", folder)
    client_state: dict[str, Any] = plan.state["client_state"]
    return str(folder), client_state


def has_checkpoint(collectives: Collectives, folder: str | Path) -> bool:
    """Whether rank 0 finds `latest` or a checkpoint in the folder; damaged ones count. A collective."""

    def look() -> bool:
        path = check_folder("folder", folder)
        return collectives.rank == 0 and holds_checkpoints(path)

    has_one: bool = together(collectives, "resume", look, share=bool)[1][0]
    if not has_one and collectives.rank == 0:
        log.info("no checkpoint in %s: starting from the beginning", printable(folder))
    return has_one


# -- which one ----------------------------------------------------------------------------------------------


def find_tag(
    collectives: Collectives, load_dir: str | Path, tag: str | None, *, falls_back: bool
) -> str | None:
    """`tag`; else the tag in `latest`; None where no tag is given and there is no `latest`. A collective.

    falls_back: take the newest checkpoint where `latest` is missing or wrong.
    """

    def look() -> str | None:
        folder = check_folder("load_dir", load_dir)
        if tag is not None:
            name = check_tag(tag)
            return name if collectives.rank else meant_tag(folder, name)
        if collectives.rank:
            return None
        reason = f"there is no file `latest` in {folder}"
        damage: DamagedError | None = None
        try:
            found = read_latest(folder)
        except DamagedError as error:
            found, damage, reason = None, error, str(error)
        if found is None and falls_back:
            found = newest_checkpoint(folder)
            if found is not None:
                shown = found if damage is None else folder / found
                log.warning("%s; falling back to %s", reason, shown)
        if found is None and damage is not None:
            raise damage
        return found

    return _of_rank_0(collectives, look)


def _stamp(load_dir: Path, tag: str) -> int:
    """Another number for another save under the tag. 0: the manifest cannot be read."""
    path = load_dir / tag / MANIFEST
    with suppress(OSError):
        return zlib.crc32(storage_of(path).read(path, MOST_MANIFEST_BYTES))
    return 0


def _find_newer(
    collectives: Collectives, load_dir: Path, tag: str | None, refused: Sequence[str], before: int
) -> str | None:
    """The tag to try again, where another process has saved meanwhile and removed what was read. A collective.

    before: `_stamp` of the last one of `refused`, when its load began. Returns None: nothing has changed.
    """

    def look() -> str | None:
        if collectives.rank or len(refused) > MAX_NEWER:
            return None
        with suppress(DamagedError):
            now = read_latest(load_dir) if tag is None else meant_tag(load_dir, tag)
            if now is not None and now not in refused:
                return now
            if now == refused[-1] and _stamp(load_dir, now) not in (0, before):
                return now
        return None

    newer = _of_rank_0(collectives, look)
    if newer is not None and collectives.rank == 0:
        log.warning("another process has saved %s meanwhile: loading it", load_dir / newer)
    return newer


def _find_older(
    collectives: Collectives,
    load_dir: Path,
    tag: str | None,
    refused: Sequence[str],
    error: UsageError,
) -> str:
    """The tag of the newest checkpoint before the last one of `refused`, which is damaged. A collective.

    For the tag "best" it is the next best one.
    Raises DamagedError: there is none.
    """

    def look() -> str | None:
        if collectives.rank:
            return None
        next_best = tag if tag is None else meant_tag(load_dir, tag, refused)
        if next_best != tag:
            return next_best
        return older_checkpoint(load_dir, refused[-1], refused)

    older = _of_rank_0(collectives, look)
    if older is None:
        raise DamagedError(
            f"{error}; there is no older checkpoint in {load_dir} to fall back to"
        ) from error
    if collectives.rank == 0:
        log.warning("%s; falling back to %s", error, load_dir / older)
    return older


def _of_rank_0(collectives: Collectives, look: Any) -> str | None:
    tag: str | None = together(collectives, DOING, look, share=lambda value: value)[1][0]
    return tag


# -- before anything changes --------------------------------------------------------------------------------


def _begin(
    parts: Parts,
    folder: Path,
    manifest: Manifest,
    files: CheckedFiles,
    options: LoadOptions,
) -> LoadPlan:
    """What this rank holds, and where the checkpoint has it."""
    parts.sharded.reduction.settle()
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater)
    catalogue = catalogue_of(manifest, str(folder / MANIFEST))
    if names := lacking(manifest, catalogue, with_optimizer=options.with_optimizer):
        raise DamagedError(
            f"{folder / MANIFEST} contradicts itself: elements of {some_of(names)} are in no file"
        )
    return LoadPlan(folder, manifest, snapshot, catalogue, Restore(snapshot, catalogue), files)


def prepare(
    parts: Parts,
    counters: Counters,
    plan: LoadPlan,
    reports: Sequence[StageReport | None],
    options: LoadOptions,
) -> None:
    """Refuse what does not fit, plan all copies, and check every byte that they read."""
    check_names(plan, reports, options)
    plan.state = unpack(plan.manifest.state, lambda name: plan.files[0].tensor(name))
    check_state(parts, counters, plan, options)
    if options.with_optimizer and plan.state["optimizer"] is not None:
        check_groups(plan.catalogue, plan.snapshot, plan.folder)
    _read_own(plan, options)
    _plan_targets(parts, plan, options)
    check_restore(plan.restore, plan.folder, options)
    read_files(plan, is_fresh=True)
    check_views(plan)


def _read_own(plan: LoadPlan, options: LoadOptions) -> None:
    """This rank's own values; tensors that the options exclude are not read. Imports have none."""
    number = plan.own_file
    if number is None:
        return
    record = plan.manifest.files[number]
    wanted = [] if options.load_module_only else ["random", "data"]
    wanted += ["grads", "means"] if options.with_optimizer else []
    plan.own = {
        key: unpack(record.own[key], lambda name: plan.files[number].tensor(name))
        for key in wanted
        if key in record.own
    }
    if "random" in plan.own:
        check_random_state(plan.own["random"], str(plan.folder / record.path))
    plan.buffers = _own_buffers(plan)


def _own_buffers(plan: LoadPlan) -> dict[str, Tensor]:
    """This data rank's buffers, where they differed from those of the first rank."""
    buffers = {}
    for name, _ in plan.restore.buffers():
        flat = plan.catalogue.find("buffer", name)
        number = None if flat is None else plan.file_of(flat)
        if number is not None:
            saved = OwnValues.of(plan.manifest.files[number].own).buffers.get(name)
            if saved is not None:
                buffers[name] = plan.files[number].tensor(saved.name)
    return buffers


def _plan_targets(parts: Parts, plan: LoadPlan, options: LoadOptions) -> None:
    restore, state = plan.restore, plan.state
    plan.targets = restore.plan_values()
    if not options.with_optimizer:
        return
    plan.targets += restore.plan_states()
    plan.targets += parts.outer.targets(restore)
    plan.targets += restore.plan_pending_errors(
        state.get("owed_unit") or 1.0,
        state.get("owed_steps") or 0,
        holds_momentum=bool(state.get("owed_holds_momentum")),
    )
    if state["counters"]["is_accumulating"]:
        plan.targets += restore.plan_grads()
        any_held = any(record.own.get("grads") for record in plan.manifest.files)
        restore.plan_locals(plan.own.get("grads", {}), any_held=any_held)


def read_files(plan: LoadPlan, *, is_fresh: bool) -> None:
    """Check every byte that this rank needs, and fill new tensors, file by file.

    is_fresh: False: fill the live tensors; their bytes were checked and are in the page cache now.
    """
    by_file: dict[int, list[tuple[Copy, Tensor | None]]] = {}
    for target in plan.targets:
        for copy in target.copies if is_fresh or not target.is_fresh else ():
            receiver = target.receiver if target.is_fresh == is_fresh else None
            by_file.setdefault(copy.file, []).append((copy, receiver))
    rank = plan.snapshot.rank  # each rank starts with a different file
    order = sorted(by_file, key=lambda number: (number < rank, number))
    for number in order if is_fresh else ():
        _ = plan.files[number]  # open from now on: another process may remove the checkpoint
    for number in order:
        plan.files[number].read(by_file[number], sums=is_fresh)
        plan.files[number].free_buffers()
