"""Exports a checkpoint as a folder of torch.distributed.checkpoint, which `dcp.load` reads into any layout.

torch's own writer writes it, so the format is torch's. The writer keeps the tensors of a file until the file
is complete. It therefore gets one tensor per file, and the memory of each is freed after it is written.
"""

from __future__ import annotations

import io
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ..io.reader import CheckpointReader, Saved
from .export import ExportOptions, state_tree
from .publish import published


@final
class _OneByOne(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads each of `sources` when it is written."""

    def __init__(
        self, reader: CheckpointReader, sources: Mapping[int, Saved], options: ExportOptions
    ) -> None:
        super().__init__()
        self._reader, self._sources, self._options = reader, sources, options
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        tensor: Tensor = self.lookup_object(write_item.index)
        saved = self._sources.get(id(tensor))
        if saved is None:
            return tensor
        if self._last is not None:  # it is on the disk, but the writer still references it
            self._last.untyped_storage().resize_(0)
        self._last = self._reader.read(saved, tensor.dtype)
        self._options.on_written(self._last.nbytes)
        return self._last


@final
class _Writer(FileSystemWriter):
    """Gives files names that no file of another export has, so that both can be in one folder."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prefix = f"__{secrets.token_hex(4)}_"
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=prefix))
            for plan in super().prepare_global_plan(plans)
        ]


def export_dcp(reader: CheckpointReader, out: Path, options: ExportOptions) -> list[str]:
    """Write a folder for `dcp.load` with the names of a state dict; each tied name gets a copy.

    Memory:  the largest tensor.
    Returns: the names of the files written.
    """
    tree, sources = state_tree(reader, options, "meta")
    with published(out, is_folder=True, overwrite=options.overwrite) as part:
        writer = _Writer(part, single_file_per_rank=False, sync_files=False, thread_count=1)
        planner = _OneByOne(reader, sources, options)
        with warnings.catch_warnings():  # about the missing process group, which is intended
            warnings.simplefilter("ignore")
            try:
                save(tree, storage_writer=writer, planner=planner, no_dist=True)
            except CheckpointException as error:  # a BaseException around the cause
                raise next(iter(error.failures.values()))[0] from None
        return sorted(path.name for path in part.iterdir())
