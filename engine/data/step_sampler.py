"""The samples of steps that stay the same when units are lost: of this unit, and of those that are gone.

    step 7 of 3 units   unit 0: a b    unit 1: c d    unit 2: e f         two micro-batches each
    without unit 1      unit 0: a b c                 unit 2: e f d

A step that is dropped is given again, in the iteration that runs. So a loop over the loader has a round more.
What workers have read ahead of it is dropped as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from ...utils.errors import UsageError
from .loaders import InOrder, RankLoader, Resumable, check_map_style, check_rank


@final
class StepSampler(Sampler[int], Resumable):
    """This rank's indices, micro-batch by micro-batch. An epoch is a whole number of steps.

    The order is that of `EpochSampler` with the same seed and the same samples of a step. A loader with workers
    takes indices ahead: what it has taken counts when its batch has come (`take`).
    """

    def __init__(
        self, order: DistributedSampler[int], unit: int, sizes: tuple[int, int, int]
    ) -> None:
        """
        Args:
            order: of one rank, so of all samples of an epoch.
            unit: the number of this unit.
            sizes: units at the start, micro-batches of each in a step, samples of a micro-batch.
        """
        self._order, self._unit = order, unit
        self._num_units, self._num_micro_batches, self._micro_batch_size = sizes
        self.step_samples = sizes[0] * sizes[1] * sizes[2]
        num_items = len(order.dataset)  # type: ignore[arg-type]
        spare = 0 if order.drop_last else self.step_samples - 1
        self._num_steps = (num_items + spare) // self.step_samples
        self._shares = [(unit, number) for number in range(self._num_micro_batches)]
        self.epoch, self._step = 0, 0  # whose micro-batches are given now
        self._given = 0  # micro-batches of it
        self._is_running = False  # an iteration has begun, and has not ended
        self._indices: tuple[int, list[int]] = (-1, [])  # of an epoch
        self._version = 0  # of what comes next: another one each time that is changed
        self._ahead: deque[int] = deque()  # of micro-batches whose indices were taken

    def share(self, shares: Sequence[tuple[int, int]], done: Mapping[str, int]) -> None:
        """From the next step on this rank runs these micro-batches (unit, number), its own first.

        done: the position after the last step. The first micro-batch of the next one may have been taken.
        """
        if self.epoch == done["epoch"] and self._step * self.step_samples < done["samples"]:
            self._move(self.epoch, self._step + 1)
        self._shares = list(shares)
        self._version += 1

    def taken(self) -> dict[str, int]:
        """The position after the step whose micro-batches were all taken.

        Raises UsageError: they were not taken from this loader.
        """
        if self._given != len(self._shares):
            raise UsageError(
                f"recovery.enabled: a step took {self._given} of its {len(self._shares)} micro-batches on this "
                "rank from engine.training_dataloader, so it could not be repeated; take each batch from it, "
                "once for each forward and backward, or call engine.train_batch()"
            )
        return {"epoch": self.epoch, "samples": (self._step + 1) * self.step_samples}

    # -- positions --------------------------------------------------------------------------------------

    def start(self) -> dict[str, int]:
        own = min(self._given, self._num_micro_batches)
        samples = self._step * self.step_samples
        samples += own * self._micro_batch_size * self._num_units
        return {"epoch": self.epoch, "samples": samples}

    def begin(self) -> dict[str, int]:
        if self._is_running or self._step >= self._num_steps:
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
        is_last = self._step == self._num_steps - 1 and self._given == len(self._shares)
        if self._is_running and (is_last or self._step >= self._num_steps):
            self._is_running = False
            self._move(self.epoch, self._num_steps)
        return self._is_running

    def after(self, start: Mapping[str, int], num_items: int) -> dict[str, int]:
        return self.start()

    def resume(self, position: Mapping[str, int], min_items: int) -> None:
        """Also in the iteration that runs: the next micro-batch is the first one of that step."""
        step, rest = divmod(position["samples"], self.step_samples)
        if rest:
            raise UsageError(
                f"training_data cannot continue at sample {position['samples']} of an epoch with "
                f"recovery.enabled: it is inside of a step of {self.step_samples} samples; load a checkpoint "
                "that was saved between two steps"
            )
        epoch = position["epoch"]
        if step >= self._num_steps:
            epoch, step = epoch + 1, 0
        if epoch != self.epoch:
            self._is_running = False  # the iteration that runs has ended
        self._move(epoch, step)

    def _move(self, epoch: int, step: int) -> None:
        self.epoch, self._step, self._given = epoch, step, 0
        self._version += 1

    # -- indices ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The indices of this rank's own micro-batches in an epoch."""
        return self._num_steps * self._num_micro_batches * self._micro_batch_size

    def __iter__(self) -> Iterator[int]:
        epoch, version, step, given = self.epoch, -1, 0, 0
        while self.epoch == epoch and self._is_running:
            if version != self._version:
                version, step, given = self._version, self._step, self._given
            if given == len(self._shares):
                step, given = step + 1, 0
            if step >= self._num_steps:
                break
            unit, number = self._shares[given]
            given += 1
            self._ahead.append(version)
            yield from self._micro_batch(step, unit, number)

    def _micro_batch(self, step: int, unit: int, number: int) -> list[int]:
        epoch, order = self._indices
        if epoch != self.epoch:
            self._order.set_epoch(self.epoch)
            order = list(self._order)
            self._indices = self.epoch, order
        first = (step * self._num_micro_batches + number) * self._micro_batch_size
        places = range(first, first + self._micro_batch_size)
        return [order[(place * self._num_units + unit) % len(order)] for place in places]


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
    Raises UsageError: as `build_loader`, or the dataset is a stream.
    """
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "training_data is an IterableDataset, and recovery.enabled needs samples that can be read again: "
            "give a dataset with __len__ and __getitem__, or set recovery.enabled to false"
        )
    check_rank(micro_batch_size, rank, world_size)
    step_samples = micro_batch_size * world_size * step_batches
    check_map_style(dataset, micro_batch_size, world_size, drop_last, step_samples)
    order = DistributedSampler[int](
        dataset,
        num_replicas=1,
        rank=0,
        shuffle=not isinstance(dataset, InOrder),
        seed=0,
        drop_last=drop_last,
    )
    sampler = StepSampler(order, rank, (world_size, step_batches, micro_batch_size))
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


__all__ = ["StepSampler", "step_loader"]
