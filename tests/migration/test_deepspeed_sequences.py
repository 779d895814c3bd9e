"""Tests of DeepSpeed's names for long sequences: the script cuts the batches and combines the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer import on_ranks
from script_runs import run_script
from test_stock_scripts import SCRIPTS, load
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

transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")


def test_a_script_of_the_alst_tutorial_trains_as_plain_pytorch(tmp_path: Path) -> None:
    options = ["--stage", "3", "--output", "out.json"]
    warm(2).run(run_script, str(SCRIPTS / "long_sequences.py"), str(tmp_path), *options)
    found = json.loads((tmp_path / "out.json").read_text())
    # in one process, in the order in which ranks read their samples
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
    assert found["losses"] == pytest.approx(losses, rel=1e-6)


# -- any model --------------------------------------------------------------------------------------------


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


def expect_the_mean(optimizer: str, clip: float, **params: float) -> None:
    plain, model = Attention(None), Attention(dist.group.WORLD)
    config = {"train_batch_size": 1, "optimizer": {"type": optimizer, "params": params}}
    config |= {"zero_optimization": {"stage": 1}, "gradient_clipping": clip}
    config["train_micro_batch_size_per_gpu"] = 1
    engine, *_ = deepspeed.initialize(model=model, config=config, mesh_param=(1, 2))
    update = getattr(torch.optim, optimizer)(plain.parameters(), **params)
    for step in range(3):
        ids = torch.arange(8).add(step).remainder(11)[None]
        own = slice(4 * engine.global_rank, 4 * engine.global_rank + 4)
        loss = engine(ids[:, own], ids.roll(-1, 1)[:, own])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        expected = plain(ids, ids.roll(-1, 1))
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        update.step()
        update.zero_grad()
        assert total.item() / 2 == pytest.approx(expected.item(), rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)


@on_ranks(2)
def test_a_mesh_of_sequence_ranks_takes_the_mean_of_all_ranks() -> None:
    expect_the_mean("AdamW", 0.1, lr=1e-2, eps=1e-4, weight_decay=0.0)
    expect_the_mean("SGD", 0.0, lr=0.5)  # neither cancels a factor on all gradients


@on_ranks(2)
def test_a_config_with_both_sizes_makes_sequence_ranks_for_any_model() -> None:
    """The script cuts its batches, so that each rank's loss has gradients of its own."""
    sizes = {"data_parallel_size": 1, "sequence_parallel_size": 2}
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 1), config_params=config | sizes)
    group = engine.seq_parallel_group
    loss = torch.tensor(1.0 + dist.get_rank(), requires_grad=True)
    total = loss.clone()
    deepspeed.comm.all_reduce(total, group=group)
    (total / 2).backward()
    assert dist.get_world_size(group) == 2
    assert dist.get_world_size(engine.data_parallel_group) == 1
    assert (total.item(), loss.grad.item()) == (3.0, 0.5)


# -- attention of transformers ----------------------------------------------------------------------------


def llama(attention: str = "sdpa") -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)


def register(model: Any, attention: str = "sdpa", size: int = 2, **options: Any) -> Any:
    return UlyssesSPAttentionHF.register_with_transformers(model, attention, size, 1, **options)


@on_ranks(2, processes=True)
def test_registered_attention_sees_all_tokens_without_an_engine_too() -> None:
    """Tokens of two documents, the second of which begins on rank 1."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

    own, rank = table["sdpa"], dist.get_rank()
    ids = torch.arange(16).view(2, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 2)
    try:
        plain, cut = llama(), llama()
        whole = plain(input_ids=ids, position_ids=positions, use_cache=False).logits
        whole.square().sum().backward()
        register(cut)
        replaced = table["sdpa"]
        register(cut, disable_in_eval=True)  # the second registration replaces the first
        assert own is not replaced is not table["sdpa"]
        mine = slice(4 * rank, 4 * rank + 4)
        inputs = {"input_ids": ids[:, mine], "position_ids": positions[:, mine]}
        part = cut(**inputs, use_cache=False).logits
        torch.testing.assert_close(part, whole[:, mine])
        part.square().sum().backward()
        for found, wanted in zip(cut.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(found.grad)
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4)
        found = cut.eval()(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(found, whole)

        config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
        engine, *_ = deepspeed.initialize(model=llama(), config=config, mpu=register(llama()))
        torch.testing.assert_close(engine(**inputs).logits, whole[:, mine])
        x = torch.zeros(1, 4, 4, 4)
        with pytest.raises(xds.UsageError, match="has no position_ids"):
            cut.train()
            replaced(cut.model.layers[0].self_attn, x, x, x, None)
        with pytest.raises(xds.UsageError, match="keys in a cache"):
            replaced(cut.model.layers[0].self_attn, x[:, :, :1], x, x, None)
    finally:
        table["sdpa"] = own


@on_ranks(2, processes=True)
def test_what_cannot_work_is_one_sentence_on_every_rank() -> None:
    for model, attention, size, said in (
        (llama(), "flash_attention_2", 2, "match model config attn_implementation = 'sdpa'"),
        ("a/path", "eager", 2, "cannot be replaced"),
        ("a/path", "no_such", 2, "transformers has no such attention.*sdpa"),
        ("a/path", "sdpa", 3, "no multiple"),
    ):
        with pytest.raises(ValueError, match=said):
            register(model, attention, size)
    mpu = register("a/path")
    group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
    config = {"optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=llama(), config=config, mpu=mpu)
    assert groups._get_sequence_parallel_world_size() == 2
    assert groups.get_data_parallel_world_size() == 1

    def first(batch: Any) -> Any:
        return next(UlyssesSPDataLoaderAdapter([batch], rank, group, 2, "cpu"))

    ids = torch.ones(1, 5, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(xds.UsageError, match="no position_ids"):
        first(batch)
    with pytest.raises(xds.UsageError, match="5 tokens"):
        first(batch | {"position_ids": ids})
    with pytest.raises(xds.UsageError, match="needs position_ids"):
        engine(input_ids=ids)
    engine.destroy()
