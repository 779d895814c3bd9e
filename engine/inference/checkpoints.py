"""The weights that `checkpoint` of `xds.init_inference` names, whatever wrote them.

a folder of transformers    safetensors or .bin files
a folder of xds             a checkpoint of an engine, or the folder of several
DeepSpeed's JSON, or dict   {"type", "checkpoints": [files], "version"}: plain state dicts
a file                      safetensors, or a state dict

Tensors stay in the files until a rank reads its part.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.weights.files import find_weights, read_weights
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.small_files import parse_json, read_small_file, replace_small_file
from ...zero.construction.sources import Weights, WeightSource
from ..checkpoint.exports.publish import published
from ..checkpoint.io.folders import LATEST, named_in
from ..checkpoint.io.reader import CheckpointReader
from .config import InferenceConfig

log = logging.getLogger("xds")
DESCRIPTION = "ds_inference_config.json"  # the name of DeepSpeed's JSON in a folder
WHOLE = "pytorch_model.bin"
MAX_JSON_BYTES = 16 << 20
_SLICED = "it has slices of several ranks, which only the program that wrote them merges; give whole weights"


def open_checkpoint(source: Any, base_dir: str, model: nn.Module) -> WeightSource:
    """The weights that `source` names, under the names of `model`.

    What the model has no place for is left out, with a line in the log.

    Raises:
        UsageError: there are none, or they are slices of another program.
    """
    found = _open(source, base_dir)
    names = set(model.state_dict(keep_vars=True))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    table: dict[str, str] = {}  # name in the model -> name in the files
    for name in found.names():
        fits = [own for own in (name, prefix + name, name.removeprefix(prefix)) if own in names]
        if fits:
            table.setdefault(fits[0], name)
    extra = len(set(found.names()).difference(table.values()))
    if extra:
        log.info("%s: %d tensors have no place in the model: left out", found.source, extra)
    return _Renamed(found, table)


def _open(source: Any, base_dir: str) -> WeightSource:
    if not isinstance(source, Mapping | str | os.PathLike):
        raise wrong("checkpoint", source, "the path of a folder or file, or a dict of files")
    paths = _paths(source, base_dir)
    if len(paths) == 1 and find_weights(paths[0]) is None and paths[0].is_dir():
        trained = _of_deepspeed_training(paths[0])
        if trained is None:
            return _OfEngine(paths[0])
        paths = [trained]
    tensors: dict[str, Tensor] = {}
    for path in paths:
        first = find_weights(path)
        if first is None:
            raise UsageError(
                f"checkpoint: {printable(path)} does not exist; give a folder, a file or a dict of files, and "
                "base_dir where they are relative"
            )
        read = read_weights(first)
        for note in read.notes:
            log.info("checkpoint: %s: %s", first, printable(note))
        tensors.update(read.tensors)
    return Weights(tensors, str(paths[0] if len(paths) == 1 else paths[0].parent))


def _paths(source: Any, base_dir: str) -> list[Path]:
    """The files or the folder of a checkpoint."""
    if isinstance(source, Mapping):
        return _listed(source, base_dir, "checkpoint")
    path = Path(source)
    if not path.exists() and base_dir:
        path = Path(base_dir, source)
    if find_weights(path) is None and (path / DESCRIPTION).is_file():
        path, base_dir = path / DESCRIPTION, base_dir or str(path)
    if not path.is_file() or path.suffix != ".json" or path.name.endswith(".index.json"):
        return [path]
    try:
        content = parse_json(read_small_file(path, MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(f"checkpoint: {printable(path)} cannot be read: {error}") from None
    return _listed(content, base_dir or str(path.parent), str(path))


def _listed(content: Any, base_dir: str, where: str) -> list[Path]:
    """The files that DeepSpeed's description of a checkpoint lists."""
    files = content.get("checkpoints") if isinstance(content, Mapping) else None
    if isinstance(files, Mapping):  # pre-sliced by DeepSpeed: "tp" has a file for each rank
        raise UsageError(f"{where}: {_SLICED}")
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, Sequence) or not files:
        raise UsageError(
            f'{where}: it must be an object {{"type": ..., "checkpoints": [files], "version": ...}} with a file'
        )
    if str(content.get("type", "")).casefold() == "megatron" and len(files) > 1:
        raise UsageError(f"{where}: {_SLICED}")
    folder = str(content.get("base_dir") or base_dir)
    return [Path(folder, str(name)) for name in files]


def _of_deepspeed_training(path: Path) -> Path | None:
    """The model's file in a checkpoint of DeepSpeed's `save_checkpoint`; None: it is none."""
    latest = path / LATEST
    folder = path / (named_in(latest) or "") if latest.is_file() else path
    found = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if len(found) > 1:
        raise UsageError(f"checkpoint: {printable(folder)}: {_SLICED}")
    return found[0] if found else None


@final
class _Renamed(WeightSource):
    """Some tensors of `inner`, under other names. table: name here -> name there."""

    remedy = "let checkpoint name all weights of this model"

    def __init__(self, inner: WeightSource, table: Mapping[str, str]) -> None:
        self.source = inner.source
        self._inner, self._table = inner, table

    def names(self) -> Sequence[str]:
        return list(self._table)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._table[name])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._inner.read(self._table[name], start, stop)


@final
class _OfEngine(WeightSource):
    """A checkpoint of an engine: the fp32 masters where it has some."""

    def __init__(self, path: Path) -> None:
        self._reader = CheckpointReader(path)
        self.source = str(self._reader.folder)
        self._values = dict(self._reader.values)
        for other, name in self._reader.tied.items():
            if name in self._values:
                self._values[other] = self._values[name]
        self._last: tuple[str, Tensor] = "", torch.empty(0)  # a slice is many small ranges

    def names(self) -> Sequence[str]:
        return list(self._values)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._values[name].shape

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if self._last[0] != name:
            self._last = name, self._reader.read(self._values[name]).view(-1)
        return self._last[1][start:stop]


def save_whole(model: nn.Module, settings: InferenceConfig) -> None:
    """Let the folder `save_mp_checkpoint_path` name the whole weights, for `checkpoint` of a later start.

    Ranks read their slices from whole files, so no slices are written. For one rank, before layers are cut.
    Weights of a checkpoint stay where they are.
    """
    folder = Path(settings.save_path or "")
    folder.mkdir(parents=True, exist_ok=True)
    if settings.checkpoint_source is None:
        files = [WHOLE]
        with published(folder / WHOLE, is_folder=False, overwrite=True) as part:
            torch.save(dict(model.state_dict()), part)
    else:
        paths = [path.resolve() for path in _paths(settings.checkpoint_source, settings.folder)]
        files = list(map(str, paths))
        there = find_weights(folder)
        if there is not None and not {there.resolve(), folder.resolve()} & set(paths):
            raise UsageError(
                f"save_mp_checkpoint_path = {printable(folder)} has other weights, {there.name}, which a later "
                "start would read; give another folder"
            )
    text = json.dumps({"type": "ds_model", "checkpoints": files, "version": 1.0}, indent=2)
    replace_small_file(folder / DESCRIPTION, text)


__all__ = ["open_checkpoint", "save_whole"]
