"""Loaders that give each rank its own part of a dataset, epoch after epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from ...utils.errors import UsageError


class Resumable(ABC):
    """What hands out samples, one iteration after the other, and can say where the next one begins.

    A position is numbers that mean the same at any number of ranks.
    """

    @abstractmethod
    def start(self) -> dict[str, int]:
        """Where the next iteration begins."""

    @abstractmethod
    def begin(self) -> dict[str, int]:
        """An iteration begins now, and `start` is that of the one after it; where."""

    @abstractmethod
    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        """The position when this rank has got `num_items` of an iteration that began at `start`."""

    @abstractmethod
    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        """The next iteration begins at `position`; one that would give fewer than `min_items` is skipped."""


@final
class EpochSampler(Sampler[int], Resumable):
    """This rank's indices, in an order that changes by itself from one iteration to the next.

    DistributedSampler repeats its first order for ever unless somebody calls `set_epoch`. Every
    rank gets ceil(len / world_size) indices, the first ones again where the dataset is too short;
    floor with `drop_last`. With `step_samples`, a multiple of the ranks, an epoch is a whole number of
    steps instead: then the samples of each step are the same at any number of ranks.
    """

    def __init__(self, inner: DistributedSampler[int], step_samples: int = 0) -> None:
        self._inner = inner
        self._step_samples = step_samples or inner.num_replicas
        self.epoch = 0
        self._skip = 0  # samples of the next iteration's epoch that were handed out before
        self._indices: list[int] | None = None  # of the iteration that has begun

    def __iter__(self) -> Iterator[int]:
        if self._indices is None:
            self.begin()
        assert self._indices is not None
        indices, self._indices = self._indices, None
        return iter(indices)

    def _rest(self, epoch: int, skip: int) -> list[int]:
        """This rank's part of what an epoch has left after its first `skip` samples."""
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
        """The whole epoch's order, as DistributedSampler deals it out."""
        alone = DistributedSampler[int](
            self._inner.dataset,
            num_replicas=1,
            rank=0,
            shuffle=self._inner.shuffle,
            seed=self._inner.seed,
        )
        alone.set_epoch(epoch)
        return list(alone)

    def __len__(self) -> int:
        """Of a whole epoch."""
        num_items = len(self._inner.dataset)  # type: ignore[arg-type]
        spare = 0 if self._inner.drop_last else self._step_samples - 1
        steps = (num_items + spare) // self._step_samples
        return steps * (self._step_samples // self._inner.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Give the next iteration the order of `epoch`, from its beginning."""
        self.epoch, self._skip = epoch, 0

    def start(self) -> dict[str, int]:
        return {"epoch": self.epoch, "samples": self._skip}

    def begin(self) -> dict[str, int]:
        here = self.start()
        self._indices = self._rest(self.epoch, self._skip)
        self.set_epoch(self.epoch + 1)
        return here

    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        """Samples that fill up a last round count as well: whoever goes on begins the next epoch."""
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

    Every rank reads the whole stream and keeps its part; a last round that is not whole is dropped,
    so all ranks see the same number of items. Loader workers take micro-batches in turn, so the order
    does not depend on their number. It is the stream's own: there is no shuffling.
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
        """The stream is read again, and what was handed out is thrown away."""
        self._skip = position["items"]


@final
class RankLoader(DataLoader[Any]):
    """A DataLoader that knows what it has handed out, whatever its workers have read ahead."""

    def __init__(self, source: Resumable, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._source = source
        self._seed = seed
        self._position = source.start()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = self._position = self._source.begin()
        if "epoch" in start and self.generator is not None:
            # workers get their seeds of it: those of an epoch are the same in a run that went on
            self.generator.manual_seed(self._seed + (start["epoch"] << 32))
        return self._counted(super().__iter__(), start)

    def _counted(self, batches: Iterator[Any], start: Mapping[str, int]) -> Iterator[Any]:
        assert self.batch_size is not None
        for number, batch in enumerate(batches, start=1):
            self._position = self._source.after(start, number * self.batch_size)
            yield batch
        self._position = self._source.start()

    def position(self) -> dict[str, int]:
        """Where the next sample is."""
        return self._position

    def resume(self, position: Mapping[str, int]) -> bool:
        """The next iteration begins at `position`, at any number of ranks. False: it is another kind's."""
        if position.keys() != self._source.start().keys():
            return False
        self._source.resume(position, self.batch_size if self.drop_last and self.batch_size else 1)
        self._position = self._source.start()
        return True


@final
class RepeatingLoader:
    """Iterates `loader` again and again, without end.

    Raises:
        UsageError: `loader` gives nothing, or is an iterator that can be used only once.
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
                f"the loader ({type(self.loader).__name__}) has no further batch: it is empty, or "
                "it can be iterated only once; pass one that can start again, such as a DataLoader."
            ) from None


def build_loader(  # noqa: PLR0913 (a rank and what a DataLoader takes)
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
    """Make this data-parallel rank's loader over `dataset`; needs no process group.

    Shapes:  items of shape [...] -> micro-batches of shape [micro_batch_size, ...], the last of an
             epoch shorter unless `drop_last`.

    Each iteration of the loader is one epoch, shuffled differently from the last. One seed gives
    one order, whatever else draws random numbers: torch's global generator is neither read nor
    moved. Every rank gets the same number of micro-batches (see `EpochSampler`, `RankSlice`).

    Args:
        dataset: map-style (`len` and indexing), or an IterableDataset, which is not shuffled.
        rank, world_size: of the data-parallel group.
        collate_fn: makes a micro-batch of a list of items; torch's own by default.
        num_workers: processes that load; 0 loads in this one.
        step_samples: of one step, over all ranks, where an epoch of a map-style dataset is to be a whole
            number of steps; a multiple of micro_batch_size x world_size.

    Raises:
        UsageError: not a dataset, an empty one, or one too short to give a micro-batch.
    """
    _check_rank(micro_batch_size, rank, world_size)
    # A generator of its own: DataLoader otherwise draws a seed from the global one in each epoch,
    # and so changes every later random number of the training.
    own_seed = seed * world_size + rank
    generator = torch.Generator().manual_seed(own_seed)
    options: dict[str, Any] = {
        "batch_size": micro_batch_size,
        "collate_fn": collate_fn,
        "drop_last": drop_last,
        "num_workers": num_workers,
        "pin_memory": torch.cuda.is_available(),
        "generator": generator,
    }
    if isinstance(dataset, IterableDataset):
        part = RankSlice(dataset, rank, world_size, micro_batch_size)
        return RankLoader(part, own_seed, dataset=part, **options)
    _check_map_style(dataset, micro_batch_size, world_size, drop_last, step_samples)
    inner = DistributedSampler[int](
        dataset,  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    sampler = EpochSampler(inner, step_samples)
    return RankLoader(sampler, own_seed, dataset=dataset, sampler=sampler, **options)


def _check_rank(micro_batch_size: int, rank: int, world_size: int) -> None:
    if micro_batch_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"build_loader got micro_batch_size = {micro_batch_size}, rank = {rank}, world_size = "
            f"{world_size}; it needs micro_batch_size >= 1 and 0 <= rank < world_size."
        )


def keeps_position(loader: Any) -> bool:
    """A loader of the user's that says by itself where it is, such as torchdata's StatefulDataLoader."""
    return all(
        callable(getattr(loader, name, None))
        for name in ("__iter__", "state_dict", "load_state_dict")
    )


def loader_position(loader: Any) -> dict[str, int] | None:
    """Where the next sample of a loader made here is, over all ranks; None where nobody knows."""
    return loader.position() if isinstance(loader, RankLoader) else None


def resume_loader(loader: Any, position: Mapping[str, int]) -> bool:
    """The loader's next iteration begins at `position`, at any number of ranks. False: it cannot."""
    return isinstance(loader, RankLoader) and loader.resume(position)


def _check_map_style(
    dataset: object, micro_batch_size: int, world_size: int, drop_last: bool, step_samples: int
) -> None:
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
