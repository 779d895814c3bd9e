"""Exports a checkpoint as safetensors files, as `transformers` loads them, or as a plain torch state dict.

    reader  --a piece at a time, cast-->  file       no tensor is held whole

dcp.py writes folders of torch.distributed.checkpoint, torch_file.py the file of a state dict.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....utils.errors import UsageError
from ..io.reader import CheckpointReader, Saved, chosen
from ..io.tensor_file import bytes_of, dense
from ..io.tensor_table import DTYPES
from .publish import published
from .torch_file import write_torch_file

PIECE_BYTES = 4 << 20
HEADER_ALIGN = 8
OnWritten = Callable[[int], None]


@dataclass(frozen=True)
class ExportOptions:
    """What to write, and how.

    dtype: of every floating-point tensor of the model; None: the fp32 masters, and all else as it was saved.
    max_shard_bytes: of one safetensors or .bin file; a larger tensor gets its own file.
    with_optimizer: torch and dcp: {"model": ..., "optimizer": {"state", "param_groups"}} by names.
    on_written: called with the bytes of each piece.
    """

    dtype: torch.dtype | None = None
    exclude_frozen: bool = False
    max_shard_bytes: int = 5 * 10**9
    with_optimizer: bool = False
    overwrite: bool = False
    on_written: OnWritten = lambda count: None

    def reporting_to(self, on_written: OnWritten) -> ExportOptions:
        """These options with another `on_written`."""
        return replace(self, on_written=on_written)

    def dtype_of(self, saved: Saved) -> torch.dtype:
        """The dtype in which a value is written."""
        is_cast = self.dtype is not None and saved.dtype.is_floating_point
        return self.dtype if is_cast and self.dtype is not None else saved.dtype


@dataclass(frozen=True)
class Weights:
    """The file names of one format for a model in a folder, and the function that writes a file."""

    stem: str
    suffix: str
    write: Callable[[CheckpointReader, Path, Sequence[Saved], ExportOptions], None]

    def file_name(self, number: int, count: int) -> str:
        if count == 1:
            return f"{self.stem}{self.suffix}"
        return f"{self.stem}-{number + 1:05d}-of-{count:05d}{self.suffix}"


# -- what is exported ---------------------------------------------------------------------------------------


def export_bytes(reader: CheckpointReader, options: ExportOptions) -> int:
    """How many bytes of tensors an export will write."""
    total = sum(_size(one, options) for one in _values(reader, options))
    if options.with_optimizer:
        for name in reader.values:
            states = reader.states(name).values()
            total += sum(one.size_bytes for one in states if isinstance(one, Saved))
    return total


def _values(reader: CheckpointReader, options: ExportOptions) -> list[Saved]:
    return list(chosen(reader, exclude_frozen=options.exclude_frozen).values())


def _size(saved: Saved, options: ExportOptions) -> int:
    return saved.numel * options.dtype_of(saved).itemsize


def state_tree(
    reader: CheckpointReader, options: ExportOptions, device: str
) -> tuple[dict[str, Any], dict[int, Saved]]:
    """The state dict with empty tensors, and a table from id() of each to the tensor it will hold.

    Tied names have the same tensor. Small tensors that already have their values are not in the table.
    """
    sources: dict[int, Saved] = {}

    def put(saved: Saved, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(saved.shape, dtype=dtype, device=device)
        sources[id(tensor)] = saved
        return tensor

    model = {one.name: put(one, options.dtype_of(one)) for one in _values(reader, options)}
    model.update({o: model[name] for o, name in reader.tied.items() if name in model})
    if not options.with_optimizer:
        return model, sources
    saved = reader.state()["optimizer"]
    if saved is None:
        raise UsageError(f"{reader.folder} holds no optimizer; export without --with-optimizer")
    numbers = reader.groups()
    groups = [
        {
            **_torch_group(saved["type"], group),
            "params": [name for name in numbers if numbers[name] == number],
        }
        for number, group in enumerate(saved["groups"])
    ]
    state = {
        name: {
            key: put(one, one.dtype) if isinstance(one, Saved) else _as_torch(key, one)
            for key, one in reader.states(name).items()
        }
        for name in numbers
    }
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}, sources


def _torch_group(optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that torch's optimizer of that name has; all, if torch has no such optimizer."""
    # Adam of xds decouples the weight decay by default
    is_own = optimizer == "Adam" and "bias_correction" in group
    kind = getattr(torch.optim, "AdamW" if is_own else optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return dict(group)
    known: dict[str, Any] = kind([torch.zeros(1, 1)]).defaults  # type: ignore[call-arg]
    return {**known, **{key: value for key, value in group.items() if key in known}}


def _as_torch(key: str, value: Any) -> Any:
    """Convert step counts to tensors, as torch's optimizers store them."""
    is_count = key == "step" and isinstance(value, int | float)
    return torch.tensor(float(value), dtype=torch.float32) if is_count else value


# -- safetensors --------------------------------------------------------------------------------------------


def export_safetensors(reader: CheckpointReader, out: Path, options: ExportOptions) -> list[str]:
    """Write a folder that `from_pretrained` opens, or one file if `out` ends with .safetensors.

    Each tied tensor is written once, under the first of its names. Returns the names of the files written.
    """
    if out.suffix == ".safetensors":
        with published(out, is_folder=False, overwrite=options.overwrite) as part:
            _write_safetensors(reader, part, _values(reader, options), options)
        return [out.name]
    return export_folder(reader, out, SAFETENSORS, options)


def export_folder(
    reader: CheckpointReader, out: Path, weights: Weights, options: ExportOptions
) -> list[str]:
    """Write a folder with one file, or with several and an index. Returns the names of the files written."""
    shards = split_by_size(_values(reader, options), lambda one: _size(one, options), options)
    names = [weights.file_name(number, len(shards)) for number in range(len(shards))]
    with published(out, is_folder=True, overwrite=options.overwrite) as part:
        for name, shard in zip(names, shards, strict=True):
            weights.write(reader, part / name, shard, options)
        if len(shards) > 1:
            table = {one.name: n for n, shard in zip(names, shards, strict=True) for one in shard}
            total = sum(_size(one, options) for shard in shards for one in shard)
            index = {"metadata": {"total_size": total}, "weight_map": table}
            names.append(f"{weights.stem}{weights.suffix}.index.json")
            (part / names[-1]).write_text(json.dumps(index, indent=2) + "\n")
    return names


def split_by_size(
    values: Sequence[Saved], size_of: Callable[[Saved], int], options: ExportOptions
) -> list[list[Saved]]:
    """Consecutive values, as many together as `max_shard_bytes` allows."""
    shards: list[list[Saved]] = [[]]
    filled = 0
    for one in values:
        size = size_of(one)
        if shards[-1] and filled + size > options.max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += size
    return shards


def _write_safetensors(
    reader: CheckpointReader, path: Path, values: Sequence[Saved], options: ExportOptions
) -> None:
    # widest elements first: every tensor then begins at a multiple of its element's size
    ordered = sorted(values, key=lambda one: -options.dtype_of(one).itemsize)
    with open(path, "xb") as file:
        file.write(_header(ordered, reader.tied, options))
        for one in ordered:
            for piece in reader.pieces(one, options.dtype_of(one), PIECE_BYTES):
                file.write(bytes_of(piece))
                options.on_written(piece.nbytes)


def _header(ordered: Sequence[Saved], tied: Mapping[str, str], options: ExportOptions) -> bytes:
    names = {one.name for one in ordered}
    # `safetensors.torch.save_model` stores the names of tied tensors in the same way
    metadata = {other: name for other, name in tied.items() if name in names}
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for one in ordered:
        dtype = DTYPES.get(options.dtype_of(one))
        if dtype is None:
            raise UsageError(
                f"{one.name} is {options.dtype_of(one)}: safetensors files have no such dtype; export with "
                "--dtype, or to torch"
            )
        stop = at + _size(one, options)
        table[one.name] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    return struct.pack("<Q", len(text)) + text


# -- torch --------------------------------------------------------------------------------------------------


def export_torch(reader: CheckpointReader, out: Path, options: ExportOptions) -> list[str]:
    """Write one file that `torch.load(out, weights_only=True)` opens: the state dict with all its names."""
    tree, sources = state_tree(reader, options, "cpu")
    with published(out, is_folder=False, overwrite=options.overwrite) as part:
        write_torch_file(part, tree, _filler(reader, sources, options))
    return [out.name]


def _write_bin(
    reader: CheckpointReader, path: Path, values: Sequence[Saved], options: ExportOptions
) -> None:
    tree, sources = state_tree(reader, options, "cpu")
    names = {one.name for one in values}
    names.update(other for other, name in reader.tied.items() if name in names)
    part = {name: tensor for name, tensor in tree.items() if name in names}
    write_torch_file(path, part, _filler(reader, sources, options))


def _filler(
    reader: CheckpointReader, sources: Mapping[int, Saved], options: ExportOptions
) -> Callable[[Tensor], Iterator[memoryview]]:
    """A function that gives the bytes of a tensor of `state_tree`, a piece at a time."""

    def pieces(tensor: Tensor) -> Iterator[memoryview]:
        saved = sources.get(id(tensor))
        parts = (
            [dense(tensor).view(-1)]
            if saved is None
            else reader.pieces(saved, tensor.dtype, PIECE_BYTES)
        )
        for part in parts:
            yield bytes_of(part)
            options.on_written(part.nbytes)

    return pieces


SAFETENSORS = Weights("model", ".safetensors", _write_safetensors)
TORCH_BIN = Weights("pytorch_model", ".bin", _write_bin)
