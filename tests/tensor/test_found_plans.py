"""Tests of plans that are found, of training with DeepSpeed's layer_specs, and of dropout."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from pipeline_runs import SAME, worst
from torch import nn

import xds
from xds.tensor.finding import find_plan
from xds.tensor.words import Way, Word
from xds.zero.core.discover import found_blocks

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, SAMPLES, LENGTH, VOCAB = 5, 2, 12, 61
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-3}
SLOW = pytest.mark.slow
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 16},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 16,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "phi3": {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    },
}


def example_gpt() -> Any:
    """The module of examples/gpt, a model without any plan."""
    name = "example_gpt_model"
    if name not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / "gpt" / "model.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def build(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    if name == "gpt":
        example = example_gpt()
        return example.GPT(
            example.Shape(layers=2, width=40, heads=5, context=16, vocabulary=VOCAB, tied_head=True)
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    rates = {
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "opt": ("dropout", "attention_dropout"),
    }
    config = AutoConfig.for_model(
        name,
        **SIZES[name],
        **dict.fromkeys(rates.get(name, ()), dropout),
        vocab_size=VOCAB,
        attn_implementation="eager" if name == "bloom" else "sdpa",
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config)


def loss_of(model: Any, step: int, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 * step + data_rank)
    ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=generator)
    found = (
        model(ids, labels=ids) if hasattr(model.module, "config") else model(ids, ids.roll(-1, 1))
    )
    return found if isinstance(found, torch.Tensor) else found.loss


def train(name: str, config: dict[str, Any], dropout: float = 0.0) -> list[tuple[float, float]]:
    engine = xds.initialize(build(name, dropout), config)
    torch.manual_seed(3)
    found = []
    for step in range(STEPS):
        loss = loss_of(engine, step, engine.dp_rank)
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


class _Alone:
    """A model in one process, called as an engine is."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@cache
def one_process(name: str, data: int) -> list[tuple[float, float]]:
    model = _Alone(build(name))
    params = list(model.module.parameters())
    optimizer = torch.optim.AdamW(params, **ADAMW)
    found = []
    for step in range(STEPS):
        losses = [loss_of(model, step, rank) / data for rank in range(data)]
        for loss in losses:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(params, float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(loss.item() for loss in losses), norm.item()))
    return found


def config_of(tensor: int, stage: int, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"tp_size": tensor, **section},
    }


@pytest.mark.parametrize(
    ("name", "data", "stage", "cut"),
    [
        ("gpt2", 1, 2, True),
        ("opt", 1, 1, False),
        pytest.param("gpt2", 2, 3, True, marks=SLOW),
        pytest.param("opt", 2, 1, True, marks=SLOW),
        pytest.param("bloom", 1, 0, False, marks=SLOW),
        pytest.param("gpt", 2, 2, False, marks=SLOW),
        ("gpt", 1, 3, False),
    ],
)
def test_models_without_a_plan_equal_one_process(
    name: str, data: int, stage: int, cut: bool
) -> None:
    by_rank = run_ranks(train, 2 * data, name, config_of(2, stage, vocab_parallel_lm_head=cut))
    for first, second in zip(by_rank[::2], by_rank[1::2], strict=True):
        assert first == second
    mean = [
        (sum(step[0] for step in steps) / data, steps[0][1])
        for steps in zip(*by_rank[::2], strict=True)
    ]
    assert worst(mean, one_process(name, data)) <= SAME


def train_in_stages(name: str, config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build(name), config)
    found = []
    for step in range(STEPS):
        generators = [torch.Generator().manual_seed(50 * step + micro) for micro in range(2)]
        ids = [torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=g) for g in generators]
        loss = engine.train_batch(iter([{"input_ids": one, "labels": one} for one in ids]))
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "cut"), [("opt", 3, True), ("gpt2", 0, False)])
def test_found_plans_in_two_pipeline_stages_equal_one_process(
    name: str, stage: int, cut: bool
) -> None:
    config = config_of(2, stage, vocab_parallel_lm_head=cut)
    config |= {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    by_rank = run_ranks(train_in_stages, 4, name, config)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], one_process(name, 2)) <= SAME


def mixture() -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **heads))
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(model, config_of(2, 0))
    return str(caught.value)


def test_experts_of_a_mixture_are_one_sentence_on_every_rank() -> None:
    assert all("experts of a mixture" in text for text in run_ranks(mixture, 2))


FOUND = {
    "gpt2": {
        "attn.c_attn": Way(Word.PACKED_COLWISE, (40, 40, 40), 5),
        "attn.c_proj": Way(Word.ROWWISE, (40,), 5),
        "mlp.c_fc": Way(Word.COLWISE, (160,)),
        "mlp.c_proj": Way(Word.ROWWISE, (160,)),
    },
    "gpt_neox": {
        "attention.query_key_value": Way(Word.COLWISE, (96,), 4),
        "attention.dense": Way(Word.ROWWISE, (32,), 4),
        "mlp.dense_h_to_4h": Way(Word.COLWISE, (56,)),
        "mlp.dense_4h_to_h": Way(Word.ROWWISE, (56,)),
    },
    "phi3": {
        "self_attn.qkv_proj": Way(Word.PACKED_COLWISE, (32, 16, 16), 2),
        "self_attn.o_proj": Way(Word.ROWWISE, (32,), 2),
        "mlp.gate_up_proj": Way(Word.PACKED_COLWISE, (56, 56)),
        "mlp.down_proj": Way(Word.ROWWISE, (56,)),
    },
    "bloom": {  # its attention returns its weights as well, so it stays whole
        "mlp.dense_h_to_4h": Way(Word.COLWISE, (128,)),
        "mlp.dense_4h_to_h": Way(Word.ROWWISE, (128,)),
    },
    "gpt": {
        "attention.qkv": Way(Word.PACKED_COLWISE, (40, 40, 40), 5),
        "attention.out": Way(Word.ROWWISE, (40,), 5),
        "up": Way(Word.COLWISE, (160,)),
        "down": Way(Word.ROWWISE, (160,)),
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_the_layout_of_fused_layers_is_found(name: str) -> None:
    model = build(name)
    model.train()
    blocks = found_blocks(model)
    state = torch.get_rng_state()
    found = find_plan(model, blocks)
    for block, _ in blocks:
        own = {n.removeprefix(f"{block}."): way for n, way in found.items() if n.startswith(block)}
        assert own == FOUND[name]
    assert len(found) == len(blocks) * len(FOUND[name])
    assert torch.equal(torch.get_rng_state(), state) and all(m.training for m in model.modules())


@pytest.mark.parametrize("name", ["gpt2", "gpt"])
def test_the_layout_is_found_on_the_meta_device(name: str) -> None:
    model = build(name).to("meta")
    blocks = found_blocks(model)
    wanted = {f"{block}.{inner}": way for block, _ in blocks for inner, way in FOUND[name].items()}
    assert find_plan(model, blocks) == wanted


class Mixing(nn.Module):
    """A norm between its two layers: every column depends on all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


def nothing_found() -> str:
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(nn.Sequential(Mixing(), Mixing()), config_of(2, 0))
    return str(caught.value)


def test_a_model_in_which_nothing_is_found_is_one_sentence_on_every_rank() -> None:
    assert all("has no plan that says" in text for text in run_ranks(nothing_found, 2))


# -- dropout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_keeps_tensor_ranks_equal(checkpointed: bool) -> None:
    config = config_of(2, 2)
    if checkpointed:
        config["activation_checkpointing"] = {}
    first, second = run_ranks(train, 2, "gpt2", config, 0.3)
    assert first == second
    assert first[0] != run_ranks(train, 2, "gpt2", config_of(2, 2), 0.0)[0][0]
    if checkpointed:  # recomputed blocks draw the same numbers
        assert worst(first, run_ranks(train, 2, "gpt2", config_of(2, 2), 0.3)[0]) <= SAME


def different_seeds(dropout: float) -> str:
    engine = xds.initialize(build("gpt2", dropout), config_of(2, 0))
    torch.manual_seed(engine.global_rank)
    if not dropout:
        loss_of(engine, 0, 0)
        return ""
    with pytest.raises(xds.UsageError) as caught:
        loss_of(engine, 0, 0)
    return str(caught.value)


def test_dropout_with_different_seeds_is_one_sentence_on_every_rank() -> None:
    assert all("different states of random" in text for text in run_ranks(different_seeds, 2, 0.1))
    assert run_ranks(different_seeds, 2, 0.0) == ["", ""]


class Dropping(nn.Module):
    """Keeps what its dropouts have drawn: `inside` works on what is cut, `outside` on what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)
        self.drawn: list[tuple[list[bool], list[bool]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inside(torch.ones_like(self.up(x)))
        outer = self.outside(torch.ones_like(self.down(self.up(x) * inner)))
        self.drawn.append((inner.flatten().bool().tolist(), outer.flatten().bool().tolist()))
        return x + self.down(self.up(x) * inner) * outer


def draws() -> tuple[list[Any], int]:
    torch.manual_seed(1)
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    engine = xds.initialize(nn.Sequential(Dropping(), Dropping()), config_of(2, 0, plan=plan))
    torch.manual_seed(5)
    x = torch.randn(SAMPLES, LENGTH, 8)
    engine.backward(engine(x).square().mean())
    found = [pair for block in engine.module for pair in block.drawn[-1:]]
    engine.destroy()
    return found, int(torch.randint(1 << 30, ()))


def test_dropout_differs_where_activations_are_cut_and_is_equal_where_they_are_whole() -> None:
    (first, state), (second, other) = run_ranks(draws, 2)
    assert state == other
    for (inside, outside), (inside_2, outside_2) in zip(first, second, strict=True):
        assert inside != inside_2 and outside == outside_2
    assert first[0] != first[1]


# -- layer_specs --------------------------------------------------------------------------------------


def train_with_specs() -> list[tuple[float, float]]:
    entries = [
        {"patterns": [".*c_attn.weight"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [".*c_fc.weight"], "partition_type": "column"},
        {"patterns": [".*c_proj.weight"], "partition_type": "row"},
    ]
    return train("gpt2", config_of(2, 0, partition_config={"layer_specs": entries}))


@pytest.mark.slow
def test_layer_specs_train_as_one_process() -> None:
    assert worst(run_ranks(train_with_specs, 2)[0], one_process("gpt2", 1)) <= SAME
