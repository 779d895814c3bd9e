"""Batches by tokens from the config: the same steps at any number of ranks, exact means, rates that follow."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import xds
from xds.engine.data.analyzer import Metric, SequenceLength, analyze
from xds.engine.data.dynamic_batches import dynamic_loader, padded
from xds.engine.data.length_batches import batch_by_seqlens
from xds.engine.data.loaders import InOrder
from xds.engine.optim.variable_batch import VariableBatchSizeLR
from xds.pipe.module import PipelineModule
from xds.utils.errors import ConfigError, UsageError

NUMBER, MOST = 100, 24


class Samples(Dataset[Any]):
    """Sample i has a number of tokens from 1 to 12; all its tokens are i + 1."""

    def __init__(self, has_lengths: bool = True) -> None:
        self._lengths = np.random.default_rng(0).integers(1, 13, NUMBER)
        if has_lengths:
            self.lengths = self._lengths

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < NUMBER:
            raise IndexError(index)
        return [index + 1] * int(self._lengths[index])


def section(**changes: Any) -> dict[str, Any]:
    batching = {"enabled": True, "max_tokens": MOST, **changes}
    return {"enabled": True, "seed": 3, "data_sampling": {"dynamic_batching": batching}}


def read(**changes: Any) -> Any:
    config = runs.config(data_efficiency=section(**changes))
    return xds.Config.load(config).data_efficiency.data_sampling.dynamic_batching


def loader(rank: int = 0, world_size: int = 1, micro: int = 6, **changes: Any) -> Any:
    data = changes.pop("data", Samples())
    ranks = {"rank": rank, "world_size": world_size, "micro_batch_size": micro}
    return dynamic_loader(data, read(**changes), step_batches=6, seed=3, **ranks)


def samples_of(batch: Any) -> list[int]:
    return sorted(int(row[0]) - 1 for row in batch["input_ids"])


@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
def test_steps_are_those_of_batch_by_seqlens_at_any_number_of_ranks(order: str) -> None:
    lengths = Samples().lengths
    batches, sizes, _ = batch_by_seqlens(
        lengths, MOST, sequence_picking_order=order, effective_batch_size=6, seed=3
    )
    wanted = [
        sorted(itertools.chain(*(one for at, one in batches if at == step)))
        for step in range(len(sizes))
    ]
    for ranks, micro in ((1, 6), (2, 1), (3, 2)):
        loaders = [
            loader(rank, ranks, micro, sequence_picking_order=order) for rank in range(ranks)
        ]
        for one in loaders:
            assert one.dataset.inner.sizes == sizes
        each = [list(one) for one in loaders]
        micros = 6 // ranks // micro
        found = [
            sorted(
                itertools.chain(
                    *(samples_of(one) for part in each for one in part[at : at + micros])
                )
            )
            for at in range(0, len(each[0]), micros)
        ]
        assert found == wanted
        assert all(
            (batch["attention_mask"].sum() <= micro * MOST) for part in each for batch in part
        )


def test_samples_are_padded_by_their_columns() -> None:
    first = {"input_ids": [5, 6], "labels": [7, 8], "x": [1, 1]}
    batch = padded([first, {"input_ids": [9], "labels": [9], "x": [2]}])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6], [9, 0]],
        "labels": [[7, 8], [9, -100]],
        "x": [[1, 1], [2, 0]],
        "attention_mask": [[1, 1], [1, 0]],
    }
    assert padded([[1], [2, 3]])["labels"].tolist() == [[1, -100], [2, 3]]
    with pytest.raises(UsageError, match="pass collate_fn"):
        padded([{"input_ids": [[1]]}])


def test_lengths_come_from_the_analyzer_or_the_data_set(tmp_path: Path) -> None:
    analyze(Samples(), [Metric("seqlen", SequenceLength())], tmp_path / "metrics")
    folder = str(tmp_path / "metrics")
    own = loader().dataset.inner.sizes

    class Negative(Samples):
        lengths = np.arange(NUMBER) - 1

        def __init__(self) -> None:
            super().__init__(has_lengths=False)

    assert loader(data=Samples(has_lengths=False), metrics_path=folder).dataset.inner.sizes == own
    for data, changes, says in (
        (Samples(has_lengths=False), {}, "no attribute `lengths`: run `xds data analyze`"),
        (
            Samples(has_lengths=False),
            {"metrics_path": "/no"},
            "there is no /no/seqlen/seqlen_sample",
        ),
        (Samples(), {"metrics_path": "/no"}, "there is no /no/seqlen/seqlen_sample"),
        (Negative(), {}, "`lengths` of training_data has -1: a length must be at least 0"),
        (
            list(range(7)),
            {"metrics_path": folder},
            "has 100 values of .*, and training_data 7 samples",
        ),
        (iter(()), {"metrics_path": folder}, "pass a data set with __len__"),
        (
            Samples(),
            {"max_tokens": 3, "min_batch_size": 4},
            "0 micro-batches of .* lower it, max_tok",
        ),
    ):
        with pytest.raises(UsageError, match=says):
            loader(data=data, **changes)
    assert loader(data=InOrder(Samples())).dataset.inner.sizes == own
    long_ = Samples()
    long_.lengths = long_.lengths + 40
    with pytest.raises(UsageError, match="max_tokens = 24: the shortest sample has 41 tokens"):
        loader(data=long_)
    for changes, says in (
        ({"max_tokens": 0}, "name the tokens of a batch"),
        ({"min_batch_size": 3, "max_batch_size": 2}, "must be at most max_batch_size = 2"),
        ({"lr_scaling_method": "cubic"}, '"linear", "sqrt" or "none"'),
    ):
        with pytest.raises(ConfigError, match=says):
            xds.Config.load(runs.config(data_efficiency=section(**changes)))


# -- in the engine ------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A loss that is a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(NUMBER + 1, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        found = self.out(self.embed(input_ids))[..., 0] - input_ids / 10
        losses: Tensor = (found.square() * attention_mask).sum() / attention_mask.sum()
        return losses


def train(
    stage: int, micro: int, accumulation: int, steps: int, more: dict[str, Any], how: Any = ()
) -> Any:
    """By step: the learning rate, the mean loss, the norm, and this rank's samples."""
    more = dict(more)
    batching = section(sequence_picking_order="random", **more.pop("batching", {}))
    config = runs.config(
        stage, samples=micro, accumulation=accumulation, data_efficiency=batching, **more
    )
    engine = xds.initialize(Model(), config, training_data=Samples())
    if how and how[0] == "load":
        engine.load_checkpoint(how[1])
    found: list[Any] = []
    batches = itertools.chain.from_iterable(itertools.repeat(engine.training_dataloader))
    for _ in range(steps):
        rate, seen = engine.get_lr()[0], []
        for _ in range(accumulation):
            batch = next(batches)
            seen += samples_of(batch)
            engine.backward(engine(**batch), weight=batch["attention_mask"].sum())
            engine.step()
        found.append((rate, engine.mean_loss(), engine.get_global_grad_norm(), seen))
    if how and how[0] == "save":
        engine.save_checkpoint(how[1])
    engine.destroy()
    return found


WARMUP = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 6}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {**WARMUP, "warmup_type": "linear"}}}


@pytest.mark.parametrize("method", ["linear", "sqrt", "none"])
@pytest.mark.quick("sqrt")
def test_rates_follow_the_samples_of_a_step_and_means_are_exact(
    method: str, tmp_path: Path
) -> None:
    more = {**SCHEDULE, "batching": {"lr_scaling_method": method}}
    (whole,) = run_ranks(train, 1, 0, 6, 1, 8, more)
    sizes = loader(sequence_picking_order="random").dataset.inner.sizes
    plain = runs.config(**SCHEDULE)
    engine = run_ranks(plain_rates, 1, plain)[0]
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[method]
    for step, (rate, _, _, seen) in enumerate(whole):
        assert len(seen) == sizes[step % len(sizes)]
        assert rate == pytest.approx(engine[step] * (len(seen) / 6) ** power)
    begun = run_ranks(train, 2, 2, 1, 3, 3, more, ("save", tmp_path))
    ended = run_ranks(train, 3, 2, 2, 1, 5, more, ("load", tmp_path))
    for step in range(8):
        ranks = [
            each[step] if step < 3 else each[step - 3] for each in (begun if step < 3 else ended)
        ]
        assert [one[0] for one in ranks] == pytest.approx([whole[step][0]] * len(ranks))
        for one in ranks:
            assert one[1:3] == pytest.approx(whole[step][1:3], rel=1e-5)
        assert sorted(itertools.chain(*(one[3] for one in ranks))) == sorted(whole[step][3])


def plain_rates(config: dict[str, Any]) -> list[float]:
    engine = xds.initialize(nn.Linear(1, 1), config)
    found = []
    for _ in range(8):
        found.append(engine.get_lr()[0])
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
    engine.destroy()
    return found


def test_a_skipped_step_takes_its_size_with_it_and_schedules_of_torch_are_scaled() -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    base = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = VariableBatchSizeLR(base, optimizer, [4, 2, 6], 4)
    assert rates.get_lr() == [1.0]
    optimizer.step()
    rates.step()
    assert rates.get_last_lr() == [0.25]
    rates.skip_step()
    assert rates.get_lr() == [0.75]
    saved = rates.state_dict()
    rates.step()
    assert rates.get_lr() == [0.25]
    again = torch.optim.SGD([param], lr=3.0)
    other = VariableBatchSizeLR(
        torch.optim.lr_scheduler.ExponentialLR(again, 0.5), again, [4, 2, 6], 4
    )
    other.load_state_dict(saved)
    assert other.get_lr() == [0.75]
    again.step()
    other.step()
    assert other.get_lr() == [0.25]
    with pytest.raises(UsageError, match="another schedule"):
        other.load_state_dict({"last_epoch": 3})


def overflowing() -> list[tuple[float, int]]:
    config = runs.config(
        0, "fp16", samples=6, data_efficiency=section(sequence_picking_order="random")
    )
    engine = xds.initialize(Model(), config, training_data=Samples())
    found, batches = [], iter(engine.training_dataloader)
    for step in range(5):
        batch = next(batches)
        found.append((engine.get_lr()[0], len(batch["input_ids"])))
        loss = engine(**batch)
        engine.backward(loss * torch.inf if step == 1 else loss)
        engine.step()
    assert engine.skipped_steps == 1
    engine.destroy()
    return found


def test_the_engine_keeps_rates_and_batches_together_over_a_skipped_step() -> None:
    (found,) = run_ranks(overflowing, 1)
    assert [rate for rate, _ in found] == pytest.approx([0.01 * size / 6 for _, size in found])


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUMBER + 1, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)[..., 0]


def pair(samples: list[list[int]]) -> tuple[Tensor, Tensor]:
    batch = padded(samples)
    return batch["input_ids"], batch["attention_mask"]


def mean_of(found: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (found.square() * mask).sum() / mask.sum(), mask.sum()


def pipeline(stages: int, micro: int, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = PipelineModule([Head(), Tail()], num_stages=stages, loss_fn=mean_of)
    config = runs.config(
        1,
        samples=micro,
        accumulation=6 // micro,
        data_efficiency=section(sequence_picking_order="random"),
        pipeline={"schedule": "gpipe"},
    )
    engine = xds.initialize(model, config, training_data=Samples(), collate_fn=pair)
    found = [engine.train_batch().item() for _ in range(steps)]
    engine.destroy()
    return found


def test_micro_batches_of_a_pipeline_may_have_different_shapes() -> None:
    (one,) = run_ranks(pipeline, 1, 1, 6, 4)
    for found in run_ranks(pipeline, 2, 2, 1, 4):
        assert found == pytest.approx(one, rel=1e-5)
