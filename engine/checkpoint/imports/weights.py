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
from ....zero.construction.weights import read_index
from ..io.tensor_table import Located, check_storable, read_header
from .imported import EITHER, Imported
from .safe_pickle import StandIn, read_pickle

SAFETENSORS, INDEX = ".safetensors", ".index.json"
FOLDER_FILES = (
    f"model{SAFETENSORS}{INDEX}",
    f"model{SAFETENSORS}",
    f"pytorch_model.bin{INDEX}",
    "pytorch_model.bin",
)
WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
)  # keys for weights in trainers' files
DISTRIBUTED = "module."  # the prefix that DistributedDataParallel adds to every name
MAX_HEADER_BYTES = 100 << 20


def find_weights(source: Path) -> Path | None:
    """`source` if it is a file, or the file to read first in a Hugging Face folder; None: neither."""
    if source.is_file():
        return source
    found = [source / name for name in FOLDER_FILES if (source / name).is_file()]
    return found[0] if found else None


def read_weights(path: Path, tag: str) -> Imported:
    """The tensors of a file, or of all files that an index names, mapped from the files.

    Raises:
        UsageError: a file is missing or damaged, contains no named tensors, or names code to execute.
    """
    found = Imported(path.name, tag)
    if path.name.endswith(INDEX):
        tensors = _read_index(path, found)
    else:
        tensors = _plain_names(_read_file(path, found), found)
    if not tensors:
        raise UsageError(f"{path} holds no tensors by name: there is nothing to import")
    for names in _by_memory(tensors):
        found.add_whole(EITHER, names, tensors[names[0]])
    found.note(
        "there are only weights: optimizer states, counters and random generators start from the beginning"
    )
    return found


def _read_index(path: Path, found: Imported) -> dict[str, Tensor]:
    wanted = read_index(path)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(wanted.values())):
        content = _read_file(path.parent / file, found)
        names = [name for name, there in wanted.items() if there == file]
        missing = [name for name in names if name not in content]
        if missing:
            raise UsageError(
                f"{path.parent / file} has no {missing[0]}, which {path.name} says it has"
            )
        tensors |= {name: content[name] for name in names}
    return tensors


def _read_file(path: Path, found: Imported) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"{path} is missing")
    if path.name.endswith(SAFETENSORS):
        return _read_safetensors(path)
    return _state_dict(path, read_pickle(path), found)


# -- torch.save ---------------------------------------------------------------------------------------------


def _state_dict(path: Path, content: Any, found: Imported) -> dict[str, Tensor]:
    """The tensors by name in a state dict, or in the state dict inside of a trainer's file."""
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


def _plain_names(tensors: dict[str, Tensor], found: Imported) -> dict[str, Tensor]:
    if tensors and all(name.startswith(DISTRIBUTED) for name in tensors):
        found.note(
            f"every name began with {DISTRIBUTED!r}, which DistributedDataParallel adds: removed"
        )
        return {name.removeprefix(DISTRIBUTED): tensor for name, tensor in tensors.items()}
    return tensors


def _by_memory(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names in order, grouped by equal memory."""
    found: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        check_storable(name, tensor)  # others may have no memory of their own
        bits = (tensor.is_conj(), tensor.is_neg())
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits)
        found.setdefault(view if tensor.numel() else name, []).append(name)
    return list(found.values())


# -- safetensors --------------------------------------------------------------------------------------------


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, mapped from it."""
    size_bytes = path.stat().st_size
    with open(path, "rb") as file:

        def read(start: int, size: int) -> bytes:
            file.seek(start)
            return file.read(size)

        try:
            table, data_at = read_header(read, size_bytes, MAX_HEADER_BYTES)
        except ValueError as error:
            raise UsageError(f"{path} is damaged: {error}") from None
    memory = torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8)[data_at:]
    return {name: _tensor(memory, there) for name, there in table.items()}


def _tensor(memory: Tensor, there: Located) -> Tensor:
    if not there.numel:  # it has no bytes, so its offset does not matter
        return torch.empty(there.shape, dtype=there.dtype)
    part = memory[there.start : there.stop]
    if part.data_ptr() % there.dtype.itemsize:
        part = part.clone()  # rare: the writer did not align it
    return part.view(there.dtype).view(there.shape)
