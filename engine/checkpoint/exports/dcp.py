"""What a checkpoint is for torch.distributed.checkpoint: a folder that `dcp.load` reads into any layout.

torch's own writer writes it, so the format is torch's. It gets one tensor at a time, each in a file of its
own (it keeps the tensors of a file until the file is done), and their memory is taken back behind it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ..io.reader import CheckpointReader, Saved
from .export import ExportOptions, state_tree
from .publish import published


@final
class _OneByOne(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is written."""

    def __init__(
        self,
        reader: CheckpointReader,
        homes: Mapping[int, Saved],
        on_written: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._reader = reader
        self._homes = homes
        self._on_written = on_written
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        tensor: Tensor = self.lookup_object(write_item.index)
        saved = self._homes.get(id(tensor))
        if saved is None:
            return tensor
        if self._last is not None:
            self._last.untyped_storage().resize_(
                0
            )  # it is on the disk, but the writer still holds it
        self._last = self._reader.read(saved, tensor.dtype)
        self._on_written(self._last.nbytes)
        return self._last


def export_dcp(reader: CheckpointReader, out: Path, options: ExportOptions) -> list[str]:
    """Write a folder for `dcp.load`: the names of a state dict, tied ones each with a copy.

    Memory:  the largest tensor. The names of the files written.
    """
    tree, homes = state_tree(reader, options, "meta")
    with published(out, is_folder=True, overwrite=options.overwrite) as part:
        writer = FileSystemWriter(
            part, single_file_per_rank=False, sync_files=False, thread_count=1
        )
        with warnings.catch_warnings():  # that there is no process group: it is meant
            warnings.simplefilter("ignore")
            planner = _OneByOne(reader, homes, options.on_written)
            try:
                save(tree, storage_writer=writer, planner=planner, no_dist=True)
            except CheckpointException as error:  # not even an Exception; what is in it says more
                raise next(iter(error.failures.values()))[0] from None
        return sorted(path.name for path in part.iterdir())
