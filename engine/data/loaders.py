"""Data loaders that give each rank its own part of a dataset and can resume at a position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from ...ops.device import present
from ...utils.errors import UsageError
from .batches import not_pinned, pinned, pinned_by_torch

SEED_STEP = 0x9E3779B1  # torch's generator uses the low 32 bits; neighbouring ranks stay apart for all epochs


class Resumable(ABC):
    """A source of samples that knows at which position of the dataset each iteration begins.

    A position consists of numbers that have the same meaning at any number of ranks.
    """

    @abstractmethod
    def start(self) -> dict[str, int]:
        """The position at which the next iteration begins."""

    @abstractmethod
    def begin(self) -> dict[str, int]:
        """Begin an iteration and return its position; `start` then belongs to the following iteration."""

    @abstractmethod
    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        """The position after this rank has received `num_items` of an iteration that began at `start`."""

    @abstractmethod
    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        """Begin the next iteration at `position`; skip it if it would give fewer than `min_items`."""

    def epoch_of(self, position: Mapping[str, int]) -> int | None:
        """The number of the iteration that `position` is in; None: positions do not tell."""
        return position.get("epoch")

    def take(self) -> bool:
        """The next batch has come from the loader. False: it was read ahead, and is not wanted any more."""
        return True

    def goes_on(self) -> bool:
        """The loader has read all of the iteration, which has more because it went back meanwhile."""
        return False

    def given(self, batch: Any, start: Mapping[str, int], end: Mapping[str, int]) -> Any:
        """What the script gets for a batch of the samples between two positions."""
        return batch


@final
class EpochSampler(Sampler[int], Resumable):
    """This rank's indices, shuffled anew for each iteration.

    DistributedSampler repeats its first order unless the script calls `set_epoch`. Every rank gets
    ceil(len / world_size) indices, with the first indices repeated to fill up; floor(len / world_size) with
    `drop_last`. With `step_samples`, a multiple of the ranks, an epoch is a whole number of steps instead.
    The samples of each step are then the same at any number of ranks.
    """

    def __init__(self, inner: DistributedSampler[int], step_samples: int = 0) -> None:
        self._inner = inner
        self._step_samples = step_samples or inner.num_replicas
        self.epoch = 0
        self._skip = 0  # samples of the next iteration's epoch that were used before
        self._indices: list[int] | None = None  # of the iteration that has begun

    def __iter__(self) -> Iterator[int]:
        if self._indices is None:
            self.begin()
        assert self._indices is not None
        indices, self._indices = self._indices, None
        return iter(indices)

    def _rest(self, epoch: int, skip: int) -> list[int]:
        """This rank's part of an epoch's samples after its first `skip` samples."""
        world_size = self._inner.num_replicas
        self._inner.set_epoch(epoch)
        if not skip and self._step_samples == world_size:
            return list(self._inner)
        everybody = self._order(epoch)
        rest = everybody[skip:]
        if self._inner.drop_last:
            rest = rest[: len(rest) // self._step_samples * self._step_samples]
        else:
            rest += islice(cycle(everybody), -len(rest) % self._step_samples)
        return rest[self._inner.rank :: world_size]

    def _order(self, epoch: int) -> list[int]:
        """The order of the whole epoch, as DistributedSampler defines it."""
        single = DistributedSampler[int](
            self._inner.dataset,
            num_replicas=1,
            rank=0,
            shuffle=self._inner.shuffle,
            seed=self._inner.seed,
        )
        single.set_epoch(epoch)
        return list(single)

    def __len__(self) -> int:
        """The number of this rank's indices in a whole epoch."""
        num_items = len(self._inner.dataset)  # type: ignore[arg-type]
        spare = 0 if self._inner.drop_last else self._step_samples - 1
        steps = (num_items + spare) // self._step_samples
        return steps * (self._step_samples // self._inner.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` for the next iteration, from its beginning."""
        self.epoch, self._skip = epoch, 0

    def start(self) -> dict[str, int]:
        return {"epoch": self.epoch, "samples": self._skip}

    def begin(self) -> dict[str, int]:
        here = self.start()
        self._indices = self._rest(self.epoch, self._skip)
        self.set_epoch(self.epoch + 1)
        return here

    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        """Repeated samples that fill up the last step count too: a resumed run then begins the next epoch."""
        samples = start["samples"] + num_items * self._inner.num_replicas
        return {"epoch": start["epoch"], "samples": samples}

    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        epoch, skip = position["epoch"], position["samples"]
        if len(self._rest(epoch, skip)) < min_items:
            epoch, skip = epoch + 1, 0
        self.epoch, self._skip = epoch, skip


@final
class RankSlice(IterableDataset[Any], Resumable):
    """This rank's part of a stream: item i goes to rank i % world_size.

        stream      0 1 2 3 | 4 5 6 7 | 8 9          4 ranks: two whole rounds, 8 and 9 are dropped
        rank 1        1         5

    Every rank reads the whole stream and keeps its part. An incomplete last round is dropped, so all ranks
    get the same number of items. Loader workers take micro-batches in turn, so the order does not depend on
    their number. The order is that of the stream: there is no shuffling.
    """

    def __init__(
        self, stream: Iterable[Any], rank: int, world_size: int, micro_batch_size: int
    ) -> None:
        self._stream = stream
        self._rank = rank
        self._world_size = world_size
        self._micro_batch_size = micro_batch_size
        self._skip = self._current = 0  # items before the next pass, and before this one

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self._part(self._current, worker_id, num_workers)

    def _part(self, skip: int, worker_id: int, num_workers: int) -> Iterator[Any]:
        items = islice(self._stream, skip, None)
        number = 0
        while len(whole_round := list(islice(items, self._world_size))) == self._world_size:
            if number // self._micro_batch_size % num_workers == worker_id:
                yield whole_round[self._rank]
            number += 1

    def start(self) -> dict[str, int]:
        return {"items": self._skip}

    def begin(self) -> dict[str, int]:
        here = self.start()
        self._current, self._skip = self._skip, 0
        return here

    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        return {"items": start["items"] + num_items * self._world_size}

    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        """The stream is read again from its start, and the items before `position` are dropped."""
        self._skip = position["items"]


@final
class InOrder(Dataset[Any]):
    """A map-style dataset that `build_loader` does not shuffle."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        if hasattr(inner, "lengths"):
            self.lengths = inner.lengths  # of its samples, in tokens

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, at: int) -> Any:
        return self.inner[at]


@final
class RankLoader(DataLoader[Any]):
    """A DataLoader that counts the batches it has returned, however far its workers have read ahead."""

    def __init__(self, source: Resumable, seed: int, *, num_workers: int, **options: Any) -> None:
        """Batches come in pinned memory where there is a GPU. With workers a thread of torch pins them."""
        pins = present().pins_memory
        by_torch = pins and num_workers > 0
        super().__init__(num_workers=num_workers, pin_memory=by_torch, **options)
        self._ready = pinned_by_torch if by_torch else pinned if pins else not_pinned
        self._source = source
        self._seed = seed
        self._position = source.start()
        self.around: Callable[[Iterator[Any]], Iterator[Any]] = iter

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = self._position = self._source.begin()
        epoch = self._source.epoch_of(start)
        if epoch is not None and self.generator is not None:
            # workers get their seeds from it: an epoch's seeds are the same in a resumed run
            self.generator.manual_seed(self._seed + epoch * SEED_STEP)
        return self._counted(self.around(super().__iter__()), start)

    def _counted(self, batches: Iterator[Any], start: Mapping[str, int]) -> Iterator[Any]:
        assert self.batch_size is not None
        number, is_over = 0, False
        while not is_over:
            for batch in batches:
                if not self._source.take():
                    continue
                before = self._position
                number += 1
                self._position = self._source.after(start, number * self.batch_size)
                yield self._source.given(self._ready(batch), before, self._position)
            is_over = not self._source.goes_on()
            if not is_over:
                batches = self.around(super().__iter__())
        self._position = self._source.start()

    @property
    def source(self) -> Resumable:
        """Where the samples come from."""
        return self._source

    @property
    def order(self) -> Any:
        """What decides their order: with recovery the `StepOrder` of the source, else the source itself."""
        return getattr(self._source, "order", self._source)

    def position(self) -> dict[str, int]:
        """The position of the next sample."""
        return self._position

    @contextmanager
    def standing_at(self, position: dict[str, int]) -> Iterator[None]:
        """Inside, `position()` is this one: of a step whose first batch was taken, and that has not begun."""
        here, self._position = self._position, position
        try:
            yield
        finally:
            self._position = here

    def resume(self, position: Mapping[str, int]) -> bool:
        """Begin the next iteration at `position`. False: the position is of another kind of source."""
        others = position.keys() ^ self._source.start().keys()
        if not others <= {"epoch"}:  # that of a stream without recovery has none
            return False
        self._source.resume(position, self.batch_size if self.drop_last and self.batch_size else 1)
        self._position = self._source.start()
        return True


@final
class RepeatingLoader:
    """Iterates over `loader` repeatedly, without end.

    Raises:
        UsageError: `loader` is empty, or can be iterated over only once.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise UsageError(
                f"the loader ({type(self.loader).__name__}) has no further batch: it is empty, has fewer "
                "samples than a step takes, or can be iterated only once; pass more samples, or a loader that "
                "can start again, such as a DataLoader."
            ) from None


def build_loader(  # noqa: PLR0913 (a rank and the arguments of a DataLoader)
    dataset: Dataset[Any] | Iterable[Any],
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    num_workers: int = 0,
    step_samples: int = 0,
) -> DataLoader[Any]:
    """Build this data-parallel rank's loader over `dataset`; needs no process group.

    Shapes:  items of shape [...] -> micro-batches of shape [micro_batch_size, ...], the last of an
             epoch shorter unless `drop_last`.

    Each iteration of the loader is one epoch with a new order. The order depends on the seed alone:
    torch's global generator is neither read nor advanced. Every rank gets the same number of
    micro-batches (see `EpochSampler`, `RankSlice`).

    Args:
        dataset: map-style (`len` and indexing), or an IterableDataset or `InOrder`, which is not shuffled.
        rank, world_size: on the data axis of the mesh, so all pipeline stages of a model read the same.
        collate_fn: builds a micro-batch from a list of items; torch's own by default.
        num_workers: processes that load; 0 loads in this process.
        step_samples: samples of one step over all ranks, a multiple of micro_batch_size x world_size. If
            given, an epoch of a map-style dataset is a whole number of steps.

    Raises:
        UsageError: not a dataset, an empty one, or one too short to give a micro-batch.
    """
    check_rank(micro_batch_size, rank, world_size)
    # A separate generator: otherwise DataLoader draws a seed from the global generator in each epoch,
    # which changes every later random number of the training.
    own_seed = seed * world_size + rank
    generator = torch.Generator().manual_seed(own_seed)
    options: dict[str, Any] = {
        "batch_size": micro_batch_size,
        "collate_fn": collate_fn,
        "drop_last": drop_last,
        "num_workers": num_workers,
        "generator": generator,
    }
    if isinstance(dataset, IterableDataset):
        part = RankSlice(dataset, rank, world_size, micro_batch_size)
        return RankLoader(part, own_seed, dataset=part, **options)
    check_map_style(dataset, micro_batch_size, world_size, drop_last, step_samples)
    inner = DistributedSampler[int](
        dataset,  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        shuffle=shuffle and not isinstance(dataset, InOrder),
        seed=seed,
        drop_last=drop_last,
    )
    sampler = EpochSampler(inner, step_samples)
    return RankLoader(sampler, own_seed, dataset=dataset, sampler=sampler, **options)


def check_rank(micro_batch_size: int, rank: int, world_size: int) -> None:
    if micro_batch_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"build_loader got micro_batch_size = {micro_batch_size}, rank = {rank}, world_size = "
            f"{world_size}; it needs micro_batch_size >= 1 and 0 <= rank < world_size."
        )


def keeps_position(loader: Any) -> bool:
    """Whether a user's loader has a state dict of its own, like torchdata's StatefulDataLoader."""
    return all(
        callable(getattr(loader, name, None))
        for name in ("__iter__", "state_dict", "load_state_dict")
    )


def loader_position(loader: Any) -> dict[str, int] | None:
    """The position of the next sample, over all ranks; None if `build_loader` did not build `loader`."""
    return loader.position() if isinstance(loader, RankLoader) else None


def resume_loader(loader: Any, position: Mapping[str, int]) -> bool:
    """Begin the loader's next iteration at `position`, at any number of ranks. False: not possible."""
    return isinstance(loader, RankLoader) and loader.resume(position)


def watch_loader(loader: Any, around: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Let iterations go through `around`, which gives the same batches, if `build_loader` built `loader`."""
    if isinstance(loader, RankLoader):
        loader.around = around


def check_indexed(dataset: object) -> int:
    """The number of its samples. Raises UsageError: it has none, or they cannot be taken by their numbers."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "training_data is a DataLoader without state_dict() and load_state_dict(), so a checkpoint could "
            "not keep its position; pass its dataset, pass a loader that has them (torchdata's "
            "StatefulDataLoader), or give its batches to engine(batch) or engine.train_batch(iterator)."
        )
    try:
        num_items = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f"training_data is a {type(dataset).__name__} without a length; it needs __len__ and "
            "__getitem__, or to be a torch.utils.data.IterableDataset."
        ) from None
    if not callable(getattr(dataset, "__getitem__", None)):
        raise UsageError(
            f"training_data is a {type(dataset).__name__} that cannot be indexed; it needs "
            "__getitem__, or to be a torch.utils.data.IterableDataset."
        )
    if num_items == 0:
        raise UsageError("training_data is empty; it needs at least one item.")
    return num_items


def check_map_style(
    dataset: object, micro_batch_size: int, world_size: int, drop_last: bool, step_samples: int
) -> None:
    num_items = check_indexed(dataset)
    if drop_last and num_items < step_samples:
        raise UsageError(
            f"training_data has {num_items} items, fewer than train_batch_size ({step_samples}), and "
            "dataloader_drop_last = true would drop them all; set it to false or lower the former."
        )
    num_needed = micro_batch_size * world_size
    if drop_last and num_items < num_needed:
        raise UsageError(
            f"training_data has {num_items} items, fewer than train_micro_batch_size_per_gpu "
            f"({micro_batch_size}) x data ranks ({world_size}) = {num_needed}, and "
            "dataloader_drop_last = true would drop them all; set it to false or lower the former."
        )
