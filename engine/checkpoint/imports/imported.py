"""Collects what an importer reads from another program's files, and commits it as a checkpoint of xds.

Every parameter has its own flat buffer. Its elements stay mapped from the source files until they are written
in one stream.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ....ops.flat import numel_of
from ....ops.mesh import Mesh
from ....utils.errors import UsageError
from ....zero.checkpoint.ranges import ConstantRange, Range, SavedFlat
from ....zero.checkpoint.snapshot import name_of, plain
from ....zero.core.layout import Slot
from ..format import constants_to_json
from ..io.folders import MANIFEST, check_tag, commit, discard, file_name, make_folder, write_latest
from ..io.tensor_file import Entry, write_tensors
from ..io.tensor_table import check_storable
from ..manifest import FORMAT, VERSION, FileRecord, Manifest, lengths_of, totals_of
from ..packing import pack
from .safe_pickle import StandIn

MAX_EXPANSION_BYTES = 1 << 30  # that an expanded tensor may have beyond its bytes in the file
EITHER = "either"  # the kind of a tensor if the source does not show whether it is a parameter


@final
class Imported:
    """The content of a foreign checkpoint, in the terms of xds.

    stage: the ZeRO stage that wrote it. tag: its name there. notes: sentences about what was left out.
    """

    def __init__(self, origin: str, tag: str, stage: int = 0) -> None:
        self.origin = origin
        self.tag = tag
        self.stage = stage
        self.notes: list[str] = []
        self.flats: list[SavedFlat] = []
        self._entries: list[Entry] = []
        self._ranges: list[Range] = []
        self._constants: list[ConstantRange] = []
        self._state: dict[str, Any] = {"data": None}
        self.set_state("counters", counters())
        self.set_state("loss_scale", {})
        self.set_state("optimizer", None)
        self.set_state("lr_scheduler", None)
        self.set_state("client_state", {})

    # -- tensors ----------------------------------------------------------------------------------------

    def add_flat(
        self,
        kind: str,
        names: list[str],
        shape: tuple[int, ...],
        dtype: str,
        *,
        trains: bool = False,
        group: int = 0,
    ) -> int:
        """Add a flat buffer for one tensor, which may have several names; returns its number."""
        name, *others = map(plain, names)
        slot = Slot(name, shape, group, 0)
        tied = tuple((other, name) for other in others)
        self.flats.append(SavedFlat(kind, trains, dtype, numel_of(shape), (slot,), tied=tied))
        return len(self.flats) - 1

    def add_whole(self, kind: str, names: list[str], tensor: Tensor) -> None:
        """Add a tensor without optimizer states.

        Raises UsageError: a checkpoint cannot hold it.
        """
        check_storable(names[0], tensor)
        _check_expansion(names[0], tensor)
        flat = self.add_flat(kind, names, tuple(tensor.shape), name_of(tensor.dtype))
        self.add_range(flat, "value", 0, tensor)

    def add_range(self, flat: int, key: str, start: int, tensor: Tensor) -> None:
        """Add `tensor` as elements [start, start + numel) of `flat`, for the value or state `key`."""
        name = f"{key}/{flat}/{start}"
        stop = start + tensor.numel()
        if tensor.numel():
            self._entries.append(Entry(name, tensor, 0, tensor.numel()))
            self._ranges.append(Range(flat, key, start, stop, 0, name, name_of(tensor.dtype)))

    def add_constant(self, one: ConstantRange) -> None:
        """Add a number that holds for a range of elements."""
        self._constants.append(one)

    # -- values -----------------------------------------------------------------------------------------

    def note(self, sentence: str) -> None:
        """Add a note for the user, unless it is there already."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def set_state(self, key: str, value: Any) -> None:
        """Set one of the engine's values. Raises UsageError: it is neither JSON nor tensors."""
        put: list[Entry] = []
        self._state[key] = pack(value, key, partial(self._put, put))
        self._entries += put

    def _put(self, put: list[Entry], tensor: Tensor) -> str:
        name = f"engine/{len(self._entries) + len(put)}"
        put.append(Entry(name, tensor, 0, tensor.numel()))
        return name

    def storable(self, values: Mapping[Any, Any], where: str) -> dict[str, Any]:
        """The `values` that a checkpoint can hold; notes name the others."""
        found = {}
        for key, value in values.items():
            try:
                pack(value, str(key), lambda _: "")
            except UsageError as error:
                what = (
                    f"is a {value.name}"
                    if isinstance(value, StandIn)
                    else f"cannot be kept: {error}"
                )
                self.note(f"{where} {key!r} {what}: left out")
                continue
            found[str(key)] = value
        return found

    # -- writing ----------------------------------------------------------------------------------------

    def write(self, save_dir: Path, tag: str) -> Path:
        """Commit the checkpoint save_dir/tag, update `latest`, and return the folder.

        Memory:  only tensors whose elements are not contiguous are copied.
        Raises:
            UsageError: the checkpoint already exists. OSError: from the file system; nothing remains.
        """
        check_tag(tag)
        if (save_dir / tag).exists():
            what = "checkpoint" if (save_dir / tag / MANIFEST).exists() else "folder"
            raise UsageError(
                f"{save_dir / tag} already exists, a {what}: import into another folder, or remove it"
            )
        claim = make_folder(save_dir, tag)
        try:
            folder = claim.folder
            name = file_name(folder, 0)
            sums = write_tensors(folder / name, self._entries)
            record = FileRecord(
                path=name,
                size_bytes=sums.size_bytes,
                chunk_bytes=sums.chunk_bytes,
                crc32=sums.crc32,
                ranges=tuple(self._ranges),
                constants=tuple(constants_to_json(self._constants)),
                own={},
            )
            final_folder = commit(folder, save_dir, self._manifest(tag, record))
            write_latest(save_dir, tag)
        except BaseException:
            discard(claim.folder)
            raise
        finally:
            claim.release()
        return final_folder

    def _manifest(self, tag: str, record: FileRecord) -> Manifest:
        from ....utils.version import __version__

        return Manifest(
            format=FORMAT,
            version=VERSION,
            xds=__version__,
            tag=tag,
            world_size=1,
            stage=self.stage,
            flats=tuple(self.flats),
            files=(record,),
            state=self._state,
            saved_seconds=time.time(),
            mesh=lengths_of(Mesh(1, 1)),
            holders=((0,),),
            totals=totals_of((record,)),
        )


def _check_expansion(name: str, tensor: Tensor) -> None:
    """Refuse huge expanded tensors: they are written whole, and a small file must not fill a disk."""
    held_bytes = tensor.untyped_storage().nbytes()
    if tensor.nbytes - held_bytes > MAX_EXPANSION_BYTES:
        raise UsageError(
            f"{name} has {tensor.nbytes} bytes, made of {held_bytes} in the file by expand(): it is not "
            "imported; save what it was expanded from"
        )


def counters(
    global_steps: int = 0,
    skipped_steps: int = 0,
    global_samples: int = 0,
    accumulation_steps: int = 1,
) -> dict[str, Any]:
    """The engine's counters after a whole step."""
    return {
        "global_steps": global_steps,
        "micro_steps": global_steps * accumulation_steps,
        "skipped_steps": skipped_steps,
        "global_samples": global_samples,
        "accumulation_steps": accumulation_steps,
        "is_accumulating": False,
    }
