"""Which samples a step takes under a curriculum: a function of the config, the seed and the step.

    difficulty of a step ──metric's files──> how many of the samples, in ascending order, are selected

    samples by difficulty   [ cluster 0 | cluster 1 | cluster 2 |      not yet selected      ]
    the samples of a step     a cluster is drawn for each, by size; a cluster gives its samples in an order that
                              is new each time it begins again

Keys and meaning are those of DeepSpeed 0.19. Clusters are parts of the analyzer's memory-mapped files, so none
are written. Orders are computed for single samples, so a cluster of any size takes no memory. Where several
metrics select samples, those that all of them select come in an array.

DeepSpeed's defects are left out: a resumed run goes on with the samples that an uninterrupted one takes; a
cluster that is smaller than a step begins again as often as needed; no batch comes after the last one; a
difficulty that falls and rises again adds no sample twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...utils.quoting import printable, quoted
from .config import CURRICULUM, CurriculumMetric
from .indexed import IndexedDataset
from .loaders import RankLoader, Resumable
from .schedules import Curriculum as Schedule
from .schedules import curriculum

Ints = NDArray[np.int64]
CHUNK_ROWS = 1 << 20
NUM_ROUNDS = 8
NO_CURRICULUM = (
    "the engine has no loader with a curriculum: set data_efficiency.data_sampling.curriculum_learning in the "
    "config, and pass training_data to xds.initialize"
)


# -- an order of the samples of a cluster, one place at a time ----------------------------------------------


def shuffled(places: Ints, sizes: Ints, keys: NDArray[np.uint64]) -> Ints:
    """Where each place of an order is found: for one size and key a permutation of 0 to size - 1.

    A Feistel network over the next power of 4, whose results are put in again until they are below the size
    (Black and Rogaway 2002, "cycle walking").

    Shapes:  all [n]; 0 <= places < sizes.
    """
    bits = np.frexp(sizes.astype(np.float64))[1].astype(np.uint64)  # 2 ** bits > size
    half = np.maximum((bits + np.uint64(1)) // np.uint64(2), np.uint64(1))
    mask = (np.uint64(1) << half) - np.uint64(1)
    found = places.astype(np.uint64)
    open_ = np.arange(len(places))  # those whose result is not below the size
    while len(open_):
        left, right = found[open_] >> half[open_], found[open_] & mask[open_]
        for number in range(NUM_ROUNDS):
            mixed = _mixed(right + (keys[open_] ^ _mixed(np.uint64(number))))
            left, right = right, left ^ (mixed & mask[open_])
        found[open_] = (left << half[open_]) | right
        open_ = open_[found[open_] >= sizes[open_].astype(np.uint64)]
    return found.astype(np.int64)


def _mixed(numbers: Any) -> Any:
    """The mixing of splitmix64 (Steele et al. 2014): each bit depends on all."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(numbers, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


# -- what one metric selects --------------------------------------------------------------------------------


@final
class SortedSamples:
    """The samples in ascending order of a metric, and how many of them a difficulty selects."""

    def __init__(self, name: str, metric: CurriculumMetric, num_samples: int) -> None:
        """Reads the files of the metric.

        Raises:
            UsageError: they do not fit one another, or a data set of `num_samples`.
        """
        key = f"{CURRICULUM}.curriculum_metrics.{name}"
        rows = IndexedDataset(metric.index_to_sample_path)
        self._is_percentile = metric.difficulty_type == "percentile"
        self._num_parts = metric.max_difficulty
        self.samples = rows.flat(0, len(rows))
        where = f"{key}.index_to_sample_path = {printable(metric.index_to_sample_path)}"
        if len(self.samples) != num_samples:
            raise UsageError(
                f"{where} has {len(self.samples)} samples, and training_data has {num_samples}: analyze this "
                "data set, as docs/data.md says"
            )
        for start in range(0, len(self.samples), CHUNK_ROWS):
            part = self.samples[start : start + CHUNK_ROWS]
            if part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= num_samples:
                raise UsageError(
                    f"{where} has values that are no samples of 0 to {num_samples - 1}: name the file "
                    "NAME_index_to_sample of the analyzer"
                )
        if self._is_percentile:
            if num_samples < self._num_parts and metric.min_difficulty < self._num_parts:
                raise UsageError(
                    f"{key}.max_difficulty = {self._num_parts}: training_data has {num_samples} samples, too "
                    f"few for so many equal parts; lower it to at most {num_samples}"
                )
            return
        metrics = IndexedDataset(metric.index_to_metric_path)
        self._values = metrics.flat(0, len(metrics))
        where = f"{key}.index_to_metric_path = {printable(metric.index_to_metric_path)}"
        if len(self._values) != len(rows) or len(metrics) != len(rows):
            raise UsageError(
                f"{where} has {len(metrics)} rows, and index_to_sample_path has {len(rows)}: both must be of "
                'one metric, and for difficulty_type = "value" not the percentiles'
            )
        if (self._values[1:] <= self._values[:-1]).any():
            raise UsageError(
                f"{where}: its values do not ascend, as those of the analyzer do: name NAME_index_to_metric"
            )
        self._ends = np.cumsum(rows.lengths, dtype=np.int64)

    def count(self, difficulty: Any) -> int:
        """How many of the samples, from the first one on, `difficulty` selects."""
        if not self._is_percentile:
            row = int(np.searchsorted(self._values, difficulty, "right"))
            return int(self._ends[row - 1]) if row else 0
        if difficulty >= self._num_parts:
            return len(self.samples)
        return max(0, int(len(self.samples) // self._num_parts * difficulty))


@final
class CommonSamples:
    """The samples that all metrics select, in the order in which they were selected."""

    def __init__(self, metrics: Sequence[SortedSamples], num_samples: int) -> None:
        self._metrics = metrics
        self._num_samples = num_samples
        self.start()

    def start(self) -> None:
        """Nothing is selected."""
        self._counts = [0] * len(self._metrics)
        self._num_common = 0
        self.samples: Any = None  # None: sample i is at place i
        if len(self._metrics) == 1:
            self.samples = self._metrics[0].samples
        elif self._metrics:
            self._num_selecting = np.zeros(
                self._num_samples, np.min_scalar_type(len(self._metrics))
            )
            self.samples = np.empty(self._num_samples, np.min_scalar_type(self._num_samples))

    def extend(self, difficulties: Sequence[Any]) -> int:
        """Select what the difficulties of the metrics select; how many samples all have selected so far."""
        if not self._metrics:
            return self._num_samples
        before = self._counts
        found = [one.count(value) for one, value in zip(self._metrics, difficulties, strict=True)]
        self._counts = [max(pair) for pair in zip(before, found, strict=True)]
        if len(self._metrics) == 1:
            return self._counts[0]
        for metric, start, stop in zip(self._metrics, before, self._counts, strict=True):
            for first in range(start, stop, CHUNK_ROWS):
                new = metric.samples[first : min(first + CHUNK_ROWS, stop)]
                self._num_selecting[new] += 1
                common = new[self._num_selecting[new] == len(self._metrics)]
                self.samples[self._num_common : self._num_common + len(common)] = common
                self._num_common += len(common)
        return self._num_common


# -- the samples of each step -------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Step:
    """The samples of a step [batch_size], and by metric its difficulty."""

    number: int
    samples: Ints
    difficulties: Mapping[str, Any]
    # of each cluster: how many of its samples were taken, also in other orders
    positions: tuple[int, ...]


@final
class Selection:
    """The samples of each step, one step after another, from any step on."""

    def __init__(
        self,
        metrics: Mapping[str, CurriculumMetric],
        num_samples: int,
        batch_size: int,
        seed: int,
    ) -> None:
        """
        Raises:
            UsageError: the files of the metrics do not fit, or too few samples are selected in the first step.
        """
        self._metrics = metrics
        self._schedules: dict[str, Schedule | None] = {
            name: None if metric.schedule_type == "custom" else curriculum(metric.schedule())
            for name, metric in metrics.items()
        }
        self._selecting = [name for name, metric in metrics.items() if metric.selects]
        found = [SortedSamples(name, metrics[name], num_samples) for name in self._selecting]
        self._common = CommonSamples(found, num_samples)
        self.batch_size, self._seed = batch_size, seed
        self._is_checked = False
        self._start()
        if None not in self._schedules.values():
            self._check_first()

    def set_custom(
        self, functions: Mapping[str, Callable[[int], Any]] | Callable[[int], Any]
    ) -> None:
        """The functions of the step of metrics with the schedule "custom"; other metrics keep theirs.

        Raises:
            UsageError: a metric is unknown, or too few samples are selected in the first step.
        """
        if not isinstance(functions, Mapping):
            raise UsageError(
                "set_custom_curriculum_learning_schedule: needs a dict of the metric's name and a function of "
                "the step"
            )
        for name, function in functions.items():
            if name not in self._metrics:
                names = ", ".join(map(quoted, self._metrics))
                raise UsageError(
                    f"set_custom_curriculum_learning_schedule: there is no metric {quoted(name)}; the config "
                    f"has {names}"
                )
            if not callable(function):
                raise wrong(f"schedule of {name}", function, "a function of the step")
            if self._metrics[name].schedule_type != "custom":
                raise UsageError(
                    f"set_custom_curriculum_learning_schedule: the metric {quoted(name)} has schedule_type = "
                    f'"{self._metrics[name].schedule_type}" in the config; set it to "custom"'
                )
            self._schedules[name] = curriculum(self._metrics[name].schedule(), function)
        self._is_checked = False
        self._start()
        if None not in self._schedules.values():
            self._check_first()

    def _check_first(self) -> None:
        """The first step takes no sample twice. Raises UsageError otherwise."""
        self._start()
        self._advance()
        selected, difficulties = sum(self._sizes), dict(self._difficulties)
        self._start()
        if selected < self.batch_size:
            values = ", ".join(f"{name} {value}" for name, value in difficulties.items())
            what = f"only {selected} samples" if selected else "no sample"
            raise UsageError(
                f"{CURRICULUM}: the difficulties of step 1 ({values}) select {what}, fewer than "
                f"train_batch_size = {self.batch_size}; raise min_difficulty, or lower train_batch_size"
            )
        self._is_checked = True

    def at(self, number: int) -> Step:
        """The step `number`, from 0. It costs the steps between that of the last call and it.

        Raises:
            UsageError: a custom schedule has no function yet, or selects too few samples in the first step.
        """
        if not self._is_checked:
            self._check_first()
        if number < self._number:
            self._start()
        while self._number < number:
            self._advance()
            self._positions += self._counts
        positions = self._advance()
        places = np.repeat(positions, self._counts) + _counted(self._counts)
        self._positions += self._counts
        return Step(
            number, self._samples_at(places), dict(self._difficulties), tuple(positions.tolist())
        )

    def _start(self) -> None:
        """Before step 0."""
        self._number = 0
        self._difficulties = {name: one.min_difficulty for name, one in self._metrics.items()}
        self._common.start()
        self._sizes: list[int] = []  # of the clusters
        self._positions = self._counts = np.zeros(0, np.int64)
        self._draw = np.random.default_rng([self._seed, 0])
        self._is_new = True

    def _advance(self) -> Ints:
        """Draw how many samples of each cluster step `_number` takes. Returns the positions before it."""
        number = self._number = self._number + 1  # DeepSpeed's schedules begin with step 1
        for name, metric in self._metrics.items():
            current = self._difficulties[name]
            if current >= metric.max_difficulty:
                continue
            schedule = self._schedules[name]
            if schedule is None:
                raise UsageError(
                    f"{CURRICULUM}.curriculum_metrics.{name}.schedule_type is custom: call engine."
                    f"set_custom_curriculum_learning_schedule({{{name!r}: function}}) before the first step"
                )
            self._difficulties[name] = schedule.at(number)
            self._is_new |= self._difficulties[name] != current
        if self._is_new:
            selected = self._common.extend([self._difficulties[one] for one in self._selecting])
            if selected > sum(self._sizes):
                self._sizes.append(selected - sum(self._sizes))
                self._positions = np.append(self._positions, 0)
            self._is_new = False
        sizes = np.asarray(self._sizes, np.float64)
        if len(sizes):
            self._counts = self._draw.multinomial(self.batch_size, sizes / sizes.sum())
        before: Ints = self._positions.copy()
        return before

    def _samples_at(self, positions: Ints) -> Ints:
        """The samples [batch_size] at these positions of the clusters from which they are drawn, shuffled."""
        sizes = np.asarray(self._sizes, np.int64)
        clusters = np.repeat(np.arange(len(sizes)), self._counts)
        rounds, places = np.divmod(positions, sizes[clusters])
        keys = _mixed(_mixed(np.uint64(self._seed)) ^ clusters.astype(np.uint64))
        keys = _mixed(keys ^ rounds.astype(np.uint64))
        starts = np.cumsum(sizes) - sizes
        found = starts[clusters] + shuffled(places, sizes[clusters], keys)
        if self._common.samples is not None:
            found = self._common.samples[found].astype(np.int64)
        order: Ints = np.random.default_rng([self._seed, self._number]).permutation(found)
        return order


def _counted(counts: Ints) -> Ints:
    """0 up to each of the counts, one after another."""
    found: Ints = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return found


# -- a rank's part, and its loader --------------------------------------------------------------------------


@final
class CurriculumSampler(Sampler[int], Resumable):
    """This rank's samples. A position is a step, and the samples of it that all ranks have received.

    A step's samples are cut into micro-batches of all ranks, and each of these into the parts of the ranks. An
    iteration that is left begins again where it was.
    """

    def __init__(
        self,
        selection: Selection,
        num_steps: int,
        *,
        rank: int,
        world_size: int,
        micro_batch_size: int,
    ) -> None:
        """`num_steps`: of one iteration."""
        self.selection = selection
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        self._rank, self._world_size, self._micro = rank, world_size, micro_batch_size
        self._current = self._next = {"step": 0, "step_samples": 0}
        self.num_steps, self.batch_size = num_steps, selection.batch_size
        # those that workers may have been told of, and the loader gives later
        self._seen: dict[int, Step] = {}

    def __iter__(self) -> Iterator[int]:
        first, skip = self._current["step"], self._current["step_samples"]
        end = (first // self.num_steps + 1) * self.num_steps
        everyone = self._micro * self._world_size
        for number in range(first, end):
            step = self._step(number)
            for start in range(skip if number == first else 0, self.batch_size, everyone):
                own = start + self._rank * self._micro
                yield from step.samples[own : own + self._micro].tolist()

    def __len__(self) -> int:
        return self.num_steps * self.batch_size // self._world_size

    def start(self) -> dict[str, int]:
        return dict(self._next)

    def begin(self) -> dict[str, int]:
        self._current = self.start()
        return self.start()

    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        samples = start["step_samples"] + num_items * self._world_size
        step, rest = divmod(samples, self.batch_size)
        return {"step": start["step"] + step, "step_samples": rest}

    def epoch_of(self, position: Mapping[str, int]) -> int:
        return position["step"] // self.num_steps

    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        """Of a step that was cut in another way, the micro-batches of all ranks that are whole are skipped."""
        rest = min(position["step_samples"], self.batch_size)
        rest -= rest % (self._micro * self._world_size)
        self._next = self.after({"step": position["step"], "step_samples": rest}, 0)

    def given(self, batch: Any, start: Mapping[str, int], end: Mapping[str, int]) -> Any:
        """The batch from `start` to `end` is given to the script: as the post-process function returns it."""
        self._next = dict(end)
        for number in [number for number in self._seen if number < start["step"]]:
            del self._seen[number]
        if self.post_process is None:
            return batch
        return self.post_process(batch, self._state(start, end))

    def _step(self, number: int) -> Step:
        step = self.selection.at(number)
        self._seen[number] = step
        return step

    def _state(self, start: Mapping[str, int], end: Mapping[str, int]) -> dict[str, Any]:
        """The keys of the state of DeepSpeed's sampler, of this batch also where workers have read ahead.

        `batch` has what is left of the step. There are no cluster files and no state of a generator.
        """
        number = start["step"]
        step = self._seen[number] if number in self._seen else self._step(number)
        left = step.samples[end["step_samples"] :] if end["step"] == number else step.samples[:0]
        return {
            "batch": left.tolist(),
            "consumed_samples": number * self.batch_size + start["step_samples"],
            "curriculum_step": number + 1,
            "current_difficulties": dict(step.difficulties),
            "data_cluster_paths": [],
            "data_cluster_current_position": list(step.positions),
        }

    # -- for a run that recovers ------------------------------------------------------------------------

    def position(self, epoch: int, items: int) -> dict[str, int]:
        step, rest = divmod(items, self.batch_size)
        return {"step": epoch * self.num_steps + step, "step_samples": rest}

    def place(self, position: Mapping[str, int]) -> tuple[int, int]:
        epoch, step = divmod(position["step"], self.num_steps)
        return epoch, step * self.batch_size + position["step_samples"]

    def steps(self, epoch: int, first: int) -> Iterator[list[int]]:
        """The samples of each step, item i of data rank i % world_size."""
        parts = -1, self._world_size, self._micro
        for number in range(epoch * self.num_steps + first, (epoch + 1) * self.num_steps):
            yield self._step(number).samples.reshape(parts).swapaxes(1, 2).reshape(-1).tolist()


def curriculum_loader(  # noqa: PLR0913 (a rank and the arguments of a DataLoader)
    dataset: Any,
    metrics: Mapping[str, CurriculumMetric],
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    step_samples: int,
    num_epochs: int,
    seed: int,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    recovers: bool = False,
) -> DataLoader[Any]:
    """This data-parallel rank's loader over `dataset`, sampled by a curriculum.

    Each step takes the same samples in the same order at any number of ranks. An iteration over the loader
    gives num_epochs times as many samples as the data set has, in whole steps.

    Args:
        step_samples: of a step over all ranks: a multiple of micro_batch_size x world_size.
        recovers: the run goes on when other ranks are lost.

    Raises:
        UsageError: the data set has no length, the files of a metric do not fit it, or too few samples are
            selected in the first step.
    """
    is_indexed = all(hasattr(dataset, name) for name in ("__len__", "__getitem__"))
    if not is_indexed or isinstance(dataset, IterableDataset):
        raise UsageError(
            f"{CURRICULUM}: training_data is a {type(dataset).__name__}, and a curriculum takes samples by "
            "their numbers: pass a data set with __len__ and __getitem__"
        )
    total = len(dataset) * num_epochs
    order = CurriculumSampler(
        Selection(metrics, len(dataset), step_samples, seed),
        max(1, total // step_samples if drop_last else -(-total // step_samples)),
        rank=rank,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
    )
    sampler: Any = order
    if recovers:
        from .step_sampler import StepSampler

        sizes = (world_size, step_samples // (world_size * micro_batch_size), micro_batch_size)
        sampler = StepSampler(order, rank, sizes)
    own_seed = seed * world_size + rank
    return RankLoader(
        sampler,
        own_seed,
        dataset=dataset,
        sampler=sampler,
        batch_size=micro_batch_size,
        collate_fn=collate_fn,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(own_seed),
    )


def sampler_of(loader: Any) -> CurriculumSampler:
    """The sampler of a loader with a curriculum.

    Raises:
        UsageError: it has none.
    """
    order = loader.order if isinstance(loader, RankLoader) else None
    if not isinstance(order, CurriculumSampler):
        raise UsageError(NO_CURRICULUM)
    return order


__all__ = [
    *("CommonSamples", "CurriculumSampler", "Selection", "SortedSamples", "Step"),
    *("curriculum_loader", "sampler_of", "shuffled"),
]
