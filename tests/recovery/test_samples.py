"""The samples of steps where units are lost: those of a run without recovery, each once."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from xds.engine.config.sections import DataPacking
from xds.engine.data.analyzer import Metric, analyze
from xds.engine.data.config import CurriculumMetric
from xds.engine.data.curriculum import curriculum_loader
from xds.engine.data.loaders import RankLoader, build_loader
from xds.engine.data.packing import packed_loader
from xds.engine.data.step_sampler import step_loader
from xds.ops.mesh import Mesh
from xds.recovery.units import shares_of, units_of


@pytest.mark.parametrize(
    ("mesh", "shard_ranks", "units"),
    [
        (Mesh(pipe=1, data=3), 1, [(0,), (1,), (2,)]),
        (Mesh(pipe=1, data=6), 2, [(0, 1), (2, 3), (4, 5)]),
        (Mesh(pipe=1, data=4), 4, [(0, 1, 2, 3)]),
        (Mesh(pipe=2, data=2), 1, [(0, 2), (1, 3)]),
        (Mesh(pipe=2, data=2, tensor=2), 1, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (Mesh(pipe=1, data=2, sequence=2), 1, [(0, 1), (2, 3)]),
        (Mesh(pipe=1, data=4, sequence=2), 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (Mesh(pipe=1, data=3, sequence=3), 3, [(0, 1, 2), (3, 4, 5), (6, 7, 8)]),
    ],
)
def test_a_unit_is_the_smallest_set_of_ranks_with_all_states(
    mesh: Mesh, shard_ranks: int, units: list
) -> None:
    assert units_of(mesh, shard_ranks) == units


def test_every_micro_batch_has_one_unit() -> None:
    for units in ((0,), (1, 3), (0, 2, 3), (0, 1, 2, 3)):
        shares = [shares_of(units, 4, 3, unit) for unit in units]
        assert sorted(sum(shares, [])) == [
            (unit, number) for unit in range(4) for number in range(3)
        ]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def loaders(units: int, length: int, step_batches: int = 2, num_workers: int = 0) -> list:
    data = TensorDataset(torch.arange(length))
    sizes = {"micro_batch_size": 2, "world_size": units, "num_workers": num_workers}
    more = {"drop_last": False, "collate_fn": None, "step_batches": step_batches}
    return [step_loader(data, rank=unit, **sizes, **more) for unit in range(units)]


def numbers(batch: list) -> list[int]:
    return batch[0].tolist()


def test_without_a_loss_samples_are_those_of_the_loader_for_elastic_runs() -> None:
    data = TensorDataset(torch.arange(29))
    for rank, loader in enumerate(loaders(3, 29)):
        same = build_loader(data, micro_batch_size=2, rank=rank, world_size=3, step_samples=12)
        for _ in range(2):
            pairs = zip(loader, same, strict=True)
            assert all(
                (numbers(ours), loader.position()) == (numbers(theirs), same.position())
                for ours, theirs in pairs
            )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_is_given_again_with_the_samples_of_a_lost_unit(num_workers: int) -> None:
    whole = [[numbers(batch) for batch in loader] for loader in loaders(3, 29)]
    survivors = loaders(3, 29, num_workers=num_workers)[:2]
    for unit, loader in enumerate(survivors):
        given, rounds = [], iter(loader)
        given += [numbers(next(rounds)) for _ in range(2)]
        done = loader.source.taken({"epoch": 0, "samples": 0})
        next(rounds)
        loader.resume(done)  # dropped in its second micro-batch
        assert loader.position() == done == {"epoch": 0, "samples": 12}
        shares = shares_of((0, 1), 3, 2, unit)
        loader.source.share(shares, done)
        given += [numbers(batch) for batch in rounds]
        rest = [whole[other][2 * step + number] for step in (1, 2) for other, number in shares]
        assert given == whole[unit][:2] + rest
        assert loader.position() == {"epoch": 0, "samples": 36}
        rounds = iter(loader)
        batches = [numbers(batch) for batch in itertools.islice(rounds, 2 * len(shares))]
        loader.resume({"epoch": 1, "samples": 12})  # when a worker has read all of the epoch
        assert [numbers(batch) for batch in rounds][: len(shares)] == batches[len(shares) :]
        loader.resume({"epoch": 1, "samples": 0})
        loader.source.share(shares, {"epoch": 1, "samples": 0})
        assert numbers(next(iter(loader))) == numbers(next(iter(fresh(unit, epoch=1))))


@pytest.mark.parametrize("num_taken", [0, 1])
@pytest.mark.parametrize(("micro_batches", "unit"), [(2, 0), (1, 0), (1, 1)])
def test_a_unit_runs_its_own_samples_when_another_one_comes_again(
    micro_batches: int, unit: int, num_taken: int
) -> None:
    """Unit 2 is lost in the first step. With one micro-batch unit 0 runs that of unit 2, and unit 1 its own."""
    whole = [[numbers(batch) for batch in loader] for loader in loaders(3, 29, micro_batches)]
    loader, start = loaders(3, 29, micro_batches)[unit], {"epoch": 0, "samples": 0}
    shares = shares_of((0, 1), 3, micro_batches, unit)
    loader.source.share(shares, start)
    rounds = iter(loader)
    given = [numbers(next(rounds)) for _ in shares]
    done = loader.source.taken(start)
    given += [numbers(next(rounds)) for _ in range(num_taken)]
    with loader.standing_at(done):
        assert loader.position() == done == {"epoch": 0, "samples": 6 * micro_batches}
    loader.source.share(shares_of((0, 1, 2), 3, micro_batches, unit), done)
    given += [numbers(batch) for batch in rounds]
    assert given == [whole[other][number] for other, number in shares] + whole[unit][micro_batches:]


def loader_of(
    kind: str, folder: Path, unit: int, *, recovers: bool, num_workers: int = 0
) -> RankLoader:
    """A loader of 3 units with 2 micro-batches of 2 samples or rows each in a step."""
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 9, (151,), generator=draw).tolist()
    data = [torch.full((length,), number) for number, length in enumerate(lengths)]
    sizes = {"micro_batch_size": 2, "rank": unit, "world_size": 3, "num_workers": num_workers}
    sizes["recovers"] = recovers
    if kind == "stream":
        del sizes["recovers"]
        if not recovers:
            return build_loader(Stream(data[:144]), collate_fn=list, **sizes)
        more = {"drop_last": False, "collate_fn": list, "step_batches": 2}
        return step_loader(Stream(data), **more, **sizes)
    if kind != "curriculum":
        dataset = WithLengths(data) if kind == "packed by lengths" else data
        dataset = Stream(data) if kind == "packed stream" else dataset
        section = DataPacking(tokens=10, columns={"input_ids": 0})
        return packed_loader(dataset, section, step_rows=12, **sizes)
    if not (folder / "length").exists():
        analyze(data, [Metric("length", lambda rows: [len(row) for row in rows])], folder)
    metric = CurriculumMetric(
        index_to_sample_path=str(folder / "length" / "length_index_to_sample"),
        index_to_metric_path=str(folder / "length" / "length_index_to_metric"),
        difficulty_type="value",
        clustering_type="schedule_based",
        min_difficulty=3,
        max_difficulty=8,
        schedule_type="fixed_linear",
        schedule_config={"total_curriculum_step": 8, "difficulty_step": 1},
    )
    more = {"step_samples": 12, "num_epochs": 1, "seed": 5, "collate_fn": list}
    return curriculum_loader(data, {"length": metric}, **more, **sizes)


class WithLengths(list):
    @property
    def lengths(self) -> list[int]:
        return [len(sample) for sample in self]


class Stream(IterableDataset):
    def __init__(self, items: list) -> None:
        self.items = items

    def __iter__(self) -> Iterator:
        return iter(self.items)


def contents(batch: dict | list) -> list:
    if isinstance(batch, dict):
        return batch["input_ids"].tolist()
    return [int(sample[0]) for sample in batch]


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        ("packed by lengths", 0),
        ("packed", 1),
        ("packed stream", 1),
        ("curriculum", 0),
        ("curriculum", 1),
        ("stream", 0),
        ("stream", 1),
    ],
)
def test_rows_and_curricula_are_those_of_a_run_without_recovery_and_are_given_again(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    whole: list[list] = []
    for unit in range(3):
        same = loader_of(kind, tmp_path, unit, recovers=False)
        loader = loader_of(kind, tmp_path, unit, recovers=True, num_workers=num_workers)
        for _ in range(2):
            rounds = [
                (
                    contents(ours),
                    contents(theirs),
                    same.position().items() <= loader.position().items(),
                )
                for ours, theirs in zip(loader, same, strict=True)
            ]
            assert all(ours == theirs and is_same for ours, theirs, is_same in rounds)
        whole.append([theirs for _, theirs, _ in rounds])  # of epoch 1
    order, num_steps = loader.source.order, len(whole[0]) // 2
    for unit in (0, 1):
        loader = loader_of(kind, tmp_path, unit, recovers=True, num_workers=num_workers)
        first = order.position(1, 12)
        loader.resume(first)
        rounds = iter(loader)
        given = [contents(next(rounds)) for _ in range(2)]
        done = loader.source.taken(first)
        next(rounds)
        loader.resume(done)  # dropped in its second micro-batch
        shares = shares_of((0, 1), 3, 2, unit)
        loader.source.share(shares, done)
        given += [contents(batch) for batch in rounds]
        rest = [
            whole[other][2 * step + number]
            for step in range(2, num_steps)
            for other, number in shares
        ]
        assert num_steps > 4 and given == whole[unit][2:4] + rest
        assert loader.position() == order.position(1, 12 * num_steps)


@pytest.mark.parametrize("kind", ["packed", "packed stream", "curriculum", "stream"])
@pytest.mark.parametrize("recovers", [True, False])
def test_a_run_goes_on_where_one_with_or_without_recovery_was_saved(
    tmp_path: Path, kind: str, recovers: bool
) -> None:
    saved = loader_of(kind, tmp_path, 1, recovers=recovers)
    rounds = iter(saved)
    for _ in range(2):
        next(rounds)
        if recovers:
            saved.source.use()
    loader = loader_of(kind, tmp_path, 1, recovers=not recovers)
    assert loader.resume(saved.position())
    rest = [contents(batch) for batch in itertools.islice(loader, 6)]
    assert len(rest) == 6 and rest == [contents(next(rounds)) for _ in range(6)]


def test_an_iteration_that_is_left_goes_on_in_the_next_one() -> None:
    whole = [numbers(batch) for batch in loaders(3, 29)[1]]
    loader = loaders(3, 29)[1]
    source, given, before = loader.source, [], loader.position()
    assert numbers(next(iter(loader))) == whole[0]  # looked at: it is given again
    for _ in range(2):  # each is left within a step
        for number, batch in enumerate(loader):
            given.append(numbers(batch))
            source.use()
            if len(given) % 2 == 0:
                before = source.taken(before)
            if number == 2:
                break
    assert given == whole


@pytest.mark.parametrize("unit", [0, 1])
def test_a_curriculum_gives_its_state_also_to_the_micro_batches_of_a_lost_unit(
    tmp_path: Path, unit: int
) -> None:
    states: list = [[], []]
    for number, (shares, place) in enumerate([(None, 2), (shares_of((0, 1), 3, 2, unit), unit)]):
        loader = loader_of("curriculum", tmp_path, place, recovers=True)
        source = loader.source
        source.order.post_process = lambda batch, state, seen=states[number]: seen.append(state)
        if shares is not None:
            source.share(shares, loader.position())
        list(loader)
    whole, found = states
    each = len(found) // (len(whole) // 2)
    for number, state in enumerate(found):
        step, micro_batch = divmod(number, each)
        own = shares_of((0, 1), 3, 2, unit)[micro_batch][1]
        assert state == whole[2 * step + own]


def fresh(unit: int, epoch: int) -> object:
    loader = loaders(3, 29)[unit]
    loader.resume({"epoch": epoch, "samples": 0})
    return loader
