"""Reads plain weights: a Hugging Face folder, a safetensors file, a state dict of torch.save.

Such files contain names and values. They do not show which tensors are parameters and which are buffers, nor
which name of a tied parameter the model uses. Both are determined when the checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....utils.errors import UsageError
from ....utils.quoting import printable
from ....zero.construction.weights import read_index
from ..io.tensor_file import bytes_of
from ..io.tensor_table import check_storable, read_header
from .imported import EITHER, Imported
from .safe_pickle import StandIn, read_pickle

SAFETENSORS, INDEX = ".safetensors", ".index.json"
FOLDER_FILES = [
    f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in (INDEX, "")
]
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # of weights in trainers' files
DISTRIBUTED = "module."  # the prefix that DistributedDataParallel adds to every name
MAX_HEADER_BYTES = 100 << 20


def find_weights(source: Path) -> Path | None:
    """`source` if it is a file, or the file to read first in a Hugging Face folder; None: neither."""
    found = [source, *(source / name for name in FOLDER_FILES)]
    return next((path for path in found if path.is_file()), None)


def read_weights(path: Path, tag: str) -> Imported:
    """The tensors of a file, or of all files that an index names, mapped from the files.

    Raises:
        UsageError: a file is missing or damaged, contains no named tensors, or names code to execute.
    """
    found = Imported(path.name, tag)
    if path.name.endswith(INDEX):
        tensors = _read_index(path, found)
    else:
        tensors = _read_file(path, found)
        if tensors and all(name.startswith(DISTRIBUTED) for name in tensors):
            found.note(
                f"every name began with {DISTRIBUTED!r}, which DistributedDataParallel adds: removed"
            )
            tensors = {name.removeprefix(DISTRIBUTED): one for name, one in tensors.items()}
    if not tensors:
        raise UsageError(f"{path} holds no tensors by name: there is nothing to import")
    for names in _by_memory(tensors):
        found.add_whole(EITHER, names, tensors[names[0]])
    found.note(
        "there are only weights: optimizer states, counters and random generators start from the beginning"
    )
    return found


def _read_index(path: Path, found: Imported) -> dict[str, Tensor]:
    file_of = read_index(path)
    files = sorted(set(file_of.values()))
    content = {file: _read_file(path.parent / file, found) for file in files}
    for name, file in file_of.items():
        if name not in content[file]:
            raise UsageError(
                f"{path.parent / file} has no {printable(name)}, which {path.name} says it has"
            )
    return {
        name: content[file][name] for file in files for name in file_of if file_of[name] == file
    }


def _read_file(path: Path, found: Imported) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"{path} is missing")
    return _safetensors(path) if path.name.endswith(SAFETENSORS) else _state_dict(path, found)


def _by_memory(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names in order, grouped by equal memory."""
    found: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        check_storable(name, tensor)  # others may have no memory of their own
        bits = (tensor.is_conj(), tensor.is_neg())
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits)
        found.setdefault(view if tensor.numel() else name, []).append(name)
    return list(found.values())


def _state_dict(path: Path, found: Imported) -> dict[str, Tensor]:
    """The tensors by name in a state dict, or in the state dict inside of a trainer's file."""
    content = read_pickle(path)
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} holds a {type(content).__name__}, and no tensors by name")
    inner = [key for key in WRAPPERS if _has_tensors(content.get(key))]
    if inner and not _has_tensors(content):
        others = [str(key) for key in content if key != inner[0]]
        if others:
            found.note(f"the weights are under {inner[0]!r}; left out: {', '.join(others)}")
        content = content[inner[0]]
    tensors = {}
    for name, value in content.items():
        if isinstance(value, Tensor):
            tensors[str(name)] = value
        else:
            kind = value.name if isinstance(value, StandIn) else type(value).__name__
            found.note(f"{name} is not a tensor but a {kind}: left out")
    return tensors


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, Tensor) for one in value.values())


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, mapped from it."""
    size_bytes = path.stat().st_size
    memory = torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8)

    def read(start: int, size: int) -> bytes:
        return bytes(bytes_of(memory[start : start + size]))

    try:
        table, data_at = read_header(read, size_bytes, MAX_HEADER_BYTES)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    found = {}
    for name, there in table.items():
        if not there.numel:  # it has no bytes, so its offset does not matter
            found[name] = torch.empty(there.shape, dtype=there.dtype)
            continue
        part = memory[data_at + there.start : data_at + there.stop]
        if part.data_ptr() % there.dtype.itemsize:
            part = part.clone()  # rare: the writer did not align it
        found[name] = part.view(there.dtype).view(there.shape)
    return found
