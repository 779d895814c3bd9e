"""The weights of a model that trains, for another program: whole tensors in transformers' names.

for name, tensor in engine.weights(dtype=torch.bfloat16):      every rank takes all of them
    server.load(name, tensor)                                   any of them may use them

weights.metadata                 names, dtypes and shapes in the same order, without a message
weights.packed(buffer_bytes)     the same bytes as vLLM's packed broadcast sends them
weights.save(folder)             a folder of safetensors for `from_pretrained`
"""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn

from ...ops.flat import numel_of
from ...ops.weights.files import ENTRIES
from ...utils.arguments import truth, whole, wrong
from ...utils.errors import UsageError
from ...utils.progress import counted
from ...zero.access.buckets import Wanted, gathered, in_order
from ...zero.core.owners import find_owner
from ...zero.model.sharded_model import ShardedModel
from ..checkpoint.agreement import together
from ..checkpoint.exports.export import write_safetensors
from ..checkpoint.exports.publish import Publication
from .adapters import AdapterNames, Deltas

NAMES = ("transformers", "module")
Value = TypeVar("Value")


class TensorInfo(NamedTuple):
    """What a receiver needs to know of a tensor before it arrives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@final
@dataclass(frozen=True)
class WeightOptions:
    """See `Engine.weights`."""

    bucket_bytes: int
    names: str
    dtype: torch.dtype | None
    merge_adapters: bool

    def check(self) -> None:
        """Raises UsageError: an argument is wrong."""
        whole("weights: bucket_bytes", self.bucket_bytes, 1)
        truth("weights: merge_adapters", self.merge_adapters)
        if self.names not in NAMES:
            raise wrong("weights: names", self.names, '"transformers" or "module"')
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise wrong("weights: dtype", str(self.dtype), "a floating dtype of torch, or None")


@final
class Weights:
    """Gives each tensor once, to one loop. Every rank runs it to its end; the values are those of that time."""

    def __init__(self, sharded: ShardedModel, module: nn.Module, options: WeightOptions) -> None:
        options.check()
        self._world = sharded.collectives
        self._module = module
        self._options = options
        self._deltas = Deltas(module, sharded.flat_groups) if options.merge_adapters else None
        named = AdapterNames(module, merges=options.merge_adapters)
        renames = options.names == "transformers"
        found = []
        seen: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            shown = named.of(name) if renames else name
            if isinstance(tensor, Tensor) and id(tensor) not in seen and shown is not None:
                seen.add(id(tensor))
                found.append(Wanted(shown, tensor, self._sent_dtype(tensor)))
        self._wanted = in_order(found)
        # they have the values, and would end with an engine that the caller keeps no longer
        self._owners = [find_owner(one.tensor) for one in found]
        self._agree()

    @property
    def metadata(self) -> list[TensorInfo]:
        """Name, dtype and whole shape of each tensor, in the order in which they come. Nothing is sent."""
        return [
            TensorInfo(one.name, self._final_dtype(one.tensor), one.shape) for one in self._wanted
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        by_name = {one.name: one.tensor for one in self._wanted}
        for name, tensor in gathered(self._wanted, self._options.bucket_bytes):
            source = by_name[name]
            if self._deltas is not None:
                tensor = self._deltas.merged(source, tensor)
            yield name, tensor.to(self._final_dtype(source))

    def packed(self, buffer_bytes: int = 1 << 30) -> Iterator[Tensor]:
        """The bytes of all tensors, in buffers [n] of uint8 that each end with the first tensor over the size.

        This is the order and the size in which vLLM's receiver of packed broadcasts expects them, which gets
        `metadata` and `buffer_bytes` beforehand. Every rank takes all of them; one of them broadcasts them.
        """
        limit = whole("packed: buffer_bytes", buffer_bytes, 1)
        waiting: list[Tensor] = []
        taken_bytes = 0
        for _, tensor in self:
            waiting.append(tensor.contiguous().view(-1).view(torch.uint8))
            taken_bytes += waiting[-1].numel()
            if taken_bytes > limit:
                yield torch.cat(waiting)
                waiting, taken_bytes = [], 0
        if waiting:
            yield torch.cat(waiting)

    def save(self, folder: str | Path) -> Path:
        """Write files of safetensors to `folder`, which rank 0 makes. A collective; returns `folder`.

        Files are written one after the other, while later buckets are gathered. They appear together at the
        end, in place of former weights there: a reader finds those or the new ones, whole. With the config of
        transformers that the model has, `from_pretrained` reads the folder.
        Raises:
            UsageError: on every rank: `from_pretrained` would read something else in the folder.
            XdsError: on every rank: rank 0 cannot write.
        """
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise wrong("weights.save: folder", folder, "the path of a folder")
        target = Path(folder)
        files = self._files()
        with ExitStack() as cleanup:
            publication = self._on_rank_0(lambda: _begin(target, cleanup))
            left = {shown: set(names) for shown, names in files.items()}
            held: dict[str, Tensor] = {}
            shows, total = publication is not None, len(self._wanted)
            for name, tensor in counted(self, "writing weights", total, "tensors", is_shown=shows):
                held[name] = tensor.cpu() if publication is not None else tensor[:0]
                shown = next(iter(left))  # tensors come in the order of the files
                left[shown].remove(name)
                if not left[shown]:
                    del left[shown]
                    self._on_rank_0(partial(_write, publication, shown, held))
                    held = {}
            self._on_rank_0(lambda: self._finish(publication, files))
        return target

    def _on_rank_0(self, action: Callable[[], Value]) -> Value | None:
        """The result of `action` on rank 0, None on others. Every rank raises what it raises."""
        is_first = self._world.rank == 0
        return together(self._world, "weights.save", lambda: action() if is_first else None)[0]

    def _finish(self, publication: Publication | None, files: dict[str, list[str]]) -> None:
        assert publication is not None
        part = publication.path
        config: Any = getattr(self._module, "config", None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            dtypes = {one.dtype for one in self.metadata if one.dtype.is_floating_point}
            if dtypes:  # the widest one loads all values as they are
                config.dtype = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
            config.save_pretrained(part)
        size_bytes = sum(numel_of(one.shape) * one.dtype.itemsize for one in self.metadata)
        table = {name: file for file, names in files.items() for name in names}
        text = json.dumps({"metadata": {"total_size": size_bytes}, "weight_map": table}, indent=1)
        (part / ENTRIES[1]).write_text(text)
        publication.commit()

    def _files(self) -> dict[str, list[str]]:
        """Name of the file -> names of its tensors, in the order in which they come."""
        found: list[list[str]] = []
        taken_bytes = 0
        for name, dtype, shape in self.metadata:
            size_bytes = numel_of(shape) * dtype.itemsize
            if not found or taken_bytes + size_bytes > self._options.bucket_bytes:
                found.append([])
                taken_bytes = 0
            found[-1].append(name)
            taken_bytes += size_bytes
        count = len(found)
        return {
            f"model-{number:05}-of-{count:05}.safetensors": names
            for number, names in enumerate(found, 1)
        }

    # -- dtypes -----------------------------------------------------------------------------------------

    def _final_dtype(self, tensor: Tensor) -> torch.dtype:
        asked = self._options.dtype
        return asked if asked is not None and tensor.is_floating_point() else tensor.dtype

    def _sent_dtype(self, tensor: Tensor) -> torch.dtype:
        """The narrower one. What an adapter is added to keeps its own until then."""
        final, own = self._final_dtype(tensor), tensor.dtype
        is_merged = self._deltas is not None and self._deltas.has(tensor)
        return own if is_merged or own.itemsize <= final.itemsize else final

    def _agree(self) -> None:
        """
        Raises:
            UsageError: the ranks ask for different weights.
        """
        asked = repr((self._options, [one.name for one in self._wanted]))
        row = torch.tensor([zlib.crc32(asked.encode())], device=self._world.device)
        table = self._world.gather_small(row, what="engine.weights()").view(-1).tolist()
        if len(set(table)) > 1:
            raise UsageError(
                "engine.weights(): the ranks pass different arguments; pass the same ones on every rank"
            )


def _begin(folder: Path, cleanup: ExitStack) -> Publication:
    publication = Publication(folder, is_folder=True, overwrite=True)
    cleanup.callback(publication.close)
    return publication


def _write(publication: Publication | None, name: str, tensors: dict[str, Tensor]) -> None:
    assert publication is not None
    write_safetensors(publication.path / name, tensors)


__all__ = ["TensorInfo", "WeightOptions", "Weights"]
