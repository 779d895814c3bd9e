"""Tests of sequence parallelism under the engine: five steps equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from pipeline_runs import SAME, worst
from torch import nn
from warm_ranks import warm

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, SAMPLES, VOCAB = 5, 2, 61
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}


def build(name: str, kv_heads: int = 2, heads: int = 4) -> nn.Module:
    """A small model of transformers; mistral attends to the last five tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 56, "num_hidden_layers": 2}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": VOCAB}
    more: dict[str, Any] = {"sliding_window": 5} if name == "mistral" else {}
    if name in ("opt", "biogpt"):
        more |= {"ffn_dim": 56, "word_embed_proj_dim": 8 * heads, "dropout": 0.0}
        more |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0}
    more |= {"attn_implementation": "sdpa", "use_cache": False, "pad_token_id": 0}
    config = AutoConfig.for_model(name, **sizes, **counts, **more)
    return AutoModelForCausalLM.from_config(config)


def batch(kind: str, step: int, data_rank: int) -> dict[str, torch.Tensor]:
    """kind: "plain", "padded" (with unequal numbers of labels), "left", "packed" or "odd" (13 tokens)."""
    draw = torch.Generator().manual_seed(50 * step + data_rank)
    length = 13 if kind == "odd" else 12
    ids = torch.randint(3, VOCAB, (SAMPLES, length), generator=draw)
    found = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        found["labels"][mask == 0] = -100
        found["labels"][1, :3] = -100
        found["attention_mask"] = mask
    if kind == "left":  # padded on the left, by more tokens than a rank has
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][0, :7] = 0
        found["labels"][0, :7] = -100
    if kind == "packed":
        found["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)]).repeat(SAMPLES, 1)
        found["labels"][:, 7] = -100
    return found


def train(model: tuple[Any, ...], kind: str, config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build(*model), config)
    found = []
    for step in range(STEPS):
        loss = engine(**batch(kind, step, engine.dp_rank)).loss
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@cache
def one_process(model: tuple[Any, ...], kind: str, data: int) -> list[tuple[float, float]]:
    whole = build(*model)
    params = list(whole.parameters())
    optimizer = torch.optim.AdamW(params, **ADAMW)
    found = []
    for step in range(STEPS):
        losses = [whole(**batch(kind, step, rank)).loss / data for rank in range(data)]
        for loss in losses:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(params, float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(loss.item() for loss in losses), norm.item()))
    return found


def config_of(sequence: int, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "sequence_parallel_size": sequence,
        **more,
    }


@pytest.mark.parametrize(
    ("model", "kind", "sequence", "stage"),
    [
        (("llama",), "padded", 2, 3),
        (("llama", 1), "packed", 2, 2),  # one head of keys, copied
        (("mistral",), "odd", 2, 1),  # a sliding window
        (("opt",), "left", 2, 1),  # positions without padding
        pytest.param(("biogpt",), "left", 2, 1, marks=pytest.mark.slow),
        # heads and tokens that do not divide
        pytest.param(("llama", 2, 4), "odd", 3, 0, marks=pytest.mark.slow),
    ],
)
def test_sequence_ranks_equal_one_process(
    model: tuple[Any, ...], kind: str, sequence: int, stage: int
) -> None:
    by_rank = warm(sequence).run(train, model, kind, config_of(sequence, stage))
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], one_process(model, kind, 1)) <= SAME


def test_two_data_ranks_of_two_sequence_ranks_equal_one_process() -> None:
    by_rank = warm(4).run(train, ("llama",), "padded", config_of(2, 1))
    assert (by_rank[0], by_rank[2]) == (by_rank[1], by_rank[3])
    mean = [((a[0] + b[0]) / 2, a[1]) for a, b in zip(by_rank[0], by_rank[2], strict=True)]
    assert worst(mean, one_process(("llama",), "padded", 2)) <= SAME


def test_recomputed_blocks_equal_one_process() -> None:
    config = config_of(2, 3, activation_checkpointing={"enabled": True})
    found = warm(2).run(train, ("llama",), "packed", config)[0]
    assert worst(found, one_process(("llama",), "packed", 1)) <= SAME


def count_bytes(config: dict[str, Any]) -> int:
    engine = xds.initialize(build("llama"), config)
    engine(**batch("plain", 0, 0))  # the first forward is proven on a few tokens
    before: int = engine.bytes_sent()["sequence heads"]
    engine.backward(engine(**batch("plain", 0, 0)).loss)
    sent: int = engine.bytes_sent()["sequence heads"]
    engine.destroy()
    return sent - before


def test_a_layer_sends_its_heads_once_in_each_pass() -> None:
    tokens, width, kv_width = SAMPLES * 6, 32, 16
    a_pass = 4 * tokens * (2 * width + 2 * kv_width) // 2  # fp32; half of each tensor is sent
    assert warm(2).run(count_bytes, config_of(2, 1)) == [2 * 2 * a_pass] * 2  # 2 layers, 2 passes


def save_or_load(folder: str, config: dict[str, Any], loads: bool) -> list[float]:
    engine = xds.initialize(build("llama"), config)
    if loads:
        engine.load_checkpoint(folder)
    found = []
    for step in range(2):
        engine.backward(loss := engine(**batch("plain", step + 2 * loads, 0)).loss)
        engine.step()
        found.append(loss.item())
    if not loads:
        engine.save_checkpoint(folder)
    engine.destroy()
    return found


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_checkpoint_loads_at_another_number_of_sequence_ranks(
    saved: int, loaded: int, tmp_path: Any
) -> None:
    first = warm(saved).run(save_or_load, str(tmp_path), config_of(saved, 1), False)[0]
    found = first + warm(loaded).run(save_or_load, str(tmp_path), config_of(loaded, 2), True)[0]
    wanted = [loss for loss, _ in one_process(("llama",), "plain", 1)][:4]
    assert found == pytest.approx(wanted, rel=1e-6)


def refused(kind: str) -> str:
    model = nn.Linear(4, 4) if kind == "plain model" else build("llama")
    if kind == "eager":
        model.config._attn_implementation = "eager"
    size = 2
    try:
        engine = xds.initialize(model, config_of(size, 1))
        given = batch("plain", 0, 0)
        if kind == "other batches":
            given = batch("plain", engine.global_rank, 0)
        if kind == "no labels":
            del given["labels"]
        if kind == "cached":
            engine.module.config.use_cache = True
            given = batch("packed", 0, 0)
        if kind == "short":
            given = {name: value[:, :1] for name, value in given.items()}
        engine(**given)
    except xds.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("plain model", "Linear is not a causal language model of transformers"),
        ("eager", 'attn_implementation = "eager"'),
        ("other batches", "sequence_parallel_size = 2: ranks 0 and 1 of a sequence group"),
        ("no labels", "pass labels="),
        ("short", "has 1 tokens"),
        ("cached", "set model.config.use_cache to false"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(kind: str, part: str) -> None:
    assert all(part in message for message in warm(2).run(refused, kind))


def with_a_mask_of_its_own() -> str:
    """A model whose attention sees all tokens, after and before."""
    from transformers.models.llama import modeling_llama

    def all_tokens(**inputs: Any) -> torch.Tensor:
        length = inputs["inputs_embeds"].shape[1]
        return torch.ones(1, 1, length, length, dtype=torch.bool)

    engine_model = build_for_masks()
    plain, modeling_llama.create_causal_mask = modeling_llama.create_causal_mask, all_tokens
    try:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "sequence_parallel_size": 2,
        }
        engine = xds.initialize(engine_model, config)
        ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
        with pytest.raises(xds.UsageError) as caught:
            engine(input_ids=ids, labels=ids)
        engine.destroy()
    finally:
        modeling_llama.create_causal_mask = plain
    return str(caught.value)


def build_for_masks() -> Any:
    from tensor_cases import build

    return build("llama")


def test_a_mask_that_is_not_rebuilt_is_found() -> None:
    for said in warm(2).run(with_a_mask_of_its_own):
        assert "its attention has a mask of its own" in said


def packed_batches(step: int) -> list[dict[str, torch.Tensor]]:
    """In the first micro-batch a document begins among the tokens of rank 0, in the second of rank 1."""
    found = [batch("plain", 2 * step + at, 0) for at in range(2)]
    for given, begin in zip(found, (4, 9), strict=True):
        positions = torch.cat([torch.arange(begin), torch.arange(12 - begin)])
        given["position_ids"] = positions.repeat(SAMPLES, 1)
    return found


def train_stages(config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build("llama"), config)
    found = []
    for step in range(2):
        loss = engine.train_batch(iter(packed_batches(step)))
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


def test_documents_that_begin_elsewhere_in_each_micro_batch_of_a_pipeline() -> None:
    config = config_of(2, 1, pipeline={"stages": 2}, gradient_accumulation_steps=2)
    by_rank = warm(4).run(train_stages, config)
    whole = build("llama")
    optimizer = torch.optim.AdamW(whole.parameters(), **ADAMW)
    wanted = []
    for step in range(2):
        losses = [whole(**given).loss / 2 for given in packed_batches(step)]
        sum(losses).backward()  # type: ignore[union-attr]
        norm = nn.utils.clip_grad_norm_(whole.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        wanted.append((sum(loss.item() for loss in losses), norm.item()))
    assert all(worst(found, wanted) <= SAME for found in by_rank)


def gather() -> tuple[torch.Tensor, str]:
    """Logits of both data ranks without labels; and the message for those with labels, which are cut."""
    engine = xds.initialize(
        build("llama"),
        {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "sequence_parallel_size": 2,
        },
    )
    engine.eval()
    mine = batch("plain", 0, engine.dp_rank)
    with torch.no_grad():
        whole = engine.gather_for_metrics(engine(input_ids=mine["input_ids"]).logits, None)
        with pytest.raises(xds.UsageError) as error:
            engine.gather_for_metrics(engine(**mine).logits, None)
    engine.destroy()
    return whole, str(error.value)


def test_metrics_count_the_samples_of_sequence_ranks_once() -> None:
    model = build("llama").eval()
    with torch.no_grad():
        parts = [model(input_ids=batch("plain", 0, rank)["input_ids"]).logits for rank in (0, 1)]
    expected = torch.stack(parts, 1).flatten(0, 1)  # a row of each data rank in turn
    for whole, message in warm(4).run(gather):
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
        assert "ranks [0, 1] share samples" in message and "without labels" in message
