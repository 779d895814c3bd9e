"""Loads a checkpoint: every rank reads and checks the ranges it needs before anything is changed.

tag  ->  manifest  ->  plan by name and range  ->  verify every chunk  ->  fill  ->  publish, counters, RNG
         all ranks continue, or all raise with nothing changed        |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...utils.errors import DamagedError, UsageError
from ...zero.checkpoint.ranges import Copy
from ...zero.checkpoint.restore import Restore
from ...zero.checkpoint.snapshot import Snapshot
from ..steps.counters import Counters
from .agreement import together
from .finding import find_older, find_tag
from .format import catalogue_of
from .io.checked_file import READERS, CheckedFile
from .io.folders import MANIFEST, read_manifest
from .io.reader import open_file
from .load_checks import (
    Report,
    check_groups,
    check_names,
    check_restore,
    check_state,
    check_views,
    report,
)
from .load_effect import set_buffers, set_engine, set_random
from .load_plan import DOING, LoadOptions, Plan, some_of
from .manifest import Manifest, lacking
from .packing import unpack
from .random_state import check_random_state
from .saved_values import OwnValues
from .training import Training

log = logging.getLogger("xds")


def load_checkpoint(
    training: Training,
    counters: Counters,
    load_dir: str | Path,
    tag: str | None,
    options: LoadOptions,
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load_checkpoint`."""
    if training.optimizer is None:  # an engine for inference
        options = replace(options, load_optimizer_states=False)
    collectives = training.sharded.collectives
    chosen = find_tag(collectives, load_dir, tag, falls_back=options.fallback)
    load_dir = Path(load_dir)
    if chosen is None:
        hint = "" if options.fallback else "; fallback=True loads the newest checkpoint there"
        log.warning(
            "no checkpoint loaded: there is no file `latest` in %s, and no tag was given%s",
            *(load_dir, hint if any(path.is_dir() for path in load_dir.glob("*")) else ""),
        )
        return None, None
    refused: list[str] = []
    while True:
        try:
            with training.updater.in_memory():
                return _load(training, counters, load_dir, chosen, options)
        except DamagedError as error:
            if not options.fallback:
                raise
            refused.append(chosen)
            chosen = find_older(collectives, load_dir, refused, error)


def _load(
    training: Training,
    counters: Counters,
    load_dir: Path,
    tag: str,
    options: LoadOptions,
) -> tuple[str, dict[str, Any]]:
    collectives, folder = training.sharded.collectives, load_dir / tag
    manifest, digests = together(
        collectives,
        DOING,
        partial(read_manifest, load_dir, tag),
        share=lambda m: [m.tag, m.files[0].path],
    )
    if any(digest != digests[0] for digest in digests):
        raise UsageError(
            f"{DOING}: the ranks find different checkpoints under {folder}: load_dir must be one folder that "
            "all of them share"
        )
    plan, reports = together(
        collectives, DOING, partial(_begin, training, folder, manifest, options), share=report
    )
    with ExitStack() as stack, ExitStack() as undo:
        together(
            collectives,
            DOING,
            partial(_prepare, training, counters, plan, reports, options, stack),
        )
        if not options.load_module_only:
            together(
                collectives, DOING, partial(set_engine, training, counters, plan, options, undo)
            )
        plan.restore.begin()
        together(
            collectives, f"{DOING}, half-way (load again before continuing)", partial(_fill, plan)
        )
        undo.pop_all()  # nothing below can fail
        plan.restore.finish(plan.targets)
    set_buffers(plan)
    set_random(plan, training.device)
    if collectives.rank == 0:
        log.info("loaded checkpoint %s", folder)
    client_state: dict[str, Any] = plan.state["client_state"]
    return str(folder), client_state


# -- before anything changes --------------------------------------------------------------------------------


def _begin(training: Training, folder: Path, manifest: Manifest, options: LoadOptions) -> Plan:
    """What this rank holds, and where the checkpoint has it."""
    training.sharded.settle_reductions()
    snapshot = Snapshot(training.module, training.sharded, training.updater, training.optimizer)
    catalogue = catalogue_of(manifest, str(folder / MANIFEST))
    if names := lacking(manifest, catalogue, with_optimizer=options.with_optimizer):
        raise DamagedError(
            f"{folder / MANIFEST} contradicts itself: elements of {some_of(names)} are in no file"
        )
    restore = Restore(snapshot, catalogue)
    return Plan(folder, manifest, snapshot, catalogue, restore)


def _prepare(  # noqa: PLR0913
    training: Training,
    counters: Counters,
    plan: Plan,
    reports: Sequence[Report | None],
    options: LoadOptions,
    stack: ExitStack,
) -> None:
    folder, manifest, restore = plan.folder, plan.manifest, plan.restore
    check_names(plan, reports, options)
    pool = stack.enter_context(ThreadPoolExecutor(READERS))

    def opened(number: int) -> CheckedFile:
        if number not in plan.files:
            plan.files[number] = open_file(folder, manifest, number, pool)
            stack.callback(plan.files[number].close)
        return plan.files[number]

    plan.state = unpack(manifest.state, lambda name: opened(0).tensor(name))
    check_state(training, counters, plan, options, folder)
    if options.with_optimizer and plan.state["optimizer"] is not None:
        check_groups(plan.catalogue, plan.snapshot, folder)
    own = plan.own_file
    if own is not None:
        plan.own = _own(manifest.files[own].own, lambda name: opened(own).tensor(name), options)
        if "random" in plan.own:
            check_random_state(plan.own["random"], str(folder / manifest.files[own].path))
        plan.buffers = _own_buffers(plan, opened)
    plan.targets = restore.plan_values()
    if options.with_optimizer:
        plan.targets += restore.plan_states()
        plan.targets += restore.plan_owed(
            plan.state.get("owed_unit") or 1.0,
            plan.state.get("owed_steps") or 0,
            holds_momentum=bool(plan.state.get("owed_holds_momentum")),
        )
        if plan.state["counters"]["is_accumulating"]:
            plan.targets += restore.plan_grads()
            any_held = any(f.own.get("grads") for f in manifest.files)
            restore.plan_locals(plan.own.get("grads", {}), any_held=any_held)
    check_restore(restore, folder, options)
    _check_files(plan, opened)
    check_views(plan, plan.targets, folder)


def _check_files(plan: Plan, opened: Callable[[int], CheckedFile]) -> None:
    """Check every byte that this rank needs, and fill new tensors, file by file."""
    by_file: dict[int, list[tuple[Copy, Tensor | None]]] = {}
    for target in plan.targets:
        receiver = target.receiver if target.is_fresh else None
        for copy in target.copies:
            by_file.setdefault(copy.file, []).append((copy, receiver))
    rank = plan.snapshot.rank  # each rank starts with a different file
    for number in sorted(by_file, key=lambda number: (number < rank, number)):
        file = opened(number)
        file.read(by_file[number])
        file.close()
    for file in plan.files.values():
        file.close()


def _own(packed: Any, get: Any, options: LoadOptions) -> dict[str, Any]:
    """This rank's own values; tensors that the options exclude are not read. Imports have none."""
    wanted = [] if options.load_module_only else ["random", "data"]
    if options.with_optimizer:
        wanted.append("grads")
    return {key: unpack(packed[key], get) for key in wanted if key in packed}


def _own_buffers(plan: Plan, opened: Callable[[int], CheckedFile]) -> dict[str, Tensor]:
    """This data rank's buffers, where they differed from those of the first rank."""
    found = {}
    for name, _ in plan.restore.buffers():
        flat = plan.catalogue.find("buffer", name)
        number = None if flat is None else plan.file_of(flat)
        if number is not None:
            saved = OwnValues.of(plan.manifest.files[number].own).buffers.get(name)
            if saved is not None:
                found[name] = opened(number).tensor(saved.name)
    return found


# -- changing -----------------------------------------------------------------------------------------------


def _fill(plan: Plan) -> None:
    """Fill the live tensors, which `_check_files` left; their bytes are in the page cache now."""
    by_file: dict[int, list[tuple[Copy, Tensor | None]]] = {}
    for target in plan.targets:
        for copy in target.copies if not target.is_fresh else ():
            by_file.setdefault(copy.file, []).append((copy, target.receiver))
    for number, copies in by_file.items():
        plan.files[number].read(copies, sums=False)
        plan.files[number].close()
