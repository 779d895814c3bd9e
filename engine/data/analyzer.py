"""Computes metrics of every sample of a dataset, and sorts the samples by them, for curricula.

    map      each process reads its part of the samples once, in batches
             values of 2^20 samples -> a sorted run in a file
    reduce   the sorted runs are merged, a block of each at a time

A metric has a whole number for each sample, or one array for the whole dataset, the sum over its samples.
Its files are those of DeepSpeed's DataAnalyzer, byte for byte. In FOLDER/NAME/, each an indexed file:

    NAME_sample_to_metric     [samples, 1]   the value of each sample
    NAME_index_to_metric      [values, 1]    the different values, ascending
    NAME_index_to_sample      [values, ...]  the samples that have each of these values
    NAME_index_to_sample_percentile_merged   the same in about 100 rows
    NAME_metric_value         [1, numel]     of a sum over the samples: the array

The memory is bounded, whatever the number of samples and of different values.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.quoting import printable, quoted
from .indexed import IndexedDataset, IndexedWriter, smallest_dtype

RUN_NUMEL = 1 << 20  # values that are sorted together
MERGE_NUMEL = 1 << 20  # values of all runs that are merged together
PERCENTILES = 100
MOST_TOKENS = 1 << 24  # of a vocabulary: each has a count

Ints = NDArray[np.int64]


@final
@dataclass(frozen=True)
class Metric:
    """
    Args:
        name: of its files.
        function: called with a batch of samples. Returns whole numbers: one for each sample, or with `is_sum`
            an array, which is summed over the batches. Several processes need a function of a module.
        is_sum: DeepSpeed's accumulate_value_over_samples; else its single_value_per_sample.
    """

    name: str
    function: Callable[[Any], Any]
    is_sum: bool = False

    def __post_init__(self) -> None:
        if (
            not self.name
            or self.name.startswith(".")
            or not self.name.isprintable()
            or "/" in self.name
        ):
            raise UsageError(
                f"the metric {quoted(self.name)}: its name must be usable as that of a file"
            )


@final
@dataclass(frozen=True)
class Analyzed:
    """What was found of a metric: its folder, the limits of its values, how many are different."""

    folder: Path
    least: int
    most: int
    num_values: int

    def file(self, what: str) -> Path:
        """The path of an indexed file: "sample_to_metric", "index_to_sample", and so on."""
        return self.folder / f"{self.folder.name}_{what}"


def analyze(
    dataset: Any,
    metrics: Sequence[Metric],
    folder: str | Path,
    *,
    batch_size: int = 1024,
    num_workers: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_indices: Sequence[int] | None = None,
) -> dict[str, Analyzed]:
    """Write the files of the metrics, and return what was found by the name of the metric.

    Args:
        dataset: map-style, with a length. Each sample is read once.
        num_workers: processes. With more than 1 the dataset and the functions are pickled.
        collate_fn: makes a batch of a list of samples; None: the list is the batch.
        sample_indices: the numbers of the samples in the files [samples]; None: their places in the dataset.

    Raises:
        UsageError: the dataset is empty, or a function did not return what its metric needs.
    """
    total = _checked(dataset, metrics, batch_size, num_workers, sample_indices)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = Path(tempfile.mkdtemp(prefix=".analyze-", dir=folder))
    job = _Job(dataset, tuple(metrics), batch_size, collate_fn, sample_indices, parts)
    try:
        mapped = _mapped(job, total, num_workers)
        reduced = {}
        for at, metric in enumerate(metrics):
            found = [part[at] for part in mapped]
            out = folder / metric.name
            reduced[metric.name] = (
                _reduce_sum(found, out) if metric.is_sum else _reduce(found, out, total)
            )
        return reduced
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _checked(
    dataset: Any,
    metrics: Sequence[Metric],
    batch_size: int,
    num_workers: int,
    sample_indices: Sequence[int] | None,
) -> int:
    """The number of samples."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError("the dataset must have a length, and samples by index")
    total = len(dataset)
    if not total:
        raise UsageError("the dataset has no samples")
    if batch_size < 1 or num_workers < 1:
        raise UsageError(
            f"batch_size = {batch_size}, num_workers = {num_workers}: must be at least 1"
        )
    if sample_indices is not None and len(sample_indices) != total:
        raise UsageError(f"{len(sample_indices)} sample_indices for {total} samples")
    names = [metric.name for metric in metrics]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"the metrics {names}: give at least one, and each name once")
    return total


# -- map: every sample once -------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Job:
    """What each process gets."""

    dataset: Any
    metrics: tuple[Metric, ...]
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    sample_indices: Sequence[int] | None
    folder: Path

    def batches(self, start: int, stop: int) -> Iterator[tuple[range, Any]]:
        """The places of the samples of each batch, and the batch."""
        fetch = getattr(self.dataset, "__getitems__", None)  # as torch's loader
        for first in range(start, stop, self.batch_size):
            places = range(first, min(first + self.batch_size, stop))
            samples = fetch(list(places)) if fetch else [self.dataset[at] for at in places]
            yield places, samples if self.collate_fn is None else self.collate_fn(samples)


@final
class _Runs:
    """The values of a metric of a part of the samples: in their order, and as sorted runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lengths: list[int] = []
        self.least, self.most = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        self._pending: list[Ints] = []
        self._numbers: list[Ints] = []
        self._num_pending = 0

    def add(self, values: Ints, numbers: Ints) -> None:
        """The values of samples, and their numbers [samples]."""
        self._pending.append(values)
        self._numbers.append(numbers)
        self._num_pending += len(values)
        if self._num_pending >= RUN_NUMEL:
            self.flush()

    def flush(self) -> None:
        """Write a run of what was added."""
        if not self._num_pending:
            return
        values, numbers = np.concatenate(self._pending), np.concatenate(self._numbers)
        self._pending, self._numbers, self._num_pending = [], [], 0
        least, most = int(values.min()), int(values.max())
        self.least, self.most = min(self.least, least), max(self.most, most)
        # numpy sorts 16 bits in linear time
        keys = (values - least).astype(np.uint16) if most - least < 1 << 16 else values
        order = np.argsort(keys, kind="stable")
        self.lengths.append(len(values))
        for name, written in zip(_FILES, (values, values[order], numbers[order]), strict=True):
            with open(f"{self._path}.{name}", "ab") as file:
                written.tofile(file)

    def file(self, name: str) -> Ints:
        return np.memmap(f"{self._path}.{name}", np.int64, "r").view(np.ndarray)

    def runs(self) -> Iterator[tuple[Ints, Ints]]:
        """The sorted values of each run, and the numbers of their samples."""
        values, numbers, start = self.file("sorted"), self.file("numbers"), 0
        for length in self.lengths:
            yield values[start : start + length], numbers[start : start + length]
            start += length


_FILES = ("values", "sorted", "numbers")


def _mapped(job: _Job, total: int, num_workers: int) -> list[list[Any]]:
    """For each part of the samples, in order, and each metric: its runs, or its sum."""
    bounds = np.linspace(0, total, min(num_workers, total) + 1, dtype=int).tolist()
    parts = list(zip(bounds, bounds[1:], strict=False))
    if len(parts) == 1:
        return [_map(job, 0, total)]
    try:
        pickled = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"num_workers = {num_workers}: the dataset and the functions are pickled, which failed "
            f"({printable(error)}); define them in a module, or use 1 process"
        ) from None
    # fork would copy threads of numpy and torch in the middle of their work
    with ProcessPoolExecutor(len(parts), get_context("spawn")) as pool:
        tasks = [pool.submit(_map_pickled, pickled, *part) for part in parts]
        try:
            return [task.result() for task in tasks]
        except BrokenProcessPool:
            raise UsageError(
                f"num_workers = {num_workers}: a process ended early; call analyze in a script below "
                '`if __name__ == "__main__":`, and see its memory'
            ) from None


def _map_pickled(pickled: bytes, start: int, stop: int) -> list[Any]:
    return _map(pickle.loads(pickled), start, stop)


def _map(job: _Job, start: int, stop: int) -> list[Any]:
    """For each metric: the runs of the samples from `start` up to `stop`, or the sum over them."""
    found: list[Any] = [
        None if metric.is_sum else _Runs(job.folder / f"{at}-{start}")
        for at, metric in enumerate(job.metrics)
    ]
    for places, batch in job.batches(start, stop):
        if job.sample_indices is None:
            numbers = np.arange(places.start, places.stop)
        else:
            numbers = np.asarray(job.sample_indices[places.start : places.stop], np.int64)
        for at, metric in enumerate(job.metrics):
            values = _whole_numbers(metric, metric.function(batch))
            if metric.is_sum:
                found[at] = (
                    values.copy() if found[at] is None else _sum(metric.name, found[at], values)
                )
            else:
                if values.size != len(places):
                    raise UsageError(
                        f"the metric {quoted(metric.name)} gave {values.size} values for a batch of "
                        f"{len(places)} samples: it must give one for each"
                    )
                found[at].add(values, numbers)
    for one in found:
        if isinstance(one, _Runs):
            one.flush()
    return found


def _whole_numbers(metric: Metric, given: Any) -> Ints:
    values = np.asarray(given).reshape(-1)
    is_whole = values.dtype.kind in "iub"
    if not is_whole or (values.dtype == np.uint64 and values.size and values.max() >= 1 << 63):
        raise UsageError(
            f"the metric {quoted(metric.name)} gave values of {values.dtype}: it must give whole numbers of at "
            "most 63 bits; scale and round fractions"
        )
    return values.astype(np.int64, copy=False)


def _sum(name: str, sum_: Ints, values: Ints) -> Ints:
    if sum_.shape != values.shape:
        raise UsageError(
            f"the metric {quoted(name)} gave arrays of {sum_.size} and of {values.size} values: their "
            "sum needs one length"
        )
    sum_ += values
    return sum_


# -- reduce: the files of a metric ------------------------------------------------------------------------


def _reduce(parts: Sequence[_Runs], folder: Path, total: int) -> Analyzed:
    """Write the files of a metric with a value for each sample."""
    least, most = min(part.least for part in parts), max(part.most for part in parts)
    value_dtype, number_dtype = smallest_dtype(least, most), smallest_dtype(0, total - 1)
    path = folder / folder.name
    with IndexedWriter(f"{path}_sample_to_metric", value_dtype) as writer:
        for part in parts:
            for values in _chunks(part.file("values")):
                writer.add_rows(values, np.ones(len(values), np.int64))
        _end_merged(writer)
    with (
        IndexedWriter(f"{path}_index_to_metric", value_dtype) as metric_writer,
        IndexedWriter(f"{path}_index_to_sample", number_dtype) as sample_writer,
    ):
        for values, counts in _counted(
            _merged([r for part in parts for r in part.runs()]), sample_writer
        ):
            sample_writer.close_rows(counts)
            metric_writer.add_rows(values, np.ones(len(values), np.int64))
        _end_merged(metric_writer)
        _end_merged(sample_writer)
    samples = IndexedDataset(f"{path}_index_to_sample")
    _write_percentiles(samples, f"{path}_index_to_sample_percentile_merged")
    return Analyzed(folder, least, most, len(samples))


def _reduce_sum(sums: Sequence[Ints], folder: Path) -> Analyzed:
    """Write the file of a metric that is summed over the samples."""
    sum_ = sums[0]
    for one in sums[1:]:
        sum_ = _sum(folder.name, sum_, one)
    if not sum_.size:
        raise UsageError(f"the metric {quoted(folder.name)} gave arrays without values")
    least, most = int(sum_.min()), int(sum_.max())
    with IndexedWriter(folder / f"{folder.name}_metric_value", smallest_dtype(least, most)) as file:
        file.add(sum_)
        file.end_document()
    return Analyzed(folder, least, most, len(np.unique(sum_)))


def _end_merged(writer: IndexedWriter) -> None:
    """DeepSpeed merges these files from parts, and ends a document in the part and in the whole."""
    writer.end_document()
    writer.end_document()


def _chunks(values: Ints) -> Iterator[Ints]:
    return (values[at : at + RUN_NUMEL] for at in range(0, len(values), RUN_NUMEL))


def _merged(runs: Sequence[tuple[Ints, Ints]]) -> Iterator[tuple[Ints, Ints]]:
    """The values of all runs in ascending order, in pieces, and their samples; of equal values by run.

    Of each run a block is considered. Up to the smallest of the blocks' last values nothing can follow from the
    rest of the runs but equal values, which are passed on run by run.
    """
    block = max(1, MERGE_NUMEL // len(runs))
    places = [0] * len(runs)
    while left := [at for at, (values, _) in enumerate(runs) if places[at] < len(values)]:
        blocks = {at: runs[at][0][places[at] : places[at] + block] for at in left}
        last = min(int(values[-1]) for values in blocks.values())
        below = {at: int(np.searchsorted(values, last, "left")) for at, values in blocks.items()}
        values = np.concatenate([blocks[at][: below[at]] for at in left])
        numbers = np.concatenate([runs[at][1][places[at] : places[at] + below[at]] for at in left])
        order = np.argsort(values, kind="stable")
        yield values[order], numbers[order]
        for at in left:
            values, numbers = runs[at]
            start = places[at] + below[at]
            places[at] = start + int(np.searchsorted(values[start:], last, "right"))
            for first in range(start, places[at], RUN_NUMEL):
                piece = slice(first, min(first + RUN_NUMEL, places[at]))
                yield values[piece], numbers[piece]


def _counted(
    pieces: Iterator[tuple[Ints, Ints]], writer: IndexedWriter
) -> Iterator[tuple[Ints, Ints]]:
    """The different values, ascending, and how many samples have each; their samples go to `writer` before."""
    empty = np.empty(0, np.int64)
    last, count = empty, empty  # the value that may go on in the next piece
    for values, numbers in pieces:
        if not len(values):
            continue
        writer.append(numbers)
        starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
        found, counts = values[starts], np.diff(starts, append=len(values))
        if len(last) and last[0] == found[0]:
            counts[0] += count[0]
        else:
            found, counts = np.concatenate([last, found]), np.concatenate([count, counts])
        last, count = found[-1:], counts[-1:]
        yield found[:-1], counts[:-1]
    yield last, count


def _write_percentiles(samples: IndexedDataset, path: str) -> None:
    """The same samples in fewer rows: at most 199, as DeepSpeed."""
    step = max(1, len(samples) // PERCENTILES)
    with IndexedWriter(path, samples.dtype) as writer:
        for start in range(0, len(samples), step):
            lengths = samples.lengths[start : start + step]
            for values in _chunks(samples.flat(start, start + len(lengths))):
                writer.append(values)
            writer.close_rows(lengths.sum(dtype=np.int64, keepdims=True))
        writer.end_document()


# -- the usual metrics of tokens --------------------------------------------------------------------------


def token_counts(dataset: IndexedDataset, pad_id: int | None = None) -> Ints:
    """How often each token is in the dataset [largest token + 1]; 0 for padding.

    Raises UsageError where a value is no token of any vocabulary.
    """
    counts = np.zeros(0, np.int64)
    # rows by their numbers of values, so that long rows do not fill the memory
    start = 0
    while start < len(dataset):
        ends = np.cumsum(dataset.lengths[start : start + RUN_NUMEL], dtype=np.int64)
        stop = start + max(1, int(np.searchsorted(ends, MERGE_NUMEL, "right")))
        flat = dataset.flat(start, stop)
        if flat.dtype.kind not in "iu" or (len(flat) and flat.min() < 0):
            raise UsageError(f"{printable(dataset.path)}: tokens must be whole numbers from 0 on")
        if len(flat) and flat.max() >= MOST_TOKENS:
            raise UsageError(
                f"{printable(dataset.path)}: {flat.max()} is no token, which must be below {MOST_TOKENS}; if "
                f"the file has no {flat.dtype.name}, name the table of its dtype codes"
            )
        more = np.bincount(flat.astype(np.int64, copy=False), minlength=len(counts))
        more[: len(counts)] += counts
        counts, start = more, stop
    if pad_id is not None and pad_id < len(counts):
        counts[pad_id] = 0
    return counts


@final
@dataclass(frozen=True)
class SequenceLength:
    """The function of a metric: how many tokens a sample has that are no padding."""

    pad_id: int | None = None

    def __call__(self, samples: Sequence[Any]) -> Ints:
        lengths = np.fromiter(map(len, samples), np.int64, len(samples))
        if self.pad_id is None:
            return lengths
        return _row_sums(np.concatenate(samples) != self.pad_id, lengths).astype(np.int64)


@final
class VocabularyRarity:
    """The function of a metric: the sum of -log p(token) over the tokens of a sample, rounded.

    p is the share of the token among all tokens of the dataset. Padding, and tokens that were not counted, add
    nothing.
    """

    def __init__(self, counts: Ints) -> None:
        """counts: of each token in the dataset, as `token_counts` returns."""
        self._costs = np.zeros(len(counts))
        seen = counts > 0
        if seen.any():
            self._costs[seen] = np.log(counts.sum()) - np.log(counts[seen])

    def __call__(self, samples: Sequence[Any]) -> Ints:
        lengths = np.fromiter(map(len, samples), np.int64, len(samples))
        costs = self._costs[np.concatenate(samples)]
        return np.rint(_row_sums(costs, lengths)).astype(np.int64)


def _row_sums(flat: NDArray[Any], lengths: Ints) -> NDArray[np.float64]:
    """The sums of rows that stand one after another; 0 for rows without values."""
    sums = np.zeros(len(lengths))
    is_full = lengths > 0
    if is_full.any():
        starts = (np.cumsum(lengths) - lengths)[is_full]
        sums[is_full] = np.add.reduceat(flat.astype(np.float64), starts)
    return sums


__all__ = ["Analyzed", "Metric", "SequenceLength", "VocabularyRarity", "analyze", "token_counts"]
