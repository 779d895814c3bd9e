"""Tests of DeepSpeed's names for long sequences: the script cuts the batches and combines the losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepspeed_scripts import load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from warm_ranks import warm

import xds
from xds import deepspeed
from xds.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from xds.deepspeed.sequence.layer import DistributedAttention
from xds.deepspeed.utils import groups

pytest.importorskip("transformers", reason="pip install -e '.[test]'")


def plain_losses() -> list[float]:
    """In one process, in the order in which ranks read their samples."""
    script = load("long_sequences.py")
    model = script.build("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    losses = []
    for sample in script.make_samples():
        loss = model(**{name: value.unsqueeze(0) for name, value in sample.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_here(stage: int, output: str) -> None:
    sys.argv = ["long_sequences.py", "--stage", str(stage), "--output", output]
    load("long_sequences.py").main()


def test_a_script_of_the_alst_tutorial_trains_as_plain_pytorch(tmp_path: Path) -> None:
    warm(2).run(run_here, 3, str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["losses"] == pytest.approx(plain_losses(), rel=1e-6)


class Attention(nn.Module):
    """One layer whose script cuts its tokens; group: the ranks that share a sequence, None: one rank."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.attend: Any = attend if group is None else DistributedAttention(attend, group)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids).unflatten(-1, (2, -1))
        y = self.attend(x, x, x, 0).flatten(2)
        return cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def attend(q: Tensor, k: Tensor, v: Tensor, _: int = 0) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def with_a_mesh() -> list[float]:
    deepspeed.init_distributed()
    config = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.1,
    }
    world = torch.distributed.group.WORLD
    model = Attention(world)
    engine, *_ = deepspeed.initialize(model=model, config=config, mesh_param=(1, 2))
    losses = []
    for step in range(3):
        ids = torch.arange(8).add(step).remainder(11)[None]
        own = slice(4 * engine.global_rank, 4 * engine.global_rank + 4)
        loss = engine(ids[:, own], ids.roll(-1, 1)[:, own])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    engine.destroy()
    return losses


def test_a_mesh_of_sequence_ranks_takes_the_mean_of_all_ranks() -> None:
    model = Attention(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    wanted = []
    for step in range(3):
        ids = torch.arange(8).add(step).remainder(11)[None]
        loss = model(ids, ids.roll(-1, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for found in warm(2).run(with_a_mesh):
        assert found == pytest.approx(wanted, rel=1e-5)


def refusals() -> list[str]:
    said = []
    model = load("long_sequences.py").build("sdpa")
    config = {"optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 1}
    mpu = UlyssesSPAttentionHF.register_with_transformers("x", "sdpa", 2, 1)
    assert mpu is not None
    group = mpu.get_sequence_parallel_group()
    rank = mpu.get_sequence_parallel_rank()

    def first(batch: Any) -> Any:
        return next(UlyssesSPDataLoaderAdapter([batch], rank, group, 2, "cpu"))

    ids = torch.ones(1, 5, dtype=torch.int64)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    assert groups._get_sequence_parallel_world_size() == 2
    assert groups.get_data_parallel_world_size() == 1
    for call in (
        lambda: UlyssesSPAttentionHF.register_with_transformers("x", "eager", 2, 1),
        lambda: UlyssesSPAttentionHF.register_with_transformers("x", "sdpa", 3, 1),
        lambda: first({"input_ids": ids, "labels": ids}),
        lambda: first({"input_ids": ids, "labels": ids, "position_ids": ids}),
        lambda: engine(input_ids=ids),
    ):
        with pytest.raises(xds.UsageError) as caught:
            call()
        said.append(str(caught.value))
    engine.destroy()
    return said


def test_what_cannot_work_is_one_sentence_on_every_rank() -> None:
    parts = (
        "cannot be replaced",
        "no multiple",
        "no position_ids",
        "5 tokens",
        "needs position_ids",
    )
    for said in warm(2).run(refusals):
        assert all(part in text for part, text in zip(parts, said, strict=True)), said
