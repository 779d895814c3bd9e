"""gather_for_metrics: what one process would have, from all data ranks, each sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from pipeline_runs import LENGTH, VOCAB, Model
from runs import config
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import xds
from xds import UsageError

WIDTH = 4


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def samples(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, WIDTH, generator=draw), torch.arange(count)


def evaluate(stage: int, count: int, each_batch: bool) -> Any:
    """Logits and numbers of `count` samples, gathered after the loop or after each batch."""
    engine = xds.initialize(build(), config(stage))
    engine.eval()
    dataset = TensorDataset(*samples(count))
    sampler = DistributedSampler(dataset, engine.dp_world_size, engine.dp_rank, shuffle=False)
    found: list[dict[str, Any]] = []
    seen = 0
    with torch.no_grad():
        for x, number in DataLoader(dataset, batch_size=2, sampler=sampler):
            mine: dict[str, Any] = {"logits": engine(x), "more": (number, number % 2 == 0)}
            if each_batch:
                mine = engine.gather_for_metrics(mine, count - seen)
                seen += len(mine["logits"])
            found.append(mine)
    pairs = zip(*(item["more"] for item in found), strict=True)
    whole = {
        "logits": torch.cat([item["logits"] for item in found]),
        "more": tuple(torch.cat(part) for part in pairs),
    }
    whole = whole if each_batch else engine.gather_for_metrics(whole, count)
    engine.destroy()
    return whole


@pytest.mark.parametrize(
    ("world_size", "stage", "count", "each_batch"),
    [(1, 0, 7, True), (2, 3, 9, True), (2, 0, 8, False), (3, 0, 2, True), (3, 1, 13, False)],
)
def test_every_rank_gets_what_one_process_has(
    world_size: int, stage: int, count: int, each_batch: bool
) -> None:
    x, number = samples(count)
    with torch.no_grad():
        expected = build()(x)
    for found in run_ranks(evaluate, world_size, stage, count, each_batch):
        torch.testing.assert_close(found["logits"], expected, rtol=1e-6, atol=1e-6)
        assert found["more"][0].tolist() == number.tolist()
        assert found["more"][1].tolist() == (number % 2 == 0).tolist()


def gather_unequal_parts() -> Any:
    """No sampler fills up: 5 samples over 3 ranks, in bf16, of which one rank has none."""
    engine = xds.initialize(build(), config())
    mine = torch.arange(5)[engine.dp_rank :: 3]
    values = torch.stack([mine, -mine], 1).to(torch.bfloat16).requires_grad_()
    first = engine.gather_for_metrics(values, None)
    second = engine.gather_for_metrics((torch.ones(2 * engine.dp_rank, 3),), 6)
    assert not first.requires_grad and second[0].shape == (6, 3)
    return first


def test_ranks_may_have_different_numbers_of_rows() -> None:
    for found in run_ranks(gather_unequal_parts, 3):
        assert found.dtype == torch.bfloat16
        assert found.tolist() == [[at, -at] for at in range(5)]


def messages(*calls: tuple[Any, Any]) -> list[str]:
    """What each call raises on this rank; `values` may be one for each rank."""
    engine = xds.initialize(build(), config())
    found = []
    for values, num_samples in calls:
        values = values[engine.dp_rank] if isinstance(values, list) else values
        try:
            engine.gather_for_metrics(values, num_samples)
            found.append("")
        except UsageError as error:
            found.append(str(error))
    return found


def test_mistakes_of_one_rank_are_errors_on_all() -> None:
    good = torch.ones(2)
    calls: list[tuple[Any, Any, str]] = [
        ([good, torch.tensor(1.0)], 4, 'on rank 1: .* reduction="none"'),
        ([good, [good]], 4, "on rank 1: values = a list: .*torch.cat"),
        ([good, {"a": good, "b": torch.ones(3)}], 4, r"on rank 1: .*values\['a'\]: 2"),
        ([good, torch.ones(2, 5)], 4, r"data rank 1 has float32 \['rows', 5\]: .* pad"),
        ([good, good.long()], 4, "data rank 1 has int64"),
        ([good, {"a": good}], 4, "data rank 0 has float32"),
        (good, 2, r"\[2, 2\] rows for num_samples = 2.* DistributedSampler"),
        (good, -1, "num_samples = -1: must be a whole number"),
        ((good, {}), 4, ""),
        ({}, 4, "without a tensor"),
    ]
    given = [(values, num_samples) for values, num_samples, _ in calls]
    first, second = run_ranks(messages, 2, *given)
    assert first == second
    for text, (*_, pattern) in zip(first, calls, strict=True):
        assert (pattern == "") == (text == "")
        if pattern:
            with pytest.raises(AssertionError, match=pattern):
                raise AssertionError(text)


class Scored(Model):
    """Returns (loss, the logits)."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        kept = []
        hook = self.head.register_forward_hook(lambda _, __, output: kept.append(output))
        loss = super().forward(tokens, targets)
        hook.remove()
        return loss, kept[0]


def tokens_of(count: int) -> Tensor:
    return torch.randint(2, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(count))


def evaluate_pipeline(count: int) -> Tensor:
    torch.manual_seed(0)
    engine = xds.initialize(Scored(2), config(accumulation=2, pipeline={"stages": 2}))
    dataset = TensorDataset(tokens_of(count), tokens_of(count))
    sampler = DistributedSampler(dataset, engine.dp_world_size, engine.dp_rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    _, outputs = engine.eval_batch(iter(loader), len(loader), return_logits=True)
    mine = torch.cat([logits for _, logits in outputs]) if engine.is_last_stage() else None
    gathered: Tensor = engine.gather_for_metrics(mine, count)
    engine.destroy()
    return gathered


def test_the_last_stage_of_a_pipeline_has_the_values() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        expected = Scored(2)(tokens_of(5), tokens_of(5))[1]
    for found in run_ranks(evaluate_pipeline, 4, 5):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def gather_over_tensor_ranks() -> Any:
    """2 data x 2 tensor ranks: the second gather has other values on tensor ranks.

    The last data rank has one sample, a slice with a stride of 2.
    """
    plan = {"0": "colwise", "2": "rowwise"}
    engine = xds.initialize(build(), config(tensor_parallel={"tp_size": 2, "plan": plan}))
    x, number = samples(3)
    part = slice(engine.dp_rank, None, engine.dp_world_size)
    with torch.no_grad():
        found = engine.gather_for_metrics((engine(x[part]), number[part]), 3)
    with pytest.raises(UsageError, match=r"ranks \[0, 1\] share samples, but have other values"):
        engine.gather_for_metrics(torch.full((1,), dist.get_rank()), 2)
    return found


def test_tensor_ranks_count_once() -> None:
    x, number = samples(3)
    with torch.no_grad():
        expected = build()(x)
    for logits, numbers in run_ranks(gather_over_tensor_ranks, 4):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert numbers.tolist() == number.tolist()
