"""Exports a checkpoint as safetensors files, as `transformers` loads them, or as a plain torch state dict.

    reader  --a piece at a time, cast-->  file       no tensor is held whole

dcp.py writes folders of torch.distributed.checkpoint, torch_file.py the file of a state dict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....ops.weights.tensor_table import DTYPES, make_header
from ....utils.errors import UsageError
from ..io.reader import CheckpointReader, Saved, chosen
from ..io.tensor_file import bytes_of, dense
from .publish import Publication, published
from .torch_file import write_torch_file

PIECE_BYTES = 4 << 20
HEADER_ALIGN = 8
SAFETENSORS, TORCH_BIN = ".safetensors", ".bin"
STEMS = {SAFETENSORS: "model", TORCH_BIN: "pytorch_model"}  # of the names in a folder
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

    def values(self, reader: CheckpointReader) -> list[Saved]:
        """What is written of the model."""
        return list(chosen(reader, exclude_frozen=self.exclude_frozen).values())

    def dtype_of(self, saved: Saved) -> torch.dtype:
        """The dtype in which a value is written."""
        is_cast = self.dtype is not None and saved.dtype.is_floating_point
        return self.dtype if is_cast and self.dtype is not None else saved.dtype

    def size_of(self, saved: Saved) -> int:
        """The bytes of a value that is written."""
        return saved.numel * self.dtype_of(saved).itemsize


def export_bytes(reader: CheckpointReader, options: ExportOptions) -> int:
    """How many bytes of tensors an export will write."""
    total = sum(map(options.size_of, options.values(reader)))
    for name in reader.values if options.with_optimizer else ():
        states = reader.states(name).values()
        total += sum(state.size_bytes for state in states if isinstance(state, Saved))
    return total


# -- safetensors --------------------------------------------------------------------------------------------


def export_safetensors(reader: CheckpointReader, out: Path, options: ExportOptions) -> list[str]:
    """Write a folder that `from_pretrained` opens, or one file if `out` ends with .safetensors.

    Each tied tensor is written once, under the first of its names. Returns the names of the files written.
    """
    if out.suffix != SAFETENSORS:
        return export_folder(reader, out, SAFETENSORS, options)
    with published(out, is_folder=False, overwrite=options.overwrite) as part:
        _write_safetensors(reader, part, options.values(reader), options)
    return [out.name]


def export_folder(
    reader: CheckpointReader, out: Path, suffix: str, options: ExportOptions
) -> list[str]:
    """Write a folder with one file, or with several and an index. Returns the names of the files written.

    suffix: SAFETENSORS, or TORCH_BIN for files of torch.save.
    """
    write = _write_safetensors if suffix == SAFETENSORS else _write_bin
    stem = STEMS[suffix]
    shards: list[list[Saved]] = [[]]
    filled = 0
    for saved in options.values(reader):
        filled += options.size_of(saved)
        if shards[-1] and filled > options.max_shard_bytes:
            shards.append([])
            filled = options.size_of(saved)
        shards[-1].append(saved)
    count = len(shards)
    names = [f"{stem}-{number + 1:05d}-of-{count:05d}{suffix}" for number in range(count)]
    if count == 1:
        names = [f"{stem}{suffix}"]
    with closing(Publication(out, is_folder=True, overwrite=options.overwrite)) as publication:
        for name, shard in zip(names, shards, strict=True):
            write(reader, publication.path / name, shard, options)
        if count > 1:
            table = {
                saved.name: n for n, shard in zip(names, shards, strict=True) for saved in shard
            }
            total = sum(options.size_of(saved) for shard in shards for saved in shard)
            index = {"metadata": {"total_size": total}, "weight_map": table}
            text = json.dumps(index, indent=2) + "\n"
            (publication.path / f"{stem}{suffix}.index.json").write_text(text)
        return publication.commit()


def _write_safetensors(
    reader: CheckpointReader, path: Path, values: Sequence[Saved], options: ExportOptions
) -> None:
    # widest elements first: every tensor then begins at a multiple of its element's size
    ordered = sorted(values, key=lambda saved: -options.dtype_of(saved).itemsize)
    with open(path, "xb") as file:
        file.write(_header(ordered, reader.tied, options))
        for saved in ordered:
            for piece in reader.pieces(saved, options.dtype_of(saved), PIECE_BYTES):
                file.write(bytes_of(piece))
                options.on_written(piece.nbytes)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new file of tensors that are in memory, in any layout and on any device."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    with open(path, "xb") as file:
        described = ((name, tensor.dtype, list(tensor.shape)) for name, tensor in ordered)
        file.write(make_header(described, HEADER_ALIGN, {"format": "pt"}))
        for _, tensor in ordered:
            file.write(bytes_of(dense(tensor)))


def _header(ordered: Sequence[Saved], tied: Mapping[str, str], options: ExportOptions) -> bytes:
    for saved in ordered:
        if options.dtype_of(saved) not in DTYPES:
            raise UsageError(
                f"{saved.name} is {options.dtype_of(saved)}: safetensors files have no such dtype; export with "
                "--dtype, or to torch"
            )
    names = {saved.name for saved in ordered}
    # `safetensors.torch.save_model` stores the names of tied tensors in the same way
    metadata = {other: name for other, name in tied.items() if name in names}
    tensors = ((saved.name, options.dtype_of(saved), list(saved.shape)) for saved in ordered)
    return make_header(tensors, HEADER_ALIGN, {"format": "pt", **metadata})


# -- torch --------------------------------------------------------------------------------------------------


def export_torch(reader: CheckpointReader, out: Path, options: ExportOptions) -> list[str]:
    """Write one file that `torch.load(out, weights_only=True)` opens: the state dict with all its names."""
    tree, sources = state_tree(reader, options, "cpu")
    with published(out, is_folder=False, overwrite=options.overwrite) as part:
        write_torch_file(part, tree, lambda tensor: _pieces(reader, sources, options, tensor))
    return [out.name]


def _write_bin(
    reader: CheckpointReader, path: Path, values: Sequence[Saved], options: ExportOptions
) -> None:
    tree, sources = _model_tree(reader, values, options, "cpu")
    write_torch_file(path, tree, lambda tensor: _pieces(reader, sources, options, tensor))


def _pieces(
    reader: CheckpointReader, sources: Mapping[int, Saved], options: ExportOptions, tensor: Tensor
) -> Iterator[memoryview]:
    """The bytes of a tensor of `state_tree`, a piece at a time."""
    parts: Iterable[Tensor] = [dense(tensor).view(-1)]
    if id(tensor) in sources:
        parts = reader.pieces(sources[id(tensor)], tensor.dtype, PIECE_BYTES)
    for part in parts:
        yield bytes_of(part)
        options.on_written(part.nbytes)


def state_tree(
    reader: CheckpointReader, options: ExportOptions, device: str
) -> tuple[dict[str, Any], dict[int, Saved]]:
    """The state dict with empty tensors, and a table from id() of each to the tensor it will hold.

    Tied names have the same tensor. Small tensors that already have their values are not in the table.
    """
    model, sources = _model_tree(reader, options.values(reader), options, device)
    if not options.with_optimizer:
        return model, sources
    saved = reader.state()["optimizer"]
    if saved is None:
        raise UsageError(f"{reader.folder} holds no optimizer; export without --with-optimizer")
    numbers = reader.groups()
    groups: list[dict[str, Any]] = [
        _torch_group(saved["type"], group) | {"params": []} for group in saved["groups"]
    ]
    state: dict[str, dict[str, Any]] = {}
    for name, number in numbers.items():
        groups[number]["params"].append(name)
        state[name] = {}
        for key, value in reader.states(name).items():
            if isinstance(value, Saved):
                state[name][key] = tensor = torch.empty(
                    value.shape, dtype=value.dtype, device=device
                )
                sources[id(tensor)] = value
            else:  # torch's optimizers have their step counts as tensors
                is_count = key == "step" and isinstance(value, int | float)
                state[name][key] = torch.tensor(float(value)) if is_count else value
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}, sources


def _model_tree(
    reader: CheckpointReader, values: Sequence[Saved], options: ExportOptions, device: str
) -> tuple[dict[str, Any], dict[int, Saved]]:
    """See `state_tree`: that of some values, and of the names tied to them."""
    model = {
        saved.name: torch.empty(saved.shape, dtype=options.dtype_of(saved), device=device)
        for saved in values
    }
    sources = {id(model[saved.name]): saved for saved in values}
    model.update({other: model[name] for other, name in reader.tied.items() if name in model})
    return model, sources


def _torch_group(optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that torch's optimizer of that name has; all, if torch has no such optimizer."""
    # Adam of xds decouples the weight decay by default
    is_own = optimizer == "Adam" and "bias_correction" in group
    kind = getattr(torch.optim, "AdamW" if is_own else optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return dict(group)
    known: dict[str, Any] = kind([torch.zeros(1, 1)]).defaults  # type: ignore[call-arg]
    return {**known, **{key: value for key, value in group.items() if key in known}}
