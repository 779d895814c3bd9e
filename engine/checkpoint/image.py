"""What one rank holds of the states, in a folder of its own, for a process with the same place in the mesh.

    rank 1 of unit 0  ──> folder in shared memory: manifest.json, rank_00000-...safetensors ──> rank 1 of unit 1

It is a checkpoint of one rank, with ranges by name and checksums; of sharded states it has this rank's shards
alone. So no other rank takes part.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...zero.checkpoint.restore import Restore
from ...zero.checkpoint.snapshot import Snapshot
from ..counters import Counters
from ..parts import Parts
from .format import catalogue_of, dump
from .io.checked_file import CheckedFiles
from .io.folders import MANIFEST, read_manifest
from .io.tensor_file import write_tensors
from .load import prepare, read_files
from .load_effect import set_engine, set_own
from .load_plan import LoadOptions, LoadPlan
from .manifest import new_manifest
from .save import SaveOptions, add_own, buffer_sums, collect

FILE = "rank_00000-00000000.safetensors"


def write_image(parts: Parts, counters: Counters, client_state: Any, folder: Path) -> None:
    """Write what this rank holds, between two steps. Not collective. folder: an empty one."""
    content = collect(parts, counters, client_state, SaveOptions(), is_alone=True)
    snapshot = content.snapshot
    add_own(content, parts, counters, [buffer_sums(snapshot)])
    sums = write_tensors(folder / FILE, content.entries)
    record = replace(
        content.part().file,
        path=FILE,
        size_bytes=sums.size_bytes,
        chunk_bytes=sums.chunk_bytes,
        crc32=sums.crc32,
    )
    manifest = new_manifest(
        tag=folder.name,
        stage=parts.config.zero_optimization.stage,
        mesh=snapshot.mesh,
        flats=tuple(snapshot.flats),
        files=(record,),
        holders=((0,),),
        state=content.state,
    )
    (folder / MANIFEST).write_bytes(dump(manifest))


def read_image(parts: Parts, counters: Counters, folder: Path, *, also_random: bool) -> Any:
    """Take the states of an image; the client_state in it. For all ranks of a shard group at once.

    also_random: its random generators as well.
    Raises UsageError: it is damaged, or of another model.
    """
    manifest, options = read_manifest(folder.parent, folder.name), LoadOptions()
    with ExitStack() as undo, CheckedFiles(folder, manifest) as files:
        snapshot = Snapshot(parts.module, parts.sharded, parts.updater, is_alone=True)
        catalogue = catalogue_of(manifest, str(folder / MANIFEST))
        restore = Restore(snapshot, catalogue)
        plan = LoadPlan(folder, manifest, snapshot, catalogue, restore, files)
        prepare(parts, counters, plan, [], options)
        set_engine(parts, counters, plan, options, undo)
        restore.begin()
        read_files(plan, is_fresh=False)
        undo.pop_all()  # nothing below can fail
        restore.finish(plan.targets)
    if not also_random:
        plan.own.pop("random", None)
    set_own(plan, parts.device)
    return plan.state["client_state"]


__all__ = ["read_image", "write_image"]
