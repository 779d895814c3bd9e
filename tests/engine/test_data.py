"""Loaders: each rank's part, epochs, seeds, streams, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from xds import UsageError
from xds.engine.data.loaders import RepeatingLoader, build_loader


class Stream(IterableDataset[int]):
    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_items))


def epoch(loader: DataLoader[Any]) -> list[int]:
    return [int(item) for batch in loader for item in batch]


def loaders(dataset: Any, world_size: int, **options: Any) -> list[DataLoader[Any]]:
    return [
        build_loader(dataset, micro_batch_size=2, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_dataset_without_overlap(world_size: int) -> None:
    parts = [epoch(loader) for loader in loaders(list(range(12)), world_size)]
    assert sorted(sum(parts, [])) == list(range(12))
    assert {len(part) for part in parts} == {12 // world_size}


def test_a_short_last_round_is_filled_or_dropped() -> None:
    filled = [epoch(loader) for loader in loaders(list(range(5)), 2)]
    assert [len(part) for part in filled] == [3, 3]
    assert set(sum(filled, [])) == set(range(5))
    dropped = [list(loader) for loader in loaders(list(range(5)), 2, drop_last=True)]
    assert [[len(batch) for batch in part] for part in dropped] == [[2], [2]]


def samples_of_steps(world_size: int, drop_last: bool, **resumed: int) -> list[set[int]]:
    """Of three epochs of 61 samples, twelve a step, at micro-batches of two."""
    ranks = loaders(list(range(61)), world_size, step_samples=12, drop_last=drop_last)
    each = 12 // 2 // world_size
    for loader in ranks:
        assert len(loader) % each == 0
        if resumed:
            assert loader.resume(resumed)
    parts = [[batch for _ in range(3) for batch in loader] for loader in ranks]
    steps = [
        sum((part[at : at + each] for part in parts), []) for at in range(0, len(parts[0]), each)
    ]
    return [{int(item) for batch in step for item in batch} for step in steps]


@pytest.mark.parametrize("drop_last", [False, True])
def test_whole_steps_have_the_same_samples_at_any_number_of_ranks(drop_last: bool) -> None:
    found = [samples_of_steps(world_size, drop_last) for world_size in (1, 2, 3, 6)]
    assert found[1:] == found[:1] * 3
    assert len(found[0]) == 3 * (5 if drop_last else 6)
    assert {len(step) for step in found[0]} == {12}
    for world_size in (1, 2, 3):  # in the first epoch, and behind its end
        later = samples_of_steps(world_size, drop_last, epoch=0, samples=24)
        assert later[: len(found[0]) - 2] == found[0][2:]
        later = samples_of_steps(world_size, drop_last, epoch=0, samples=12 * len(found[0]) // 3)
        assert later[:5] == found[0][len(found[0]) // 3 :][:5]


def test_a_dataset_without_one_whole_step_is_refused_where_the_rest_is_dropped() -> None:
    with pytest.raises(UsageError, match=r"fewer than train_batch_size \(12\)"):
        loaders(list(range(11)), 2, step_samples=12, drop_last=True)
    assert len(loaders(list(range(11)), 2, step_samples=12)[0]) == 3


def test_epochs_advance_by_themselves_and_repeat_by_seed() -> None:
    first, second = (loaders(list(range(40)), 2, seed=7)[0] for _ in range(2))
    epochs = [epoch(first) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [epoch(second) for _ in range(3)] == epochs
    assert epoch(loaders(list(range(40)), 2, seed=8)[0]) != epochs[0]


def test_without_shuffling_ranks_take_turns() -> None:
    parts = [epoch(loader) for loader in loaders(list(range(6)), 2, shuffle=False)]
    assert parts == [[0, 2, 4], [1, 3, 5]]


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    epoch(loaders(list(range(8)), 1)[0])
    epoch(loaders(Stream(8), 1)[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_shapes_and_collate_fn() -> None:
    dataset = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
    inputs, targets = next(iter(loaders(dataset, 2)[0]))
    assert (inputs.shape, targets.shape) == ((2, 3), (2,))
    batch = next(iter(loaders(list(range(4)), 2, shuffle=False, collate_fn=tuple)[1]))
    assert batch == (1, 3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_are_dealt_out_in_whole_rounds(num_workers: int) -> None:
    parts = [sorted(epoch(loader)) for loader in loaders(Stream(10), 4, num_workers=num_workers)]
    assert parts == [[0, 4], [1, 5], [2, 6], [3, 7]]


class Seeds(Dataset[int]):
    """Each sample is the seed of the worker that reads it, from which augmentations are drawn."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def test_workers_of_a_resumed_epoch_have_the_seeds_of_an_uninterrupted_run() -> None:
    whole, resumed = (loaders(Seeds(), 3, num_workers=2) for _ in range(2))
    seeds = [[epoch(loader) for _ in range(2)] for loader in whole]
    assert len({seed for ranks in seeds for one in ranks for seed in one}) == 3 * 2 * 2
    for loader, (_, second) in zip(resumed, seeds, strict=True):
        assert loader.resume({"epoch": 1, "samples": 12})
        assert epoch(loader) == second[4:]


@pytest.mark.parametrize("dataset", [Stream(12), list(range(12))])
def test_passes_after_a_resumed_one_are_whole(dataset: Any) -> None:
    (loader,) = loaders(dataset, 1, shuffle=False)
    position = loader.position()
    assert loader.resume({name: 8 if name != "epoch" else 0 for name in position})
    assert [epoch(loader) for _ in range(3)] == [[8, 9, 10, 11], *[list(range(12))] * 2]


def test_repeating_loader_never_ends() -> None:
    loader = RepeatingLoader(loaders(list(range(6)), 1, seed=3)[0])
    seen = sum((next(loader).tolist() for _ in range(9)), [])
    assert sorted(seen[:6]) == sorted(seen[6:12]) == sorted(seen[12:]) == list(range(6))
    assert seen[:6] != seen[6:12]
    assert iter(loader) is loader


@pytest.mark.parametrize("source", [[], iter([1])])
def test_repeating_loader_names_what_runs_dry(source: Any) -> None:
    loader = RepeatingLoader(source)
    with pytest.raises(UsageError, match="no further batch"):
        for _ in range(2):
            next(loader)


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (DataLoader([1]), {}, "is a DataLoader"),  # type: ignore[arg-type]
        (iter([1]), {}, "without a length"),
        ({1, 2}, {}, "cannot be indexed"),
        ([], {}, "is empty"),
        ([1, 2, 3], {"drop_last": True}, "= 4, and dataloader_drop_last"),
    ],
)
def test_refusals(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        loaders(dataset, 2, **options)
