"""The samples of steps that stay the same when units are lost: of this unit, and of those that are gone.

    step 7 of 3 units   unit 0: a b    unit 1: c d    unit 2: e f         two micro-batches each
    without unit 1      unit 0: a b c                 unit 2: e f d

A step that is dropped is given again, in the iteration that runs. So a loop over the loader has a round more.
What workers have read ahead of it is dropped as well.

The items of a step are those of a run without recovery: see `StepOrder`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from math import prod
from typing import Any, Protocol, final

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from ...utils.errors import UsageError
from .loaders import InOrder, RankLoader, Resumable, check_map_style, check_rank

NUM_BEFORE = 2  # steps that a run may go back: their items are kept


class StepOrder(Protocol):
    """The items of each step over all ranks, as without recovery: item i is one of data rank i % ranks."""

    def position(self, epoch: int, items: int) -> dict[str, int]:
        """The position after so many items of an epoch."""

    def place(self, position: Mapping[str, int]) -> tuple[int, int]:
        """The epoch of a position, and its items before it."""

    @property
    def num_steps(self) -> int | None:
        """Of an epoch; None: it is not known before its end."""

    def steps(self, epoch: int, first: int) -> Iterator[Sequence[Any]]:
        """The items of each step of the epoch from the step `first` on."""

    def given(self, batch: Any, start: Mapping[str, int], end: Mapping[str, int]) -> Any:
        """As in `Resumable`."""


@final
class SampleOrder:
    """The indices of a map-style dataset: those of `EpochSampler` with the same seed."""

    def __init__(self, order: DistributedSampler[int], step_samples: int) -> None:
        """order: of one rank, so of all samples of an epoch."""
        self._order, self._step_samples = order, step_samples
        num_items = len(order.dataset)  # type: ignore[arg-type]
        spare = 0 if order.drop_last else step_samples - 1
        self.num_steps = (num_items + spare) // step_samples

    def position(self, epoch: int, items: int) -> dict[str, int]:
        return {"epoch": epoch, "samples": items}

    def place(self, position: Mapping[str, int]) -> tuple[int, int]:
        return position["epoch"], position["samples"]

    def steps(self, epoch: int, first: int) -> Iterator[Sequence[int]]:
        self._order.set_epoch(epoch)
        order = list(self._order)
        for step in range(first, self.num_steps):
            start = step * self._step_samples
            items = order[start : start + self._step_samples]
            yield items + list(islice(cycle(order), self._step_samples - len(items)))

    def given(self, batch: Any, start: Mapping[str, int], end: Mapping[str, int]) -> Any:
        return batch


@final
class StreamOrder:
    """The items of a stream in their order, which is the same each time it is read. See `RankSlice`.

    The last items that are no whole step are dropped.
    """

    num_steps = None

    def __init__(self, stream: Iterable[Any], step_items: int) -> None:
        self._stream, self._step_items = stream, step_items

    def position(self, epoch: int, items: int) -> dict[str, int]:
        return {"epoch": epoch, "items": items}

    def place(self, position: Mapping[str, int]) -> tuple[int, int]:
        # a run without recovery counts no epochs of a stream
        return position.get("epoch", 0), position["items"]

    def steps(self, epoch: int, first: int) -> Iterator[Sequence[Any]]:
        items = islice(self._stream, first * self._step_items, None)
        while len(step := list(islice(items, self._step_items))) == self._step_items:
            yield step

    def given(self, batch: Any, start: Mapping[str, int], end: Mapping[str, int]) -> Any:
        return batch


@final
class Items(Dataset[Any]):
    """What the sampler gives, for a loader that collates it."""

    def __getitem__(self, item: Any) -> Any:
        return item


@final
class StepSampler(Sampler[Any], Resumable):
    """This rank's items, micro-batch by micro-batch. An epoch is a whole number of steps.

    A loader with workers takes items ahead: what it has taken counts when its batch has come (`take`).
    """

    def __init__(self, order: StepOrder, unit: int, sizes: tuple[int, int, int]) -> None:
        """
        Args:
            unit: the number of this unit.
            sizes: units at the start, micro-batches of each in a step, items of a micro-batch.
        """
        self.order, self._unit = order, unit
        self._num_units, self._num_micro_batches, self._micro_batch_size = sizes
        self._step_items = prod(sizes)
        self._shares = [(unit, number) for number in range(self._num_micro_batches)]
        self.epoch, self._step = 0, 0  # whose micro-batches are given now
        self._given = 0  # micro-batches of it
        self._is_used = False  # a forward of it has begun
        self._done = 0  # steps of the epoch that count
        self._is_running = False  # an iteration has begun, and has not ended
        self._kept: dict[int, Sequence[Any]] = {}  # the items of steps of an epoch
        self._next: tuple[int, int] = (-1, 0)  # the epoch, and its step that comes next
        self._coming: Iterator[Sequence[Any]] = iter(())  # it, and those after it
        self._version = 0  # of what comes next: another one each time that is changed
        self._ahead: deque[int] = deque()  # of micro-batches whose items were taken

    def share(self, shares: Sequence[tuple[int, int]], done: Mapping[str, int]) -> None:
        """From the next step on this rank runs these micro-batches (unit, number), its own first.

        done: the position after the last step. The first micro-batch of the next one may have been taken.
        """
        if done == self.order.position(self.epoch, (self._step + 1) * self._step_items):
            self._move(self.epoch, self._step + 1)
        self._shares = list(shares)
        self._version += 1

    def use(self) -> None:
        """A forward of this step begins: what was given is not given again."""
        self._is_used = True

    def taken(self, before: Mapping[str, int]) -> dict[str, int]:
        """The position after the step whose micro-batches were all taken. before: the position before it.

        Raises UsageError: they were not taken from this loader, or not in their order.
        """
        if self._given != len(self._shares):
            raise UsageError(
                f"recovery.enabled: a step of {len(self._shares)} micro-batches took {self._given} of them "
                "from its loops over engine.training_dataloader, and a step that is repeated would take "
                "others; take one batch for each forward and backward, and leave the loop between two steps "
                "(`zip(loader, range(n))` takes one batch more than it gives: write "
                "`zip(range(n), loader)`), or call engine.train_batch()"
            )
        first = self._step * self._step_items
        taken = self.order.position(self.epoch, first + self._step_items)
        is_next = before == self.order.position(self.epoch, first)
        if not is_next and (self._step or self.order.place(before)[0] == self.epoch):
            raise UsageError(
                f"recovery.enabled: a step ended with the samples before {taken}, and the one before it with "
                f"those before {before}: take batches from engine.training_dataloader one by one, in the step "
                "that trains them, and not ahead"
            )
        self._done, self._is_used = self._step + 1, False
        return taken

    # -- positions --------------------------------------------------------------------------------------

    def start(self) -> dict[str, int]:
        own = min(self._given, self._num_micro_batches)
        items = self._step * self._step_items
        items += own * self._micro_batch_size * self._num_units
        return self.order.position(self.epoch, items)

    def begin(self) -> dict[str, int]:
        """An iteration that was left goes on in the next one, so that a new process has the same samples.

        Batches that a script has only looked at are given again.
        """
        if not self._is_used:
            self._move(self.epoch, self._done)
        if self._items(self._step + (self._given == len(self._shares))) is None:
            self._move(self.epoch + 1, 0)
        self._is_running = True
        self._ahead.clear()
        return self.start()

    def take(self) -> bool:
        if self._ahead.popleft() != self._version:
            return False
        if self._given == len(self._shares):
            self._step, self._given = self._step + 1, 0
        self._given += 1
        return True

    def goes_on(self) -> bool:
        if self._is_running:
            next_step = self._step + (self._given == len(self._shares))
            if self._items(next_step) is None:
                self._is_running = False
                self._move(self.epoch, next_step)
        return self._is_running

    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        return self.start()

    def given(self, batch: Any, start: Mapping[str, int], end: Mapping[str, int]) -> Any:
        number = self._shares[self._given - 1][1]  # also of a unit that is gone
        size = self._micro_batch_size * self._num_units
        first = self._step * self._step_items + number * size
        here = (self.order.position(self.epoch, first + count) for count in (0, size))
        return self.order.given(batch, *here)

    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        """Also in the iteration that runs: the next micro-batch is the first one of that step."""
        epoch, items = self.order.place(position)
        step, rest = divmod(items, self._step_items)
        if rest:
            raise UsageError(
                f"training_data cannot continue at {dict(position)} with recovery.enabled: that is inside of a "
                f"step of {self._step_items} samples or rows; load a checkpoint that was saved between steps"
            )
        if epoch != self.epoch:
            self._is_running = False  # the iteration that runs has ended
        if self.order.num_steps is not None and step >= self.order.num_steps:
            self._is_running = False
            epoch, step = epoch + 1, 0
        # items are read when they are needed: others wait for this rank now
        self._move(epoch, step)

    def _move(self, epoch: int, step: int) -> None:
        """The first micro-batch of this step comes next; those before it count."""
        self.epoch, self._step, self._given = epoch, step, 0
        self._done, self._is_used = step, False
        self._version += 1

    # -- items ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The items of this rank's own micro-batches in an epoch. Raises TypeError: that is not known."""
        if self.order.num_steps is None:
            raise TypeError(
                "the rows of data_packing, or the items of a stream, are not counted before"
            )
        return self.order.num_steps * self._num_micro_batches * self._micro_batch_size

    def __iter__(self) -> Iterator[Any]:
        epoch, version, step, given = self.epoch, -1, 0, 0
        while self.epoch == epoch and self._is_running:
            if version != self._version:
                version, step, given = self._version, self._step, self._given
            if given == len(self._shares):
                step, given = step + 1, 0
            items = self._items(step)
            if items is None:
                break
            unit, number = self._shares[given]
            given += 1
            self._ahead.append(version)
            first = number * self._micro_batch_size
            places = range(first, first + self._micro_batch_size)
            yield from [items[place * self._num_units + unit] for place in places]

    def _items(self, step: int) -> Sequence[Any] | None:
        """The items of a step of this epoch; None: it has fewer steps."""
        if self._next[0] != self.epoch or (step < self._next[1] and step not in self._kept):
            self._kept, self._next = {}, (self.epoch, step)
            self._coming = self.order.steps(self.epoch, step)
        for number in [number for number in self._kept if number < self._step - NUM_BEFORE]:
            del self._kept[number]
        while step not in self._kept:
            items = next(self._coming, None)
            if items is None:
                return None
            self._kept[self._next[1]] = items
            self._next = self.epoch, self._next[1] + 1
        return self._kept[step]


def step_loader(
    dataset: Any,
    *,
    step_batches: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    num_workers: int,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> RankLoader:
    """The loader of a unit whose run goes on when others are lost. See `StepSampler`.

    step_batches: micro-batches of each unit in a step.
    Raises UsageError: as `build_loader`.
    """
    check_rank(micro_batch_size, rank, world_size)
    sizes = (world_size, step_batches, micro_batch_size)
    step_samples = prod(sizes)
    order: StepOrder
    if isinstance(dataset, IterableDataset):
        order, dataset = StreamOrder(dataset, step_samples), Items()
    else:
        check_map_style(dataset, micro_batch_size, world_size, drop_last, step_samples)
        shuffled = DistributedSampler[int](
            dataset,
            num_replicas=1,
            rank=0,
            shuffle=not isinstance(dataset, InOrder),
            seed=0,
            drop_last=drop_last,
        )
        order = SampleOrder(shuffled, step_samples)
    sampler = StepSampler(order, rank, sizes)
    return RankLoader(
        sampler,
        rank,
        num_workers=num_workers,
        dataset=dataset,
        sampler=sampler,
        batch_size=micro_batch_size,
        collate_fn=collate_fn,
        generator=torch.Generator().manual_seed(rank),
    )


__all__ = ["StepOrder", "StepSampler", "step_loader"]
