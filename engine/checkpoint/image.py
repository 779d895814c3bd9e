"""What one rank holds of the states, in a folder of its own, for a process with the same place in the mesh.

    rank 1 of unit 0  ──> folder in shared memory: manifest.json, rank_00000-...safetensors ──> rank 1 of unit 1

It is a checkpoint of one rank, with ranges by name and checksums; of sharded states it has this rank's shards
alone. So no other rank takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from ...ops.comm.collectives import Collectives
from ...utils.errors import DamagedError
from ...utils.shared_file import SharedFile
from ...zero.checkpoint.restore import Restore
from ...zero.checkpoint.snapshot import Snapshot
from ..counters import Counters
from ..parts import Parts
from .format import catalogue_of, dump
from .io.checked_file import CheckedFile, CheckedFiles
from .io.folders import MANIFEST, read_manifest
from .io.tensor_file import (
    TensorEntry,
    image_bytes,
    matches,
    memory_chunk_bytes,
    rewrite_tensors,
    word_sum,
)
from .load import prepare, read_files
from .load_effect import set_engine, set_own
from .load_plan import LoadOptions, LoadPlan
from .manifest import FileRecord, Manifest, new_manifest
from .save import Content, SaveOptions, add_own, buffer_sums, collect

_SHARED = "shared_values"  # in the state of a manifest
FILE = "rank_00000-00000000.safetensors"
_MESSAGE_BYTES, _SENT = 16 << 20, "recovery"


@final
@dataclass(frozen=True)
class SharedRecord:
    """The file of the values that no step changes. sums: the `word_sum` of every `chunk_bytes` of it."""

    path: str
    size_bytes: int
    chunk_bytes: int
    sums: tuple[int, ...]


@final
class Image:
    """What this rank holds between two steps. Masters and states are referenced, and all else is copied.

    frozen: the values that no step changes, if they are in a file of their own.
    """

    @torch.no_grad()
    def __init__(
        self,
        parts: Parts,
        counters: Counters,
        client_state: Any,
        random: Mapping[str, Any] | None = None,
        *,
        splits: bool = False,
    ) -> None:
        """Not collective.

        random: states of generators instead of those that they have now. splits: `frozen` is a file of its own.
        """
        self.step = counters.global_steps
        self._stage = parts.config.zero_optimization.stage
        content = collect(parts, counters, client_state, SaveOptions(), is_alone=True)
        add_own(content, parts, counters, [buffer_sums(content.snapshot)], random)
        self.frozen = _take_frozen(content) if splits else []
        # buffers of modules change in a forward, and values of the engine in a step
        changing = {
            f"value/{number}/0"
            for number, flat in enumerate(content.snapshot.flats)
            if flat.kind == "buffer"
        }
        self._entries = [
            replace(entry, tensor=entry.tensor.detach().clone())
            if entry.name in changing or entry.name.startswith(("engine/", "own/"))
            else entry
            for entry in content.entries
        ]
        self._content = content

    @property
    def size_bytes(self) -> int:
        """Of the file of tensors."""
        return image_bytes(self._entries)

    @property
    def frozen_bytes(self) -> int:
        """Of the file of `frozen`."""
        return image_bytes(self.frozen) if self.frozen else 0

    def write(
        self, folder: Path, file: SharedFile | None = None, shared: SharedRecord | None = None
    ) -> None:
        """Write it to the folder, in place of another one. In any thread, before masters or states change.

        file: the one of tensors there, if it is mapped already. shared: that of `frozen`, which is there.

        The manifest comes last. Without it the folder has no image.
        Raises OSError: it does not fit.
        """
        snapshot, manifest_path = self._content.snapshot, folder / MANIFEST
        with suppress(FileNotFoundError):
            manifest_path.unlink()
        written = rewrite_tensors(file or SharedFile(folder / FILE), self._entries)
        size_bytes, chunk_bytes, sums = written
        record = replace(
            self._content.part().file,
            path=FILE,
            size_bytes=size_bytes,
            chunk_bytes=chunk_bytes,
            crc32=sums,
        )
        manifest = new_manifest(
            tag=folder.name,
            stage=self._stage,
            mesh=snapshot.mesh,
            flats=tuple(snapshot.flats),
            files=(record,),
            holders=((0,),),
            state=self._content.state | ({} if shared is None else {_SHARED: asdict(shared)}),
        )
        partial_path = folder / f"{MANIFEST}.partial"
        partial_path.write_bytes(dump(manifest))
        partial_path.rename(manifest_path)


def write_frozen(frozen: Sequence[TensorEntry], path: Path, name: str) -> SharedRecord:
    """Write them to a new file, which will have this name. Raises OSError: it does not fit."""
    return SharedRecord(name, *rewrite_tensors(SharedFile(path), frozen))


def record_of_frozen(path: Path) -> SharedRecord:
    """The record of such a file that is there, as its bytes are. Raises OSError."""
    memory = SharedFile(path).whole()
    chunk_bytes = memory_chunk_bytes(len(memory))
    starts = range(0, len(memory), chunk_bytes)
    sums = tuple(word_sum(memory[start : start + chunk_bytes]) for start in starts)
    return SharedRecord(path.name, len(memory), chunk_bytes, sums)


def _take_frozen(content: Content) -> list[TensorEntry]:
    """Leave the values of frozen parameters out of the content. Those that are not plain memory stay."""
    flats = content.snapshot.flats
    numbers = {
        block.flat
        for block in content.snapshot.values
        if flats[block.flat].kind == "param" and not flats[block.flat].trains and not block.blocks
    }
    names = {elements.tensor for elements in content.ranges if elements.flat in numbers}
    taken = [entry for entry in content.entries if entry.name in names]
    content.drop(numbers)
    for number in numbers:
        flats[number] = replace(flats[number], has_values=False)
    return taken


def _shared_of(manifest: Manifest) -> SharedRecord | None:
    found = manifest.state.get(_SHARED)
    return None if found is None else SharedRecord(**found | {"sums": tuple(found["sums"])})


def _read_frozen(folder: Path, shared: SharedRecord, snapshot: Snapshot) -> None:
    """Copy the values of frozen parameters from their file. Raises DamagedError."""
    size_bytes, chunk_bytes, sums = shared.size_bytes, shared.chunk_bytes, shared.sums
    record = FileRecord(shared.path, size_bytes, chunk_bytes, sums, (), (), None)
    with (
        ThreadPoolExecutor(1) as pool,
        closing(CheckedFile(folder, record, pool, word_sum)) as file,
    ):
        for block in snapshot.values:
            name = f"{block.key}/{block.flat}/{block.start}"
            if name in file.table:
                block.tensor.copy_(file.tensor(name).view(block.tensor.shape))


def image_step(folder: Path) -> int | None:
    """The step of the image in a folder, after a check of every byte; None: there is no whole image."""
    try:
        manifest = read_manifest(folder.parent, folder.name)
        record = manifest.files[0]
        if not matches(folder / FILE, record.size_bytes, record.chunk_bytes, record.crc32):
            return None
        shared = _shared_of(manifest)
        if shared is not None and not matches(folder / shared.path, *astuple(shared)[1:]):
            return None
        return int(manifest.state["counters"]["global_steps"])
    except (DamagedError, OSError):
        return None


def read_image(parts: Parts, counters: Counters, folder: Path, *, also_random: bool) -> Any:
    """Take the states of an image; the client_state in it. For all ranks of a shard group at once.

    also_random: its random generators as well.
    Raises UsageError: it is damaged, or of another model.
    """
    manifest, options = read_manifest(folder.parent, folder.name), LoadOptions()
    in_memory, opened = parts.updater.in_memory(), CheckedFiles(folder, manifest, word_sum)
    with in_memory, ExitStack() as undo, opened as files:
        snapshot = Snapshot(parts.module, parts.sharded, parts.updater, is_alone=True)
        catalogue = catalogue_of(manifest, str(folder / MANIFEST))
        restore = Restore(snapshot, catalogue)
        plan = LoadPlan(folder, manifest, snapshot, catalogue, restore, files)
        prepare(parts, counters, plan, [], options)
        set_engine(parts, counters, plan, options, undo)
        shared = _shared_of(manifest)
        if shared is not None:
            _read_frozen(folder, shared, snapshot)
        restore.begin()
        read_files(plan, is_fresh=False)
        undo.pop_all()  # nothing below can fail
        restore.finish(plan.targets)
    if not also_random:
        plan.own.pop("random", None)
    set_own(plan, parts.device)
    return plan.state["client_state"]


def send_image(collectives: Collectives, peer: int, folder: Path) -> None:
    """Send the files of an image to rank `peer`, which calls `receive_image`. Raises PeerError."""
    for name in (FILE, MANIFEST):
        data = np.fromfile(folder / name, dtype=np.uint8)
        size = torch.tensor([data.size])
        collectives.send(size, peer, what="the size of states", kind=_SENT).wait()
        for part in torch.split(torch.from_numpy(data), _MESSAGE_BYTES):
            collectives.send(part, peer, what="states", kind=_SENT).wait()


def receive_image(collectives: Collectives, peer: int, folder: Path) -> None:
    """Write the files of an image that rank `peer` sends. Their checksums are looked at when it is read."""
    for name in (FILE, MANIFEST):
        size = torch.zeros(1, dtype=torch.int64)
        collectives.receive(size, peer, what="the size of states").wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        for part in torch.split(data, _MESSAGE_BYTES):
            collectives.receive(part, peer, what="states").wait()
        data.numpy().tofile(folder / name)


__all__ = [
    "Image",
    "SharedRecord",
    "image_step",
    "read_image",
    "receive_image",
    "record_of_frozen",
    "send_image",
    "write_frozen",
]
