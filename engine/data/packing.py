"""Packs samples of unequal lengths into rows of a fixed number of tokens, so that little is padding.

    samples, in the order of the epoch   aaaa bb ccc dd eeeee f ...     4096 of them at a time
    rows of 8 tokens                     aaaaccc_  eeeeebbf  ...        best fit, the longest first
    row i                                data rank i % world_size

- Which samples are in which row depends on the dataset, the seed and the epoch alone. So a step has the same
  rows at any number of ranks, and a run that resumes at another number goes on with the next ones.
- Positions restart at each sample. The first label of a sample is IGNORED: it would be predicted from another
  sample. Padding at the end of a row is a sample of its own, without labels.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ...utils.arguments import shown
from ...utils.errors import UsageError
from ...utils.progress import counted
from ...utils.quoting import quoted
from ..config.sections import DataPacking
from .loaders import RankLoader, Resumable, check_indexed

NUM_RECENT = 8  # micro-batches that a script may have read ahead
WINDOW = 4096  # samples that are packed together: bounds the memory
IGNORED = -100  # the label that a loss leaves out
LABELS, POSITIONS = "labels", "position_ids"

Item = TypeVar("Item")
Sample = int | Mapping[str, Any]  # its index in the dataset, or its columns


def best_fit(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The numbers of the items in each row, in ascending order; rows in the order of their first items.

    The longest item comes first, each goes into the fullest row that has room (best-fit decreasing).
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # of the rows that are not full: (free tokens, row), sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        at = bisect_left(spaces, (length, -1))
        if at == len(spaces):
            space, row = tokens, len(rows)
            rows.append([])
        else:
            space, row = spaces.pop(at)
        rows[row].append(number)
        if space > length:
            insort(spaces, (space - length, row))
    return sorted(sorted(row) for row in rows)


def _is_flat(value: Any) -> bool:
    """A sequence with one dimension."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 1
    return isinstance(value, list | tuple) and not (value and hasattr(value[0], "__len__"))


@final
class PackedRows(IterableDataset[Any], Resumable):
    """This rank's rows. A position is an epoch, and the rows of it that all ranks have received."""

    num_steps = None  # of an epoch: known after it alone

    def __init__(
        self,
        dataset: Any,
        packing: DataPacking,
        *,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        step_rows: int,
        drop_last: bool,
    ) -> None:
        """
        Args:
            dataset: map-style, shuffled in each epoch, or an IterableDataset in its order. Each sample is a
                mapping from columns to sequences of one length, or one sequence, the first column. With an
                attribute `lengths` [len(dataset)] a rank reads only the samples of its own rows.
            step_rows: of one step over all ranks. An epoch is a whole number of steps: the last one is filled
                up with the first rows again, or dropped with `drop_last`.
        """
        self._dataset, self._packing = dataset, packing
        self._rank, self._world_size = rank, world_size
        self._shows = rank == 0 and not (dist.is_initialized() and dist.get_rank())
        self._micro_batch_size, self._step_rows = micro_batch_size, step_rows
        self._drop_last = drop_last
        self._is_stream = isinstance(dataset, IterableDataset)
        if not self._is_stream:
            check_indexed(dataset)
        self._lengths = None if self._is_stream else self._known_lengths()
        self.epoch = self._skip = 0
        self._current = {"epoch": 0, "rows": 0}
        # tokens and positions of the last micro-batches, for the proof that a model keeps their samples apart
        self.recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=NUM_RECENT)

    # -- positions --------------------------------------------------------------------------------------

    def start(self) -> dict[str, int]:
        return {"epoch": self.epoch, "rows": self._skip}

    def begin(self) -> dict[str, int]:
        self._current = self.start()
        self.epoch, self._skip = self.epoch + 1, 0
        return self._current

    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        return {"epoch": start["epoch"], "rows": start["rows"] + num_items * self._world_size}

    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        """The epoch is packed again up to the position, for which the lengths of its samples are read."""
        epoch, skip = position["epoch"], position["rows"]
        if skip and not self._is_stream and next(self._whole_steps(epoch, skip), None) is None:
            epoch, skip = epoch + 1, 0
        self.epoch, self._skip = epoch, skip

    def position(self, epoch: int, items: int) -> dict[str, int]:
        return {"epoch": epoch, "rows": items}

    def place(self, position: Mapping[str, int]) -> tuple[int, int]:
        return position["epoch"], position["rows"]

    def steps(self, epoch: int, first: int) -> Iterator[list[list[Sample]]]:
        """The rows of each step of the epoch from the step `first` on."""
        rows = self._whole_steps(epoch, first * self._step_rows)
        while step := list(islice(rows, self._step_rows)):
            yield step

    def given(self, batch: Any, start: Mapping[str, int], end: Mapping[str, int]) -> Any:
        tokens, positions, batch = batch
        self.recent.append((tokens, positions))
        return batch

    # -- rows -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch, skip = self._current["epoch"], self._current["rows"]
        own = islice(self._whole_steps(epoch, skip), self._rank, None, self._world_size)
        for number, row in enumerate(own):
            if number // self._micro_batch_size % num_workers == worker_id:
                yield self.made(row)

    def _whole_steps(self, epoch: int, skip: int) -> Iterator[list[Sample]]:
        """The rows of whole steps after the first `skip` rows of the epoch."""
        rows = self._rows(epoch)
        passed = islice(rows, skip)
        for _ in self._counted(passed, "packing again to the resumed row", skip, "rows"):
            pass
        while step := list(islice(rows, self._step_rows)):
            if len(step) < self._step_rows:
                if self._drop_last:
                    return
                first = list(islice(self._rows(epoch), self._step_rows))
                step += islice(cycle(first), self._step_rows - len(step))
            yield from step

    def _rows(self, epoch: int) -> Iterator[list[Sample]]:
        """The samples of each row of the epoch."""
        items = self._items(epoch)
        most = WINDOW if self._is_stream else min(WINDOW, len(self._dataset))
        while window := list(self._counted(islice(items, most), "packing", most, "samples")):
            fitting = [one for one in window if self._fits(one[0])]
            for row in best_fit([length for length, _ in fitting], self._packing.tokens):
                yield [fitting[number][1] for number in row]

    def _counted(self, items: Iterator[Item], doing: str, total: int, unit: str) -> Iterator[Item]:
        """The items, with a progress bar on one process of rank 0."""
        worker = get_worker_info()
        shows = self._shows and (worker is None or worker.id == 0)
        return counted(items, doing, total, unit, is_shown=shows)

    def _items(self, epoch: int) -> Iterator[tuple[int, Sample]]:
        """The length of each sample of the epoch, and the sample; its index, where lengths are known."""
        if self._is_stream:
            yield from map(self._measured, self._dataset)
            return
        draw = torch.Generator().manual_seed(self._packing.seed + epoch)
        for index in torch.randperm(len(self._dataset), generator=draw).tolist():
            if self._lengths is None:
                yield self._measured(self._dataset[index])
            else:
                yield int(self._lengths[index]), index

    def _measured(self, sample: Any) -> tuple[int, Sample]:
        columns = self._columns_of(sample)
        return len(next(iter(columns.values()))), columns

    def made(self, row: Sequence[Sample]) -> dict[str, Tensor]:
        """Tensors [tokens of the samples] by column, and `position_ids`."""
        samples = [self._read(one) if isinstance(one, int) else one for one in row]
        made = {
            name: torch.cat([torch.as_tensor(sample[name]).reshape(-1) for sample in samples])
            for name in self._packing.columns
        }
        lengths = [len(next(iter(sample.values()))) for sample in samples]
        made[POSITIONS] = torch.cat([torch.arange(length) for length in lengths])
        if LABELS in made:
            made[LABELS] = made[LABELS].masked_fill(made[POSITIONS] == 0, IGNORED)
        return made

    def _read(self, index: int) -> Mapping[str, Any]:
        length, sample = self._measured(self._dataset[index])
        assert self._lengths is not None and not isinstance(sample, int)
        if length != self._lengths[index]:
            raise UsageError(
                f"data_packing: sample {index} has {length} tokens, and `lengths` of the dataset says "
                f"{self._lengths[index]}; correct it, or remove it, and the samples are measured"
            )
        return sample

    def _columns_of(self, sample: Any) -> dict[str, Any]:
        names = list(self._packing.columns)
        if not isinstance(sample, Mapping):
            sample = {names[0]: sample}
        found = {name: sample[name] for name in names if name in sample}
        if LABELS in names and LABELS not in found and names[0] in found:
            found[LABELS] = found[names[0]]
        lacking = [name for name in names if name not in found]
        if lacking:
            raise UsageError(
                f"data_packing.columns: a sample has no {quoted(lacking[0])}; it has "
                f"{', '.join(map(quoted, sample))}: name the columns that every sample has"
            )
        for name, value in found.items():
            if not _is_flat(value):
                raise UsageError(
                    f"data_packing.columns: {quoted(name)} of a sample is {shown(value)}: must be a sequence "
                    "with one value for each token"
                )
        lengths = {name: len(value) for name, value in found.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(
                f"data_packing.columns: the columns of a sample have different lengths: {lengths}; only "
                "columns with a value for each token can be packed"
            )
        return found

    def _fits(self, length: int) -> bool:
        if length > self._packing.tokens and not self._packing.drop_longer:
            raise UsageError(
                f"data_packing.tokens = {self._packing.tokens}: a sample has {length} tokens; raise tokens, "
                "cut the sample, or set data_packing.drop_longer to true"
            )
        return 0 < length <= self._packing.tokens

    def _known_lengths(self) -> np.ndarray[Any, Any] | None:
        """The dataset's attribute `lengths`, checked before the first step."""
        given = getattr(self._dataset, "lengths", None)
        if given is None:
            return None
        lengths = np.asarray(given)
        if lengths.shape != (len(self._dataset),) or lengths.dtype.kind not in "iu":
            raise UsageError(
                f"data_packing: `lengths` of the dataset has the shape {lengths.shape} and the dtype "
                f"{lengths.dtype}: it must have a whole number for each of the {len(self._dataset)} samples"
            )
        if len(lengths):
            self._fits(int(lengths.max()))
        if not ((lengths > 0) & (lengths <= self._packing.tokens)).any():
            raise UsageError(
                f"data_packing.tokens = {self._packing.tokens}: no sample has at least 1 and at most so many "
                "tokens"
            )
        return lengths


@final
class RowReader(Dataset[dict[str, Tensor]]):
    """The tensors of a row, for a loader whose sampler gives rows."""

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows

    def __getitem__(self, row: Sequence[Sample]) -> dict[str, Tensor]:
        return self._rows.made(row)


@final
class PadRows:
    """Makes a micro-batch of rows: a tensor [rows, tokens] for each column, and `position_ids`.

    The result is tokens, positions, and the micro-batch.

    With `cu_seqlens` also that, int32 [samples + 1]: where each sample begins in the flattened micro-batch, and
    the end of the last one. The padding of a row counts as a sample.
    """

    def __init__(self, packing: DataPacking, collate_fn: Callable[[Any], Any] | None) -> None:
        """collate_fn: called with the micro-batch; None: the micro-batch is the result."""
        self._packing, self._collate_fn = packing, collate_fn

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> Any:
        width, multiple = self._packing.tokens, self._packing.pad_to
        if multiple:
            longest = max(len(row[POSITIONS]) for row in rows)
            width = min(width, -(-longest // multiple) * multiple)
        batch = {
            name: torch.stack([_padded(row[name], width, pad) for row in rows])
            for name, pad in self._packing.columns.items()
        }
        batch[POSITIONS] = torch.stack(
            [torch.cat([row[POSITIONS], torch.arange(width - len(row[POSITIONS]))]) for row in rows]
        )
        if self._packing.cu_seqlens:
            starts = (batch[POSITIONS].view(-1) == 0).nonzero().view(-1)
            end = starts.new_full((1,), len(rows) * width)
            batch["cu_seqlens"] = torch.cat([starts, end]).int()
        tokens, positions = batch[next(iter(self._packing.columns))], batch[POSITIONS]
        return tokens, positions, batch if self._collate_fn is None else self._collate_fn(batch)


def _padded(values: Tensor, width: int, pad: float) -> Tensor:
    return torch.cat([values, values.new_full((width - len(values),), pad)])


def packed_loader(  # noqa: PLR0913 (a rank and the arguments of a DataLoader)
    dataset: Any,
    packing: DataPacking,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    step_rows: int,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    recovers: bool = False,
) -> DataLoader[Any]:
    """This data-parallel rank's loader of packed micro-batches over `dataset`. Its length is not known.

    Args:
        collate_fn: gets the micro-batch, and returns what the loader gives; None: the micro-batch.
        recovers: the run goes on when other ranks are lost.

    Raises:
        UsageError: the dataset has no samples that fit.
    """
    rows = PackedRows(
        dataset,
        packing,
        rank=rank,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        step_rows=step_rows,
        drop_last=drop_last,
    )
    own_seed = packing.seed * world_size + rank
    options: dict[str, Any] = {
        "batch_size": micro_batch_size,
        "collate_fn": PadRows(packing, collate_fn),
        "num_workers": num_workers,
        "generator": torch.Generator().manual_seed(own_seed),
    }
    if not recovers:
        return RankLoader(rows, own_seed, dataset=rows, **options)
    from .step_sampler import StepSampler

    sizes = (world_size, step_rows // (world_size * micro_batch_size), micro_batch_size)
    sampler = StepSampler(rows, rank, sizes)
    return RankLoader(sampler, own_seed, dataset=RowReader(rows), sampler=sampler, **options)


__all__ = ["IGNORED", "WINDOW", "PackedRows", "PadRows", "RowReader", "best_fit", "packed_loader"]
