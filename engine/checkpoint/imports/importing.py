"""Imports the checkpoint of another program as a checkpoint of xds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ....ops.weights.files import find_weights, read_weights
from ....utils.errors import UsageError
from ....utils.quoting import escaped, printable, quoted
from ..io.folders import LATEST, MANIFEST, named_in
from .deepspeed import is_deepspeed, read_deepspeed
from .imported import EITHER, Imported

AUTO, DEEPSPEED, HUGGINGFACE, TORCH = "auto", "deepspeed", "huggingface", "torch"
SOURCES = (AUTO, DEEPSPEED, HUGGINGFACE, TORCH)
WEIGHTS_TAG = "imported"  # the tag if the source has none
DISTRIBUTED = "module."  # the prefix that DistributedDataParallel adds to every name


@dataclass(frozen=True)
class ImportReport:
    """The result of an import. notes: a sentence for each part of the source that was not imported."""

    folder: Path
    origin: str
    num_tensors: int
    numel: int
    notes: tuple[str, ...]


def import_checkpoint(
    source: str | Path, save_dir: str | Path, tag: str | None = None, kind: str = AUTO
) -> ImportReport:
    """Commit the content of `source` as a checkpoint in `save_dir`, for `engine.load_checkpoint(save_dir)`.

    Args:
        source: a DeepSpeed checkpoint (the folder with `latest`, or the folder of a tag), a Hugging Face
            folder, or a file of safetensors or torch.save. Nothing in it is executed.
        tag: which of DeepSpeed's tags (default: `latest`); for plain weights: the tag of the new checkpoint.
        kind: auto, deepspeed, huggingface or torch.
    Memory:  tensors are mapped from the files and written in one stream.
    Raises:
        UsageError: the source is missing, incomplete, or cannot be read safely; or save_dir has the tag.
        OSError: from the file system. In both cases save_dir is not changed.
    """
    source, save_dir = Path(source), Path(save_dir)
    if kind not in SOURCES:
        raise UsageError(f"--from {kind}: must be one of {', '.join(SOURCES)}")
    try:
        imported = _read(source, tag, kind)
        folder = imported.write(save_dir, imported.tag)
    except UsageError as error:  # it may name values of the source
        raise type(error)(escaped(str(error))) from error.__cause__
    except OSError:
        raise
    except Exception as error:  # what values of another form make fail is no fixed list
        raise UsageError(
            f"{printable(source)} does not have the form of DeepSpeed 0.19's checkpoints or of weights, which "
            f"xds reads: {printable(f'{type(error).__name__}: {error}')}"
        ) from error
    numel = sum(flat.numel for flat in imported.flats)
    return ImportReport(folder, imported.origin, len(imported.flats), numel, tuple(imported.notes))


def _read(source: Path, tag: str | None, kind: str) -> Imported:
    if not os.path.exists(source):  # False for a name that no file can have
        raise UsageError(f"{printable(source)} does not exist")
    if source.is_dir() and kind in (AUTO, DEEPSPEED):
        folder = _tag_folder(source, tag)
        if is_deepspeed(folder):
            return read_deepspeed(folder)
        if kind == DEEPSPEED:
            raise UsageError(f"{folder} is not a DeepSpeed checkpoint: it has no *_model_states.pt")
    if kind == DEEPSPEED:
        raise UsageError(f"{source} is a file: a DeepSpeed checkpoint is a folder")
    weights = find_weights(source)
    if weights is not None and not (kind == HUGGINGFACE and source.is_file()):
        return _of_weights(weights, tag or WEIGHTS_TAG)
    if list(source.glob(f"*/{MANIFEST}")) or (source / MANIFEST).exists():
        raise UsageError(f"{source} is a checkpoint of xds already: load it as it is")
    raise UsageError(
        f"{source} cannot be imported: it is not a DeepSpeed checkpoint (latest, *_model_states.pt), not a "
        "Hugging Face folder (model.safetensors, pytorch_model.bin, or an index of them), not a file of weights"
    )


def _of_weights(path: Path, tag: str) -> Imported:
    """Plain weights: names and values.

    They do not show which tensors are parameters and which are buffers, nor which name of a tied parameter the
    model uses. Both are determined when the checkpoint is loaded.
    """
    weights = read_weights(path)
    tensors, imported = weights.tensors, Imported(path.name, tag)
    for note in weights.notes:
        imported.note(note)
    if not tensors:
        raise UsageError(f"{path} holds no tensors by name: there is nothing to import")
    if all(name.startswith(DISTRIBUTED) for name in tensors):
        imported.note(
            f"every name began with {DISTRIBUTED!r}, which DistributedDataParallel adds: removed"
        )
        tensors = {name.removeprefix(DISTRIBUTED): tensor for name, tensor in tensors.items()}
    for names in _by_memory(tensors):
        imported.add_whole(EITHER, names, tensors[names[0]])
    imported.note(
        "there are only weights: optimizer states, counters and random generators start from the beginning"
    )
    return imported


def _by_memory(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names in order, grouped by equal memory."""
    names: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        bits = (tensor.is_conj(), tensor.is_neg())
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits)
        names.setdefault(view if tensor.numel() else name, []).append(name)
    return list(names.values())


def _tag_folder(source: Path, tag: str | None) -> Path:
    """The folder of one tag of a DeepSpeed checkpoint, if `source` is one."""
    if is_deepspeed(source):
        return source
    if tag is not None:
        tags = sorted(folder.name for folder in source.iterdir() if is_deepspeed(folder))
        if tags and tag not in tags:
            raise UsageError(f"{source} has no checkpoint {tag!r}; there is {', '.join(tags)}")
        return source / tag
    latest = source / LATEST
    named = None if latest.is_dir() else named_in(latest)
    if named is not None and not os.path.isdir(source / named):
        raise UsageError(
            f"{latest} names {quoted(named)}, and {source} has no such folder; give the folder to import"
        )
    return source / (named or "")
