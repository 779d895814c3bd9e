"""The samples of a curriculum against a plain computation; the same at any number of ranks, also resumed."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from helpers import run_ranks
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import xds
from xds.engine.data.analyzer import Metric, analyze
from xds.engine.data.curriculum import CurriculumSampler, Selection, curriculum_loader, shuffled
from xds.pipe.module import PipelineModule
from xds.utils.errors import ConfigError, UsageError

SAMPLES = 120


class Rows(Dataset[Any]):
    """Sample i is [i, i, ...], of 4 values."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


EVERY = [Rows()[at] for at in range(SAMPLES)]


def easy(samples: list[torch.Tensor]) -> Any:
    return np.array([int(sample[0]) * 7 % SAMPLES for sample in samples])


def common(samples: list[torch.Tensor]) -> Any:
    return np.array([int(sample[0]) % 10 for sample in samples])


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("metrics")
    analyze(Rows(), [Metric("easy", easy), Metric("common", common)], folder)
    return folder


def metric(folder: Path, name: str, kind: str = "value", **changes: Any) -> dict[str, Any]:
    """Rises from a third to the whole in 8 steps."""
    most = {"easy": 119, "common": 9}[name] if kind == "value" else 10
    merged = "_percentile_merged" if kind == "percentile" else ""
    return {
        "index_to_sample_path": str(folder / name / f"{name}_index_to_sample{merged}"),
        "index_to_metric_path": str(folder / name / f"{name}_index_to_metric"),
        "difficulty_type": kind,
        "clustering_type": "schedule_based",
        "min_difficulty": most // 3 + 1,
        "max_difficulty": most,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1},
        **changes,
    }


LENGTH = {
    "clustering_type": "single_cluster",
    "min_difficulty": 1,
    "max_difficulty": 4,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [1, 2, 4], "max_step": [2, 4]},
}


def section(metrics: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    inner = {"enabled": True, "data_cluster_path": "unused", "curriculum_metrics": metrics}
    data_sampling = {"enabled": True, "curriculum_learning": inner, **sampling}
    return {"enabled": True, "seed": 5, "data_sampling": data_sampling}


def read(metrics: dict[str, Any]) -> Any:
    config = runs.config(data_efficiency=section(metrics))
    return xds.Config.load(config).data_efficiency.data_sampling.curriculum_learning.metrics()


def selection(metrics: dict[str, Any], batch: int = 12, seed: int = 5) -> Selection:
    return Selection(read(metrics), SAMPLES, batch, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000])
def test_an_order_has_each_place_once_and_another_key_another_order(size: int) -> None:
    orders = [
        shuffled(np.arange(size), np.full(size, size), np.full(size, key, np.uint64))
        for key in range(4)
    ]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size > 5:
        assert len({tuple(order) for order in orders}) == 4
    if size == 5:  # all 120 orders are about as likely
        draw = np.random.default_rng(0)
        keys = np.repeat(draw.integers(0, 1 << 63, 6000).astype(np.uint64), 5)
        found = shuffled(np.tile(np.arange(5), 6000), np.full(30000, 5), keys).reshape(-1, 5)
        counts = Counter(map(tuple, found.tolist()))
        assert len(counts) == 120 and sum((n - 50) ** 2 / 50 for n in counts.values()) < 240


KINDS = {
    "value": lambda folder: {"easy": metric(folder, "easy")},
    "percentile": lambda folder: {"easy": metric(folder, "easy", "percentile")},
    "two": lambda folder: {
        "easy": metric(folder, "easy"),
        "common": metric(folder, "common", "percentile"),
        "length": LENGTH,
    },
    "length": lambda _: {"length": LENGTH},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_samples_up_to_its_difficulty_and_all_as_often(files: Path, kind: str) -> None:
    metrics = KINDS[kind](files)
    chosen = selection(metrics)
    easy_of, common_of = easy(EVERY), common(EVERY)
    by_common = np.argsort(common_of, kind="stable")
    seen: Counter[int] = Counter()
    for number in range(60):
        step = chosen.at(number)
        allowed = np.ones(SAMPLES, bool)
        now = step.difficulties
        if "easy" in metrics:
            limit = now["easy"] if kind != "percentile" else now["easy"] * SAMPLES // 10 - 1
            allowed &= easy_of <= limit
        if "common" in metrics:
            allowed &= np.isin(np.arange(SAMPLES), by_common[: now["common"] * SAMPLES // 10])
        assert allowed[step.samples].all() and len(step.samples) == 12
        if "length" in metrics:
            assert now["length"] == [1, 1, 2, 2][number] if number < 4 else 4
        if "easy" in metrics:
            first, most = metrics["easy"]["min_difficulty"], metrics["easy"]["max_difficulty"]
            assert now["easy"] == min(first + (most - first) * (number + 1) // 8, most)
        seen.update(step.samples.tolist())
    assert set(seen) == set(range(SAMPLES))
    # a cluster gives each sample once before any comes again
    assert max(seen.values()) - min(seen.values()) <= 22


def test_clusters_are_drawn_by_size_and_give_each_sample_once_in_a_round(files: Path) -> None:
    config = {"difficulty": [23, 119], "max_step": [3]}
    parts = {"schedule_type": "fixed_discrete", "schedule_config": config}
    chosen = selection({"easy": metric(files, "easy", **parts)})
    easy_of = easy(EVERY)
    taken = [chosen.at(number).samples for number in range(400)]
    assert sorted(np.concatenate(taken[:2])) == sorted(np.flatnonzero(easy_of <= 23))
    later = easy_of[np.concatenate(taken[3:])]
    assert abs((later <= 23).mean() - 24 / 120) < 0.02
    small = np.concatenate(taken)[easy_of[np.concatenate(taken)] <= 23]
    for at in range(0, len(small) - 24, 24):  # the orders differ, the rounds are whole
        order = small[at : at + 24]
        # a step is shuffled, so two rounds may be mixed inside one
        assert max(Counter(order.tolist()).values()) <= 2
    counts = Counter(small.tolist())
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_difficulty_that_falls_adds_no_sample_twice_and_what_was_reached_stays(
    files: Path,
) -> None:
    config = {"difficulty": [50, 30, 60, 119, 40], "max_step": [1, 2, 3, 4]}
    parts = {"schedule_type": "fixed_discrete", "schedule_config": config}
    chosen = selection({"easy": metric(files, "easy", **parts)})
    steps = [chosen.at(number) for number in range(100)]
    assert [step.difficulties["easy"] for step in steps[:6]] == [50, 30, 60, 119, 119, 119]
    assert chosen._sizes == [51, 10, 59]


def loader(
    metrics: dict[str, Any], rank: int = 0, world_size: int = 1, micro: int = 12, **more: Any
) -> Any:
    how = {"step_samples": 12, "num_epochs": 2, "seed": 5, **more}
    data = how.pop("data", Rows())
    ranks = {"rank": rank, "world_size": world_size, "micro_batch_size": micro}
    return curriculum_loader(data, read(metrics), **ranks, **how)


def steps_of(
    metrics: dict[str, Any],
    ranks: int,
    micro: int,
    first: Any = None,
    last: int = 99,
    leave: int = 0,
    **more: Any,
) -> Any:
    """The samples of each step in order, over all ranks, and the position after them."""
    loaders = [loader(metrics, rank, ranks, micro, **more) for rank in range(ranks)]
    for one in loaders:
        assert first is None or one.resume(first)
    iterators = [iter(one) for one in loaders]
    micros, found = 12 // micro // ranks, []
    for number in range(last):
        batches = [[next(each, None) for each in iterators] for _ in range(micros)]
        if batches[0][0] is None:
            break
        found.append([int(row[0]) for micro in batches for one in micro for row in one])
        if leave == number + 1:
            iterators = [iter(one) for one in loaders]
    return found, loaders[0].position()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("value")
def test_steps_are_the_same_at_any_number_of_ranks_and_resumed(files: Path, kind: str) -> None:
    metrics = KINDS[kind](files)
    whole, end = steps_of(metrics, 1, 12)
    assert len(whole) == 2 * SAMPLES // 12 and end == {"step": 20, "step_samples": 0}
    for ranks, micro in ((2, 3), (2, 6), (3, 4), (4, 1)):
        assert steps_of(metrics, ranks, micro)[0] == whole
    begun, position = steps_of(metrics, 2, 3, last=7)
    assert begun + steps_of(metrics, 3, 2, position)[0] == whole
    assert steps_of(metrics, 1, 12, leave=3)[0] == whole  # an iteration that is left goes on
    assert steps_of(metrics, 1, 4, num_workers=2)[0] == whole
    assert steps_of(metrics, 1, 12, seed=6)[0] != whole
    following, _ = steps_of(metrics, 2, 6, end, last=2)
    assert len(following) == 2


def test_a_resumed_step_goes_on_inside() -> None:
    metrics = {"length": LENGTH}
    one = loader(metrics, 0, 2, 2)
    batches = list(itertools.islice(iter(one), 4))
    again = loader(metrics, 0, 2, 2)
    position = one.position()
    assert position == {"step": 1, "step_samples": 4}
    assert again.resume(position)
    rest = next(iter(again))
    assert torch.equal(rest, list(itertools.islice(iter(loader(metrics, 0, 2, 2)), 5))[4])
    assert len(batches) == 4 and not one.resume({"epoch": 1, "samples": 3})
    # three ranks cannot skip 4 samples: they take the whole step
    three, whole = [loader(metrics, rank, 3, 2) for rank in range(3)], loader(metrics)
    assert all(each.resume(position) for each in three)
    assert whole.resume({"step": 1, "step_samples": 0})
    rows = torch.cat([row for each in three for row in itertools.islice(iter(each), 2)])
    assert sorted(rows[:, 0].tolist()) == sorted(next(iter(whole))[:, 0].tolist())


class Seeds(Rows):
    """Each sample is the seed of the worker that reads it, from which augmentations are drawn."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(torch.initial_seed())


def test_workers_of_a_resumed_iteration_have_the_seeds_of_an_uninterrupted_run() -> None:
    whole, resumed = (loader({"length": LENGTH}, data=Seeds(), num_workers=2) for _ in range(2))
    first, second = ([batch[0].item() for batch in whole] for _ in range(2))
    assert len({*first, *second}) == 2 * 2
    assert resumed.resume({"step": len(first) + 4, "step_samples": 0})
    assert [batch[0].item() for batch in resumed] == second[4:]


def test_the_post_process_function_gets_the_state_of_its_batch(files: Path) -> None:
    """Also where workers have read ahead."""
    for workers in (0, 2):
        one = loader(
            {"length": LENGTH, "easy": metric(files, "easy")}, 0, 2, 2, num_workers=workers
        )
        states: list[Any] = []

        def cut(batch: torch.Tensor, state: Any, kept: list[Any] = states) -> torch.Tensor:
            kept.append(state)
            return batch[:, : state["current_difficulties"]["length"]]

        one.source.post_process = cut
        shapes = [batch.shape[1] for batch in itertools.islice(iter(one), 18)]
        assert shapes == [1] * 6 + [2] * 6 + [4] * 6
        assert [state["curriculum_step"] for state in states] == [1 + at // 3 for at in range(18)]
        assert [state["consumed_samples"] for state in states] == [4 * at for at in range(18)]
        assert [len(state["batch"]) for state in states] == [8, 4, 0] * 6
        assert states[4]["data_cluster_paths"] == [] and states[4]["current_difficulties"]["easy"]


def bad(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"easy": metric(folder, "easy", **changes)}


def test_what_cannot_be_sampled_is_one_sentence(files: Path, tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    other = str(files / "common" / "common_index_to_metric")
    merged = str(files / "easy" / "easy_index_to_sample_percentile_merged")
    for metrics, more, says in (
        (
            bad(files),
            {"data": list(range(90))},
            "has 120 samples, and training_data has 90: analyze",
        ),
        (
            bad(files, index_to_metric_path=other),
            {},
            "has 10 rows, and index_to_sample_path has 120",
        ),
        (
            bad(files, index_to_sample_path=merged, index_to_metric_path=other),
            {},
            "not the percent",
        ),
        (bad(files, index_to_sample_path=str(tmp_path / "no")), {}, "no"),
        (
            bad(
                files, difficulty_type="percentile", index_to_sample_path=merged, max_difficulty=121
            ),
            {},
            "max_difficulty = 121: training_data has 120 samples, too few for so many equal parts",
        ),
        (
            bad(files, min_difficulty=0),
            {"step_samples": 36},
            "select only 15 samples, fewer than tr",
        ),
        (
            {
                "easy": metric(
                    files,
                    "easy",
                    min_difficulty=-9,
                    schedule_config={"total_curriculum_step": 900, "difficulty_step": 1},
                )
            },
            {},
            r"of step 1 \(easy -9\) select no sample",
        ),
        (bad(files), {"data": Stream()}, "Stream, and a curriculum takes samples by their numbers"),
    ):
        with pytest.raises(UsageError, match=says):
            loader(metrics, **more)
    reversed_ = tmp_path / "down"
    from xds.engine.data.indexed import IndexedWriter

    with IndexedWriter(reversed_, np.int64) as writer:
        for value in range(SAMPLES, 0, -1):
            writer.add([value])
    with pytest.raises(UsageError, match="do not ascend"):
        loader(bad(files, index_to_metric_path=str(reversed_)))
    with pytest.raises(UsageError, match="no samples of 0 to 119"):
        loader(bad(files, index_to_sample_path=str(reversed_)))


def test_a_custom_schedule_is_given_before_the_first_step(files: Path) -> None:
    one = loader(bad(files, schedule_type="custom", schedule_config={}))
    with pytest.raises(
        UsageError, match=r"call engine.set_custom_curriculum_learning_schedule\(\{'e"
    ):
        next(iter(one))
    source: CurriculumSampler = one.source
    for functions, says in (
        ({"hard": len}, "no metric 'hard'"),
        ({"easy": 3}, "a function of the step"),
        ({"easy": lambda step: step}, "select only 2 samples"),
    ):
        with pytest.raises(UsageError, match=says):
            source.selection.set_custom(functions)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="select only 2 samples"):
        next(iter(one))
    source.selection.set_custom({"easy": lambda step: 20 * step})
    assert source.selection.at(2).difficulties == {"easy": 60}
    assert len(next(iter(one))) == 12
    with pytest.raises(UsageError, match='set it to "custom"'):
        loader(bad(files)).source.selection.set_custom({"easy": len})


def test_a_config_is_complete_or_one_sentence(files: Path) -> None:
    whole = metric(files, "easy")
    for metrics, changes, says in (
        ({}, {}, "name at least one metric"),
        (
            {"easy": {"min_difficulty": 3}},
            {},
            "needs the key max_difficulty, schedule_type, index_to",
        ),
        ({"easy": whole | {"difficulty_type": "rank"}}, {}, "difficulty_type"),
        ({"easy": whole | {"min_difficulty": 300}}, {}, "at most max_difficulty = 119"),
        ({"easy": whole | {"schedule_config": {}}}, {}, "total_curriculum_step"),
        ({"easy": whole | {"index_to": 3}}, {}, "unknown key"),
        ({"easy": 3}, {}, "must be an object"),
        (
            {
                "easy": whole
                | {"schedule_config": {"total_curriculum_step": "8", "difficulty_step": 1}}
            },
            {},
            "must be numbers",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            xds.Config.load(runs.config(data_efficiency=section(metrics, **changes)))
    off = xds.Config.load(runs.config(data_efficiency=section({"easy": whole}, enabled=False)))
    assert any("data_sampling.enabled = false: curriculum_learning" in note for note in off.notes)
    with pytest.raises(ConfigError, match="chooses the samples as well"):
        both = section({"easy": whole})
        xds.Config.load(runs.config(data_efficiency=both, data_packing={"tokens": 8}))


# -- in the engine ------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """A linear layer that keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([int(one) for one in x[:, 0]])
        return (self.inner(x.mean(1, keepdim=True) / SAMPLES) - 1).square().mean()


def train(
    metrics: dict[str, Any], micro: int, accumulation: int, stage: int, steps: int, how: Any = ()
) -> Any:
    """The samples that this rank has seen, and the loss of each step."""
    config = runs.config(
        stage, samples=micro, accumulation=accumulation, data_efficiency=section(metrics)
    )
    engine = xds.initialize(Recorder(), config, training_data=Rows())
    if how and how[0] == "load":
        engine.load_checkpoint(how[1])
    engine.set_data_post_process_func(
        lambda x, state: x[:, : state["current_difficulties"]["length"]]
    )
    losses = [engine.train_batch().item() for _ in range(steps)]
    if how and how[0] == "save":
        engine.save_checkpoint(how[1])
    seen = engine.module.seen
    engine.destroy()
    return seen, losses


def in_order(found: Any, micro: int) -> list[list[int]]:
    """The samples of each step, from what the ranks have seen."""
    return [
        one
        for micros in zip(*(seen for seen, _ in found), strict=True)
        for one in [list(itertools.chain(*micros))]
    ]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.quick("0")
def test_two_ranks_that_resume_as_three_take_the_samples_of_one(
    files: Path, tmp_path: Path, stage: int
) -> None:
    metrics = KINDS["two"](files)
    (one,) = run_ranks(train, 1, metrics, 12, 1, stage, 10)
    whole, losses = one
    begun = run_ranks(train, 2, metrics, 3, 2, stage, 4, ("save", tmp_path))
    ended = run_ranks(train, 3, metrics, 4, 1, stage, 6, ("load", tmp_path))
    first = list(itertools.chain(*in_order(begun, 3)))
    assert first + list(itertools.chain(*in_order(ended, 4))) == list(itertools.chain(*whole))
    assert begun[0][1] + ended[0][1] == pytest.approx(losses, rel=1e-5)


def refusals(metrics: dict[str, Any]) -> None:
    config = runs.config(data_efficiency=section(metrics))
    plain = xds.initialize(Recorder(), runs.config(), training_data=Rows())
    with pytest.raises(UsageError, match="the engine has no loader with a curriculum"):
        plain.set_data_post_process_func(lambda batch, state: batch)
    with pytest.raises(UsageError, match="the engine has no loader with a curriculum"):
        plain.set_custom_curriculum_learning_schedule({})
    plain.destroy()
    with pytest.raises(UsageError, match="training_data has 7: analyze"):
        xds.initialize(Recorder(), config, training_data=list(range(7)))


def test_refusals_come_on_all_ranks(files: Path) -> None:
    run_ranks(refusals, 2, {"easy": metric(files, "easy")})


def twice(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.stack(samples)[..., None] / SAMPLES
    return batch, batch


def pipeline(metrics: dict[str, Any], stages: int, micro: int) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss)
    config = runs.config(
        1, samples=micro, accumulation=12 // micro, data_efficiency=section(metrics)
    )
    engine = xds.initialize(model, config, training_data=Rows(), collate_fn=twice)

    def cut(batch: Any, state: Any) -> Any:
        return tuple(part[:, : state["current_difficulties"]["length"]] for part in batch)

    engine.set_data_post_process_func(cut)
    found = [engine.train_batch().item() for _ in range(6)]
    engine.destroy()
    return found


def test_stages_take_the_same_samples_and_the_function_changes_their_shapes(files: Path) -> None:
    metrics = KINDS["two"](files)
    (wanted,) = run_ranks(pipeline, 1, metrics, 1, 12)
    for found in run_ranks(pipeline, 2, metrics, 2, 3):
        assert found == pytest.approx(wanted, rel=1e-5)
