"""Reads weights of other programs: a Hugging Face folder, a safetensors file, a state dict of torch.save.

    folder  ->  its index, or its only file  ->  names, and tensors that are mapped from the files

Every file is checked before a tensor of it is used, and nothing in it is executed. Elements are read when they
are used, so a rank that needs some rows reads little else.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import isfile  # False for a name that no file can have
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ...utils.quoting import printable, quoted
from ...utils.small_files import parse_json, read_small_file
from .safe_pickle import UnpickledObject, read_pickle
from .tensor_table import check_storable, read_header

SAFETENSORS, INDEX = ".safetensors", ".index.json"
# of a folder: `from_pretrained` of transformers takes the first that is there
ENTRIES = tuple(
    f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX)
)
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONFIG, EXPLICIT = (
    "config.json",
    "transformers_weights",
)  # a key that names the entry to take instead
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # of weights in trainers' files
MAX_HEADER_BYTES = 100 << 20
MAX_INDEX_BYTES = 64 << 20  # of the largest models: less than 20 MB


@dataclass(frozen=True)
class FileWeights:
    """What a file holds, or all files of an index. notes: a sentence for each thing that is left out."""

    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_weights(source: Path) -> Path | None:
    """`source` if it is a file, or the file to read first in a folder; None: neither.

    Raises:
        UsageError: `from_pretrained` would read more than this file.
    """
    if isfile(source):
        return source
    names = [named] if (named := explicit_entry(source)) else ENTRIES
    entry = next((source / name for name in names if isfile(source / name)), None)
    if entry is not None and (reason := hindrance(source)):
        raise UsageError(f"{printable(source)} {reason}; remove it, or give {printable(entry)}")
    adapter = source / ADAPTER
    return adapter if entry is None and isfile(adapter) else entry


def hindrance(folder: Path) -> str:
    """What `from_pretrained` reads beside or instead of an entry in the folder; "" if nothing."""
    if isfile(folder / ADAPTER_CONFIG):
        return f"has {ADAPTER_CONFIG}, an adapter that from_pretrained adds to weights beside it"
    with suppress(OSError, ValueError):
        for name in os.listdir(folder):
            if DISTRIBUTED.fullmatch(name):
                return f"has {name}, of a distributed checkpoint that from_pretrained reads first"
    return ""


def explicit_entry(folder: Path) -> str:
    """The entry that config.json names for `from_pretrained`, or ""."""
    with suppress(OSError, ValueError):
        content = parse_json(read_small_file(folder / CONFIG, MAX_INDEX_BYTES))
        name = content.get(EXPLICIT) if isinstance(content, dict) else None
        if isinstance(name, str) and name.endswith((SAFETENSORS, f"{SAFETENSORS}{INDEX}")):
            _check_inside(folder / CONFIG, name)
            return name
    return ""


def read_weights(path: Path) -> FileWeights:
    """The tensors of a file, or of all files that an index names.

    Raises:
        UsageError: a file is missing or damaged, or names code to execute.
    """
    if not path.name.endswith(INDEX):
        weights = FileWeights(path)
        weights.tensors.update(_read_file(path, weights.notes))
        return weights
    file_of = _read_index(path)
    while True:
        try:
            return _read_files(path, file_of)
        except UsageError:
            # an export may have replaced the index, and removed its files; files that are open stay
            now = _read_index(path)
            if now == file_of:
                raise
            file_of = now


def _read_files(path: Path, file_of: Mapping[str, str]) -> FileWeights:
    """The tensors of an index. file_of: name -> file."""
    weights = FileWeights(path)
    content = {
        file: _read_file(path.parent / file, weights.notes)
        for file in sorted(set(file_of.values()))
    }
    for name, file in sorted(file_of.items(), key=lambda item: item[1]):
        if name not in content[file]:
            raise UsageError(
                f"{path.parent / file} has no {printable(name)}, which {path.name} says it has"
            )
        weights.tensors[name] = content[file][name]
    return weights


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, relative to the index."""
    try:
        content = parse_json(read_small_file(path, MAX_INDEX_BYTES))
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} {reason}; it should be an index of weights") from None
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict):
        raise UsageError(
            f'{path} is not an index of weights: it must have an object "weight_map" of names and files'
        )
    for file in table.values():
        _check_inside(path, file)
    return table


def _check_inside(path: Path, file: Any) -> None:
    """Raises UsageError: what `path` names is not a file in its folder."""
    if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
        raise UsageError(f"{path} names {quoted(file)}, which is no file in its folder")


def _read_file(path: Path, notes: list[str]) -> dict[str, Tensor]:
    try:
        if isfile(path):
            is_plain = path.name.endswith(SAFETENSORS)
            return _safetensors(path) if is_plain else _state_dict(path, notes)
    except FileNotFoundError:  # an export has removed it by now
        pass
    raise UsageError(f"{printable(path)} is missing")


def _state_dict(path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The tensors by name in a state dict, or in the state dict inside of a trainer's file."""
    content = read_pickle(path)
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} holds a {type(content).__name__}, and no tensors by name")
    inner = [key for key in WRAPPERS if _has_tensors(content.get(key))]
    if inner and not _has_tensors(content):
        others = [str(key) for key in content if key != inner[0]]
        if others:
            notes.append(f"the weights are under {inner[0]!r}; left out: {', '.join(others)}")
        content = content[inner[0]]
    tensors = {}
    for name, value in content.items():
        if isinstance(value, Tensor):
            check_storable(str(name), value)
            tensors[str(name)] = value
        else:
            kind = value.name if isinstance(value, UnpickledObject) else type(value).__name__
            notes.append(f"{name} is not a tensor but a {kind}: left out")
    return tensors


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, mapped from it."""
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size_bytes else b""
    try:
        table, data_at = read_header(
            lambda start, size: memory[start : start + size], size_bytes, MAX_HEADER_BYTES
        )
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    tensors = {}
    for name, there in table.items():
        if there.numel:  # else it has no bytes, and its offset does not matter
            offset = data_at + there.start
            flat = torch.frombuffer(memory, dtype=there.dtype, count=there.numel, offset=offset)
            if offset % there.dtype.itemsize:
                flat = flat.clone()  # rare: the writer did not align it
            tensors[name] = flat.view(there.shape)
        else:
            tensors[name] = torch.empty(there.shape, dtype=there.dtype)
    return tensors
