"""Collects what an importer reads from another program's files, and commits it as a checkpoint of xds.

Every parameter has its own flat buffer. Its elements stay mapped from the source files until they are written
in one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ....ops.flat import numel_of
from ....ops.mesh import Mesh
from ....ops.weights.safe_pickle import UnpickledObject
from ....ops.weights.tensor_table import check_storable
from ....utils.errors import UsageError
from ....utils.quoting import printable
from ....zero.checkpoint.ranges import ConstantRange, Range, SavedFlat
from ....zero.checkpoint.snapshot import name_of, plain
from ....zero.layout.layout import Slot
from ..format import catalogue_of, constants_to_json, dump, parse
from ..io.folders import (
    MANIFEST,
    check_tag,
    commit,
    discard,
    file_name,
    hidden,
    make_folder,
    write_latest,
)
from ..io.storage import storage_of
from ..io.tensor_file import Sums, TensorEntry, image_bytes, write_tensors
from ..manifest import FileRecord, Manifest, lacking, new_manifest, some_of
from ..packing import pack

# that views of the files' tensors may have beyond four times their bytes
MAX_EXPANSION_BYTES = 1 << 30
MOST_CHARS = 1000  # of a note
EITHER = "either"  # the kind of a tensor if the source does not show whether it is a parameter


@final
class Imported:
    """The content of a foreign checkpoint, in the terms of xds.

    stage: the ZeRO stage that wrote it. tag: its name there. notes: sentences about what was left out.
    """

    def __init__(self, origin: str, tag: str, stage: int = 0) -> None:
        self.origin = printable(origin)
        self.tag = tag
        self.stage = stage
        self.notes: list[str] = []
        self.flats: list[SavedFlat] = []
        self._entries: list[TensorEntry] = []
        self._ranges: list[Range] = []
        self._constants: list[ConstantRange] = []
        empty: dict[str, Any] = {"optimizer": None, "lr_scheduler": None, "client_state": {}}
        self._state = {"data": None, "counters": {}, "loss_scale": {}, **empty}
        self.set_counters()

    def add_flat(
        self,
        kind: str,
        names: Sequence[str],
        shape: Sequence[int],
        dtype: str,
        group: int | None = None,
    ) -> int:
        """Add a flat buffer for one tensor, which may have several names; returns its number.

        group: of the optimizer that trains it; None: it is not trained.
        """
        name, *others = map(plain, names)
        slot = Slot(name, tuple(shape), group or 0, 0)
        tied = tuple((other, name) for other in others)
        numel = numel_of(slot.shape)
        self.flats.append(SavedFlat(kind, group is not None, dtype, numel, (slot,), tied=tied))
        return len(self.flats) - 1

    def add_whole(self, kind: str, names: Sequence[str], tensor: Tensor) -> None:
        """Add a tensor without optimizer states. Raises UsageError: a checkpoint cannot hold it."""
        flat = self.add_flat(kind, names, tensor.shape, name_of(tensor.dtype))
        self.add_range(flat, "value", 0, tensor)

    def add_range(self, flat: int, key: str, start: int, tensor: Tensor) -> None:
        """Add `tensor` as elements [start, start + numel) of `flat`, for the value or state `key`.

        Raises UsageError: a checkpoint cannot hold it.
        """
        check_storable(self.flats[flat].slots[0].name, tensor)
        name = f"{key}/{flat}/{start}"
        stop = start + tensor.numel()
        if tensor.numel():
            self._entries.append(TensorEntry(name, tensor, 0, tensor.numel()))
            self._ranges.append(Range(flat, key, start, stop, 0, name, name_of(tensor.dtype)))

    def add_constant(self, constant: ConstantRange) -> None:
        """Add a number that holds for a range of elements."""
        self._constants.append(constant)

    def note(self, sentence: str) -> None:
        """Add a note for the user, unless it is there already. It may name values of the source."""
        text = printable(sentence, MOST_CHARS)
        if text not in self.notes:
            self.notes.append(text)

    def set_state(self, key: str, value: Any) -> None:
        """Set one of the engine's values. Raises UsageError: it is neither JSON nor tensors."""
        put: list[Tensor] = []
        first = len(self._entries)

        def store(tensor: Tensor) -> str:
            put.append(tensor)
            return f"engine/{first + len(put) - 1}"

        self._state[key] = pack(value, key, store)
        for number, tensor in enumerate(put, first):
            self._entries.append(TensorEntry(f"engine/{number}", tensor, 0, tensor.numel()))

    def set_counters(
        self, steps: int = 0, skipped: int = 0, samples: int = 0, accumulation_steps: int = 1
    ) -> None:
        """Set the engine's counters after a whole step."""
        self._state["counters"] = {
            "global_steps": steps,
            "micro_steps": steps * accumulation_steps,
            "skipped_steps": skipped,
            "global_samples": samples,
            "accumulation_steps": accumulation_steps,
            "is_accumulating": False,
        }

    def storable(self, values: Mapping[Any, Any], where: str) -> dict[str, Any]:
        """The `values` that a checkpoint can hold; notes name the others."""
        kept = {}
        for key, value in values.items():
            try:
                pack(value, str(key), lambda _: "")
                kept[str(key)] = value
            except UsageError as error:
                is_class = isinstance(value, UnpickledObject)
                what = f"is a {value.name}" if is_class else f"cannot be kept: {error}"
                self.note(f"{where} {key!r} {what}: left out")
        return kept

    # -- writing ----------------------------------------------------------------------------------------

    def write(self, save_dir: Path, tag: str) -> Path:
        """Commit the checkpoint save_dir/tag, update `latest`, and return the folder.

        Memory:  only tensors whose elements are not contiguous are copied.
        Raises:
            UsageError: the checkpoint already exists, or would be one that no load accepts.
            OSError: from the file system. In both cases nothing remains.
        """
        check_tag(tag)
        storage = storage_of(save_dir)
        if storage.size_of(save_dir / tag) >= 0:
            is_one = storage.size_of(save_dir / tag / MANIFEST) >= 0
            what = "checkpoint" if is_one else "folder"
            raise UsageError(
                f"{save_dir / tag} already exists, a {what}: import into another folder, or remove it"
            )
        self._check_expansion()
        self._check_manifest(tag)
        claim = make_folder(save_dir, tag)
        try:
            name = file_name(claim.folder, 0)
            sums = write_tensors(claim.folder / name, self._entries)
            folder = commit(claim.folder, save_dir, self._manifest(tag, name, sums))
            write_latest(save_dir, tag)
            return folder
        except BaseException:
            discard(claim.folder)
            raise
        finally:
            claim.release()

    def _manifest(self, tag: str, file: str, sums: Sums) -> Manifest:
        record = FileRecord(
            path=file,
            size_bytes=sums.size_bytes,
            chunk_bytes=sums.chunk_bytes,
            crc32=sums.crc32,
            ranges=tuple(self._ranges),
            constants=tuple(constants_to_json(self._constants)),
            own={},
        )
        return new_manifest(
            tag=tag,
            stage=self.stage,
            mesh=Mesh(1, 1),
            flats=tuple(self.flats),
            files=(record,),
            holders=((0,),),
            state=self._state,
        )

    def _check_manifest(self, tag: str) -> None:
        """Refuse what a load would refuse."""
        size_bytes = image_bytes(self._entries)
        num_sums = -(-size_bytes // Sums(size_bytes, ()).chunk_bytes)
        name = file_name(Path(hidden(tag)), 0)
        planned = self._manifest(tag, name, Sums(size_bytes, (0,) * num_sums))
        source = f"what was read from {self.origin}"
        manifest = parse(dump(planned), source)
        if names := lacking(manifest, catalogue_of(manifest, source)):
            raise UsageError(
                f"{source} is not complete: it has no {some_of(names)}; to import only weights, give a file of "
                "them, with --from torch"
            )

    def _check_expansion(self) -> None:
        """Refuse huge expanded tensors: they are written whole, and a small file must not fill a disk."""
        held = {}
        for entry in self._entries:
            storage = entry.tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        if (
            sum(entry.size_bytes for entry in self._entries)
            > 4 * sum(held.values()) + MAX_EXPANSION_BYTES
        ):
            worst = max(self._entries, key=lambda entry: entry.size_bytes)
            place = worst.name.split("/")[-2]
            name = self.flats[int(place)].slots[0].name if place.isdecimal() else "client_state"
            raise UsageError(
                f"{name} has {worst.size_bytes} bytes, made of {worst.tensor.untyped_storage().nbytes()} in "
                "the file by expand(): it is not imported; save what it was expanded from"
            )
