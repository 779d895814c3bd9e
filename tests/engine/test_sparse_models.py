"""Models of transformers whose attention the config makes sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor

import xds
from xds.engine.config.config import parse_config
from xds.ops.sparse_attention.layouts import layout_of

transformers = pytest.importorskip("transformers")

TOKENS, LENGTH = 64, 50
SPARSE = {"mode": "variable", "block": 8, "num_random_blocks": 1, "different_layout_per_head": True}
FIXED = {"mode": "fixed", "block": 8, "num_local_blocks": 2}
SIZES = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 128},
    "llama": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "bert": {"num_hidden_layers": 2, "num_attention_heads": 4},
}
NO_DROPOUT = {
    "gpt2": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "llama": {},
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {} if name == "gpt2" else {"hidden_size": 32, "intermediate_size": 64}
    sizes |= {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.AutoConfig.for_model(
        name, **{**sizes, **SIZES[name], **NO_DROPOUT[name], **more}
    )
    kind = (
        transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    )
    return kind.from_config(config)


def batch(step: int) -> dict[str, Tensor]:
    """Every second one is padded."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, TOKENS, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if step % 2:
        mask[0, 40:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def engine_of(name: str, section: dict[str, Any] | None, **more: Any) -> Any:
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, **more}
    if section is not None:
        config["sparse_attention"] = section
    return xds.initialize(build(name), config)


def train(engine: Any, first: int = 0, last: int = 3) -> list[float]:
    found = []
    for step in range(first, last):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def losses(name: str, section: dict[str, Any] | None, more: dict[str, Any]) -> list[float]:
    engine = engine_of(name, section, **more)
    found = train(engine)
    engine.destroy()
    assert not engine.module.config._attn_implementation.startswith("xds")
    return found


@pytest.mark.parametrize("name", SIZES)
def test_the_config_alone_gives_what_a_mask_of_elements_gives(name: str) -> None:
    sgd = {
        "type": "SGD",
        "params": {"lr": 0.1},
    }  # Adam makes large steps of gradients that are noise
    engine = engine_of(name, FIXED, optimizer=sgd)
    rule = engine.config.sparse_attention.rule
    seen = layout_of(rule, 4, 7, 0).bool().repeat_interleave(8, 1).repeat_interleave(8, 2)
    seen = seen[:, :LENGTH, :LENGTH]
    if name != "bert":
        seen = seen.tril()
    plain = build(name)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        inputs = batch(step)
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        inputs["attention_mask"] = seen & inputs["attention_mask"].bool()[:, None, None]
        wanted = plain(**inputs).loss
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    engine.destroy()


def test_layers_and_seeds_have_their_own_random_blocks_and_runs_the_same_ones() -> None:
    engine = engine_of("gpt2", SPARSE)
    rule = engine.config.sparse_attention.rule
    engine.destroy()
    one = layout_of(rule, 4, 7, 0)
    layout_of.cache_clear()
    assert torch.equal(one, layout_of(rule, 4, 7, 0))
    assert not torch.equal(one, layout_of(rule, 4, 7, 1))
    assert not torch.equal(one, layout_of(rule.replace('"seed": 0', '"seed": 1'), 4, 7, 0))
    assert layout_of(rule.replace('blocks": 1', 'blocks": 5'), 4, 3, 0).all()  # too short for it


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.quick("llama")
def test_stages_ranks_and_checkpointing_change_no_bit(name: str) -> None:
    wanted = run_ranks(losses, 2, name, SPARSE, {})
    for stage in (1, 3):
        more: dict[str, Any] = {"zero_optimization": {"stage": stage}}
        if stage == 3:
            more["activation_checkpointing"] = {"enabled": True}
        assert run_ranks(losses, 2, name, SPARSE, more) == wanted, stage


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_slices_are_those_of_one_rank(name: str) -> None:
    section = {**SPARSE, "different_layout_per_head": False}
    wanted = run_ranks(losses, 1, name, section, {})[0]
    sliced = {"tensor_parallel": {"autotp_size": 2}}
    assert run_ranks(losses, 2, name, section, sliced)[0] == pytest.approx(wanted, abs=1e-5)


def piped(stages: int) -> list[float]:
    more = {"gradient_accumulation_steps": 2, "pipeline": {"stages": stages}}
    engine = engine_of("llama", SPARSE, **more)
    found = [engine.train_batch(iter([batch(2 * i), batch(2 * i + 1)])).item() for i in range(3)]
    engine.destroy()
    return found


def test_stages_of_a_pipeline_are_those_of_one_rank() -> None:
    wanted = run_ranks(piped, 1, 1)[0]
    assert run_ranks(piped, 2, 2)[0] == pytest.approx(wanted, abs=1e-5)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    engine = engine_of("gpt2", SPARSE)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, "two")
    wanted = train(engine, 2, 5)
    engine.destroy()
    layout_of.cache_clear()
    engine = engine_of("gpt2", SPARSE)
    engine.load_checkpoint(tmp_path, "two")
    assert train(engine, 2, 5) == wanted
    engine.destroy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", SIZES)
def test_compiled_blocks_have_no_graph_break(name: str) -> None:
    compiled = {"compile": {"enabled": True, "fullgraph": True}}
    wanted = losses(name, SPARSE, {})
    assert losses(name, SPARSE, compiled) == pytest.approx(wanted, abs=1e-5)


def test_bf16_dropout_and_packed_positions_train() -> None:
    engine = engine_of("llama", SPARSE, bf16={"enabled": True})
    assert all(loss < 5 for loss in train(engine))
    inputs = batch(0)
    del inputs["attention_mask"]
    packed = torch.cat([torch.arange(20), torch.arange(30)]).expand(2, -1)
    both = engine(**inputs, position_ids=packed).logits
    alone = engine(input_ids=inputs["input_ids"][:, :20]).logits
    torch.testing.assert_close(both[:, :20], alone, rtol=0.05, atol=0.05)
    engine.destroy()
    model = build("gpt2", attn_pdrop=0.1)
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "sparse_attention": SPARSE}
    engine = xds.initialize(model, config)
    assert all(loss < 5 for loss in train(engine))
    engine.destroy()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_is_that_without(name: str) -> None:
    engine = engine_of(name, {**FIXED, "attention": "unidirectional"})
    engine.eval()
    ids = batch(0)["input_ids"][:1, :21]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        cached = engine.module.generate(ids, **options)
        assert torch.equal(cached, engine.module.generate(ids, use_cache=False, **options))
        with pytest.raises(xds.UsageError, match="dynamic cache"):
            engine.module.generate(ids, cache_implementation="static", **options)
    engine.destroy()


def test_a_cache_that_drops_keys_is_refused() -> None:
    sizes = {**SIZES["llama"], "hidden_size": 32, "intermediate_size": 64, "vocab_size": TOKENS}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=10))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    engine = xds.initialize(model, {**config, "sparse_attention": FIXED})
    engine.eval()
    ids = batch(0)["input_ids"][:1, :21]
    with torch.no_grad(), pytest.raises(xds.UsageError, match="use_cache=False"):
        engine.module.generate(ids, max_new_tokens=12, do_sample=False)
    engine.destroy()


def test_keys_of_another_mode_have_no_effect_and_are_named() -> None:
    def idle(**section: Any) -> list[str]:
        found = parse_config({"sparse_attention": section}).without_effect
        return [f"{path.split('.')[1]}: {why}" for path, why in found]

    assert idle(mode="bigbird", num_local_blocks=8, num_global_blocks=2) == [
        'num_local_blocks: mode "bigbird" has no such key'
    ]
    assert idle(block_causality=True) == ['block_causality: attention is not "unidirectional"']
    assert idle(attention="unidirectional", block_causality=True) == []
    assert (
        idle(mode="fixed", num_random_blocks=0, local_window_blocks=[4]) == []
    )  # as in DeepSpeed's page
    assert idle(mode="dense", block=64) == []


def test_models_that_cannot_be_switched_are_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "sparse_attention": FIXED}
    config["optimizer"] = {"type": "AdamW"}
    with pytest.raises(xds.UsageError, match=r"no model of transformers.*SparseSelfAttention"):
        xds.initialize(torch.nn.Linear(2, 2), config)
    with pytest.raises(xds.UsageError, match="has no attention"):
        small = transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=TOKENS)
        xds.initialize(transformers.MambaForCausalLM(small), config)
    with pytest.raises(xds.UsageError, match="has cross-attention"):
        xds.initialize(build("gpt2", add_cross_attention=True), config)
    model = build("gpt2")
    config["sparse_attention"] = {"mode": "dense"}
    engine = xds.initialize(model, config)
    assert model.config._attn_implementation == "sdpa"
    engine.destroy()
