"""Plans that are found for models without one, and dropout in slices."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import tensor_cases
import torch
from helpers import run_ranks
from pipeline_runs import SAME, worst
from torch import Tensor, nn

import xds
from xds.tensor.finding import find_plan
from xds.tensor.styles import ParallelStyle, StyleName
from xds.zero.layout.discover import found_blocks

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

SAMPLES, LENGTH, VOCAB = 2, 12, 61
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 16},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"multi_query": False, "num_kv_heads": 4},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    "phi3": {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,  # its default is outside of this vocabulary
    },
}


def build(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    if name == "gpt":  # the model of examples/gpt
        example = tensor_cases._gpt_module()
        shape = example.Shape(layers=2, width=40, heads=5, context=16, vocabulary=VOCAB)
        return example.GPT(shape)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    rates = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if name == "gpt2" else ()
    config = AutoConfig.for_model(
        name,
        **SIZES[name],
        **dict.fromkeys(rates, dropout),
        vocab_size=VOCAB,
    )
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    return auto.from_config(config)


def batch(step: int, micro_step: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(50 * step + micro_step)
    return torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=draw)


def train(config: dict[str, Any], dropout: float) -> list[tuple[float, float]]:
    engine = xds.initialize(build("gpt2", dropout), config)
    torch.manual_seed(3)
    found = []
    for step in range(2):
        ids = batch(step)
        engine.backward(loss := engine(ids, labels=ids).loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


def config_of(tensor: int, stage: int, **section: Any) -> dict[str, Any]:
    return runs.config(stage, tensor_parallel={"tp_size": tensor, **section})


FOUND = {
    "gpt2": {
        "attn.c_attn": ParallelStyle(StyleName.PACKED_COLWISE, (40, 40, 40), 5),
        "attn.c_proj": ParallelStyle(StyleName.ROWWISE, (40,), 5),
        "mlp.c_fc": ParallelStyle(StyleName.COLWISE, (160,)),
        "mlp.c_proj": ParallelStyle(StyleName.ROWWISE, (160,)),
    },
    "gpt_neox": {
        "attention.query_key_value": ParallelStyle(StyleName.COLWISE, (96,), 4),
        "attention.dense": ParallelStyle(StyleName.ROWWISE, (32,), 4),
        "mlp.dense_h_to_4h": ParallelStyle(StyleName.COLWISE, (56,)),
        "mlp.dense_4h_to_h": ParallelStyle(StyleName.ROWWISE, (56,)),
    },
    "falcon": {
        "self_attention.query_key_value": ParallelStyle(StyleName.COLWISE, (96,), 4),
        "self_attention.dense": ParallelStyle(StyleName.ROWWISE, (32,), 4),
        "mlp.dense_h_to_4h": ParallelStyle(StyleName.COLWISE, (128,)),
        "mlp.dense_4h_to_h": ParallelStyle(StyleName.ROWWISE, (128,)),
    },
    "phi3": {  # its attention reads the number of all heads from the config, so it stays whole
        "mlp.gate_up_proj": ParallelStyle(StyleName.PACKED_COLWISE, (56, 56)),
        "mlp.down_proj": ParallelStyle(StyleName.ROWWISE, (56,)),
    },
    "bloom": {  # its attention returns its weights as well, so it stays whole
        "mlp.dense_h_to_4h": ParallelStyle(StyleName.COLWISE, (128,)),
        "mlp.dense_4h_to_h": ParallelStyle(StyleName.ROWWISE, (128,)),
    },
    "gpt": {
        "attention.qkv": ParallelStyle(StyleName.PACKED_COLWISE, (40, 40, 40), 5),
        "attention.out": ParallelStyle(StyleName.ROWWISE, (40,), 5),
        "up": ParallelStyle(StyleName.COLWISE, (160,)),
        "down": ParallelStyle(StyleName.ROWWISE, (160,)),
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

    meta = model.to("meta")
    assert name not in ("gpt2", "gpt") or find_plan(meta, found_blocks(meta)) == found


def generated_and_trained(name: str) -> float:
    """The difference of the loss from one process, after tokens were generated before any training."""
    ids = batch(0)
    plain = build(name)
    wanted = plain(input_ids=ids, labels=ids).loss.item()
    tokens = plain.eval().generate(ids, max_new_tokens=3, do_sample=False)
    engine = xds.initialize(build(name), config_of(2, 0))
    assert torch.equal(engine.generate(ids, max_new_tokens=3, do_sample=False), tokens)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return abs(loss.item() - wanted)


@pytest.mark.parametrize("name", ["t5", "falcon"])
def test_attention_that_cannot_run_in_slices_stays_whole(name: str) -> None:
    found = find_plan(model := build(name), found_blocks(model))
    # T5's positions are biases of all heads, which its first block hands to the others
    assert any("ttention" in layer for layer in found) is (name != "t5")
    assert max(run_ranks(generated_and_trained, 2, name)) < 1e-5


class Mixing(nn.Module):
    """A norm between its two layers: every column depends on all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)))


def refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with pytest.raises(xds.UsageError, match="has no plan that says"):
        xds.initialize(nn.Sequential(Mixing(), Mixing()), config_of(2, 0))
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 1, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **heads))
    with pytest.raises(xds.UsageError, match="experts of a mixture"):
        xds.initialize(model, config_of(2, 0))


class Writing(nn.Module):
    """It writes to what its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).exp()
        z = y * 2
        y.mul_(3)
        return x + self.down(z + y)


class Listed(nn.Module):
    """Blocks without a forward, next to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Embedding(13, 8), nn.Parameter(torch.zeros(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) + self.shift
        return x


def encoder_in_slices() -> float:
    """In evaluation mode torch's encoder reads the weights of its layers, unless it is told otherwise."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    plain.load_state_dict(model.state_dict())
    x, mask = torch.randn(3, 5, 16), torch.arange(5) > torch.tensor([[4], [3], [2]])
    with torch.no_grad():
        wanted = plain(x), plain(x, src_key_padding_mask=mask)
    engine = xds.initialize(model, config_of(2, 0))
    engine.eval()
    with torch.no_grad():
        found = engine(x), engine(x, src_key_padding_mask=mask)
    assert model.layers[0].linear1.weight.shape == (16, 16)
    return max(
        float((found[0] - wanted[0]).abs().max()),
        float((found[1] - wanted[1])[~mask].abs().max()),
    )


def test_an_encoder_of_torch_evaluates_with_slices() -> None:
    assert max(run_ranks(encoder_in_slices, 2)) < 1e-5


@pytest.mark.parametrize("model", [lambda: nn.Sequential(Writing(), Writing()), Listed])
def test_blocks_that_cannot_be_looked_at_have_no_plan(model: Any) -> None:
    found = model()
    assert find_plan(found, found_blocks(found)) == {}


def test_nothing_found_and_experts_of_a_mixture_are_one_sentence_on_every_rank() -> None:
    run_ranks(refused, 2)


# -- dropout ---------------------------------------------------------------------------------------------


def test_dropout_keeps_tensor_ranks_equal() -> None:
    first, second = run_ranks(train, 2, config_of(2, 2), 0.3)
    assert first == second
    assert first[0] != run_ranks(train, 2, config_of(2, 2), 0.0)[0][0]
    recomputed = config_of(2, 2) | {"activation_checkpointing": {}}  # draws the same numbers
    assert worst(run_ranks(train, 2, recomputed, 0.3)[0], first) <= SAME


def different_seeds(dropout: float) -> str:
    engine = xds.initialize(build("gpt2", dropout), config_of(2, 0))
    torch.manual_seed(engine.global_rank)
    try:
        engine(batch(0), labels=batch(0))
    except xds.UsageError as error:
        return str(error)
    return ""


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

    def forward(self, x: Tensor) -> Tensor:
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
    (inside, outside), (later_inside, later_outside) = first
    assert inside != later_inside and outside != later_outside
