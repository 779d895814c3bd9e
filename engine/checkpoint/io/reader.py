"""Reads tensors of a committed checkpoint by name, in one process without engine or ranks.

    folder, tag  ->  manifest  ->  name and key  ->  the ranks' ranges of it  ->  one tensor on the CPU

Every byte is verified against its checksum before use. Memory holds only the requested tensors and one chunk
of a file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ....ops.flat import numel_of
from ....ops.weights.tensor_table import BY_NAME
from ....utils.errors import DamagedError, UsageError
from ....utils.quoting import printable
from ....zero.checkpoint.ranges import Copy, SavedFlat, TargetPiece, merged, whole_piece
from ..format import catalogue_of
from ..manifest import lacking
from ..packing import unpack
from .checked_file import CheckedFile, CheckedFiles
from .folders import (
    MANIFEST,
    check_folder,
    check_tag,
    committed,
    meant_tag,
    read_latest,
    read_manifest,
)
from .storage import storage_of

log = logging.getLogger("xds")


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint, for `CheckpointReader.read`.

    kind: "param", "buffer", "either" (imported weights do not show which) or "state" (an optimizer's tensor
        that is not per element; its name is "param/key").
    key: "value", or "state/" and the optimizer's key.
    dtype: in the files; `compute_dtype`: in the model's forward.
    """

    kind: str
    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    trains: bool

    @property
    def numel(self) -> int:
        return numel_of(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def locate(path: str | Path, tag: str | None = None) -> tuple[Path, str]:
    """The folder of checkpoints and the tag that `path` and `tag` mean.

    Args:
        path: a folder of checkpoints; without `tag` also the folder of one checkpoint.
        tag: None means the tag in `latest`; "best" that of the best metric.

    Raises:
        UsageError: there is no such folder, or neither `tag` nor `latest` names a checkpoint.
        DamagedError: `latest` is damaged.
    """
    folder = Path(os.path.abspath(check_folder("dir", path)))
    storage = storage_of(folder)
    if not storage.is_folder(folder):
        raise UsageError(f"{path} is not a folder; give the save_dir of save_checkpoint")
    if tag is not None:
        return folder, meant_tag(folder, check_tag(tag))
    if storage.size_of(folder / MANIFEST) >= 0:
        return folder.parent, folder.name
    named = read_latest(folder)
    if named is not None:
        return folder, named
    tags = [printable(manifest.tag) for manifest in committed(folder)]
    raise UsageError(
        f"{path} has no file `latest`: "
        + (f"give a tag; there are {', '.join(tags)}" if tags else "there is no checkpoint in it")
    )


@final
class CheckpointReader:
    """One checkpoint, open for reading.

    values: parameters and buffers, by name.
    left_out: frozen parameters that were excluded from the save.
    tied: other name of a parameter or buffer -> its name in `values` (or in `left_out`).

    Raises:
        DamagedError: a file is missing or changed; raised when the file is first used, and names it.
    """

    def __init__(self, path: str | Path, tag: str | None = None) -> None:
        self.save_dir, self.tag = locate(path, tag)
        self.folder = self.save_dir / self.tag
        self.manifest = read_manifest(self.save_dir, self.tag)
        self._catalogue = catalogue_of(self.manifest, str(self.folder / MANIFEST))
        self._files = CheckedFiles(self.folder, self.manifest)
        self.values: dict[str, Saved] = {}
        self.left_out: list[str] = []
        self.tied: dict[str, str] = {}
        for flat in self.manifest.flats:
            self._add(flat)

    def _add(self, flat: SavedFlat) -> None:
        if flat.kind == "state":
            return
        self.tied.update(flat.tied)
        first: dict[int, str] = {}  # by offset: imported names that share their elements
        for slot in flat.slots:
            if slot.name in self.values or (slot.name in self.left_out and slot.box is not None):
                continue  # another slice of a tensor
            if slot.numel and first.setdefault(slot.offset, slot.name) != slot.name:
                self.tied[slot.name] = first[slot.offset]
                continue
            if slot.numel and not flat.has_values:
                self.left_out.append(slot.name)
                continue
            shape = slot.whole_shape
            keys = self._catalogue.keys_of(whole_piece(flat.kind, slot))
            computes = BY_NAME[flat.dtype]
            dtype = BY_NAME[keys.get("value", flat.dtype)]
            self.values[slot.name] = Saved(
                flat.kind, slot.name, "value", shape, dtype, computes, flat.trains
            )

    # -- other content ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Counters, loss scale, optimizer (type and groups), scheduler, data position, client_state."""
        state: dict[str, Any] = unpack(self.manifest.state, lambda name: self.file(0).tensor(name))
        return state

    def states(self, name: str) -> dict[str, Any]:
        """The optimizer's states of a parameter by key: `Saved`, a number, or a 0-d tensor."""
        value = self.values.get(name)
        if value is None or value.kind != "param":
            return {}
        piece = self._catalogue.whole("param", name)
        states: dict[str, Any] = {}
        for constant in self._catalogue.constants_of(piece):
            whole = constant.value
            states[constant.key] = (
                whole
                if constant.dtype is None
                else torch.full(constant.shape, whole, dtype=BY_NAME[constant.dtype])
            )
        for key, text in self._catalogue.keys_of(piece).items():
            if key.startswith("state/"):
                states[key] = Saved("param", name, key, value.shape, *(BY_NAME[text],) * 2, True)
        for full in self._catalogue.states_of(name):
            flat = self._catalogue.flat_of("state", full)
            key = f"state/{full.removeprefix(f'{name}/')}"
            states[key] = Saved(
                "state", full, key, flat.slots[0].shape, *(BY_NAME[flat.dtype],) * 2, True
            )
        return {key.removeprefix("state/"): constant for key, constant in states.items()}

    def groups(self) -> dict[str, int]:
        """The number of the parameter group of every trainable parameter."""
        flats = [flat for flat in self.manifest.flats if flat.kind == "param" and flat.trains]
        slots = [slot for flat in flats for slot in flat.slots]
        return {slot.name: slot.group for slot in slots if slot.name not in self.tied}

    def lacking(self) -> list[str]:
        """See `manifest.lacking`."""
        return lacking(self.manifest, self._catalogue)

    # -- tensors ----------------------------------------------------------------------------------------

    def read(self, saved: Saved, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor on the CPU, in `dtype` (default: the saved dtype)."""
        out = torch.empty(saved.shape, dtype=dtype or saved.dtype)
        self.read_into(out.view(-1), saved, 0)
        return out

    def read_into(self, out: Tensor, saved: Saved, start: int) -> None:
        """Read elements [start, start + n) of the flattened tensor into `out` [n], in `out`'s dtype."""
        for copy in self._copies(saved, start, start + out.numel()):
            self.file(copy.file).read([(copy, out)])

    def pieces(self, saved: Saved, dtype: torch.dtype, piece_bytes: int) -> Iterator[Tensor]:
        """The flattened tensor in pieces of [n]; a piece is overwritten when the next one is requested."""
        step = max(piece_bytes // dtype.itemsize, 1)
        buffer = torch.empty(min(step, saved.numel), dtype=dtype)
        for start in range(0, saved.numel, step):
            part = buffer[: min(step, saved.numel - start)]
            self.read_into(part, saved, start)
            yield part

    def _copies(self, saved: Saved, start: int, stop: int) -> list[Copy]:
        piece = TargetPiece(saved.kind, saved.name, start, stop, 0)
        copies = self._catalogue.copies(piece, saved.key)
        if sum(copy.total_numel for copy in copies) != stop - start:
            raise DamagedError(
                f"{self.folder / MANIFEST} contradicts itself: elements of {saved.name} ({saved.key}) are in "
                "no file"
            )
        return merged(copies)

    def file(self, number: int) -> CheckedFile:
        """The file of rank `number`, open."""
        return self._files[number]

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def chosen(reader: CheckpointReader, *, exclude_frozen: bool) -> Mapping[str, Saved]:
    """The values of a state dict. Logs a warning where they are not what evaluation needs, or not complete."""
    optimizer = reader.state().get("optimizer") or {}
    if any(group.get("train_mode") for group in optimizer.get("groups", ())):
        log.warning(
            "%s holds the weights that a schedule-free optimizer trains with: for those to evaluate call "
            "optimizer.eval() before save_checkpoint, and optimizer.train() after it",
            reader.folder,
        )
    if reader.left_out and not exclude_frozen:
        log.warning(
            "%s was saved without its frozen parameters: %d names, such as %s, are not in the result",
            reader.folder,
            len(reader.left_out),
            reader.left_out[0],
        )
    return {
        name: saved
        for name, saved in reader.values.items()
        if saved.kind != "param" or saved.trains or not exclude_frozen or not saved.numel
    }


def get_fp32_state_dict(
    dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor]:
    """The model's whole state dict from a checkpoint, on the CPU, without an engine or other ranks.

    Every floating-point tensor is fp32: the master weights, if there are any. Tied names share one tensor.
    Memory:  the result, and one chunk of a file.

    Args:
        dir: the save_dir of `save_checkpoint`, or the folder of one checkpoint.
        tag: default: the tag in `latest`.
        exclude_frozen_parameters: leave out frozen parameters.

    Raises:
        UsageError: there is no such checkpoint. DamagedError: a file of it is damaged; the message names it.
    """
    with CheckpointReader(dir, tag) as reader:
        state_dict = {
            name: reader.read(saved, torch.float32 if saved.dtype.is_floating_point else None)
            for name, saved in chosen(reader, exclude_frozen=exclude_frozen_parameters).items()
        }
        for other, name in reader.tied.items():
            if name in state_dict:
                state_dict[other] = state_dict[name]
        return state_dict
