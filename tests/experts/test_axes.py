"""Experts beside the other axes: tensor and sequence ranks, pipeline stages, recomputation, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from runs import config, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import xds
from xds.experts import exchange
from xds.ops.recomputation import FirstCalls
from xds.pipe import LayerSpec, PipelineModule

STEPS, COUNT, SAMPLES, VOCAB = 2, 2, 2, 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mixtral() -> Any:
    sizes = {**SIZES, "num_hidden_layers": 4}
    return MixtralForCausalLM(MixtralConfig(num_key_value_heads=4, num_local_experts=4, **sizes))


def qwen3() -> Any:
    """The first layer has no experts, and so has the first of two stages."""
    sizes = {"moe_intermediate_size": 24, "num_experts": 8, "decoder_sparse_step": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_key_value_heads=2, **sizes, **SIZES))


def deepseek() -> Any:
    """Groups of experts, and shared experts, which tensor ranks cut."""
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
    attention = {"q_lora_rank": 16, "kv_lora_rank": 8, "v_head_dim": 8}
    attention |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(first_k_dense_replace=1, **experts, **attention, **SIZES)
    )


def build(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def batches(step: int, data_rank: int, length: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    ids = torch.randint(3, VOCAB, (COUNT, SAMPLES, length), generator=generator)
    return [{"input_ids": one, "labels": one} for one in ids]


def trained(make: Any, given: dict[str, Any], length: int) -> Any:
    engine = xds.initialize(build(make), given)
    steps = []
    for step in range(STEPS):
        loss = engine.train_batch(iter(batches(step, engine.dp_rank, length)))
        steps.append((float(loss), float(engine.get_global_grad_norm())))
    values = engine.state_dict()
    engine.destroy()
    return steps, values


def check(make: Any, world_size: int, data: int, given: dict[str, Any], length: int = 9) -> None:
    """Losses, norms and parameters are those of one process."""
    optimizer = given["optimizer"]
    model = build(make)
    wanted = plain(
        model,
        STEPS,
        lambda step: [one for rank in range(data) for one in batches(step, rank, length)],
        lambda output: output.loss,
        optimizer=optimizer["type"],
        **optimizer["params"],
    )
    ranks = run_ranks(trained, world_size, make, given, length)
    for steps, _ in ranks:
        assert steps == [pytest.approx(tuple(step), rel=1e-5) for step in wanted]
    values = {name: value for _, part in ranks for name, value in (part or {}).items()}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)


def section(size: int | str) -> dict[str, Any]:
    return {"enabled": True, "autoep_size": size}


SGD = {"optimizer": "SGD", "params": {"lr": 0.1}}
ADAMW = {"optimizer": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}}
TENSOR = {"tensor_parallel": {"tp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2}
RECOMPUTE = {"activation_checkpointing": {"enabled": True}}


def stages(schedule: str, **keys: Any) -> dict[str, Any]:
    return {"pipeline": {"stages": 2, "schedule": schedule, **keys}}


# model, ranks, data ranks, ranks of experts, stage, optimizer, axes, tokens of a sample
AXES = {
    "tensor, E = 1": (deepseek, 2, 1, 1, 1, SGD, TENSOR, 9),
    "tensor, E = 2, uneven": (qwen3, 2, 1, 2, 0, SGD, {**TENSOR, **RECOMPUTE}, 9),
    "tensor, E above it": (mixtral, 4, 2, 4, 3, SGD, TENSOR, 9),
    "tensor, E below it": (mixtral, 4, 1, 2, 2, ADAMW, {"tensor_parallel": {"tp_size": 4}}, 3),
    "sequence": (deepseek, 2, 1, 2, 2, SGD, SEQUENCE, 8),
    "zero-bubble": (mixtral, 4, 2, 2, 1, SGD, {**stages("zero_bubble"), **RECOMPUTE}, 9),
    "gpipe": (mixtral, 2, 1, 1, 1, ADAMW, {**stages("gpipe"), **RECOMPUTE}, 9),
    "interleaved": (mixtral, 4, 2, 2, 3, SGD, stages("interleaved_1f1b", chunks=2), 9),
    "all": (qwen3, 8, 1, 4, 3, SGD, {**stages("1f1b"), **TENSOR, **SEQUENCE, **RECOMPUTE}, 8),
}


@pytest.mark.parametrize("case", AXES)
@pytest.mark.quick("sequence", "zero-bubble", "tensor, E = 2, uneven")
def test_equal_to_one_process(case: str) -> None:
    make, world_size, data, size, stage, optimizer, axes, length = AXES[case]
    given = config(stage, accumulation=COUNT, expert_parallel=section(size), **optimizer, **axes)
    check(make, world_size, data, given, length)


# -- recomputation ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Four matrices, called as modules of experts of transformers are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, width, width) / 4)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            token, place = torch.where(top_k_index == number)
            outputs = torch.tanh(hidden_states[token] @ self.weight[number])
            result = result.index_add(0, token, outputs * top_k_weights[token, place].unsqueeze(1))
        return result


class Noisy(nn.Module):
    """A block that chooses by noise, which a recomputation draws again."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        index = (logits + torch.randn(logits.shape)).topk(2).indices
        weights = logits.softmax(-1).gather(1, index)
        return x + self.experts(tokens, index, weights).view(x.shape)


class Model(nn.Module):
    def __init__(self, recomputes: bool, *, is_nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(2))
        self.recomputes, self.is_nested = recomputes, is_nested

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.run(block, x)
            return x

        return (self.run(run, x) if self.is_nested else run(x)).square().mean()

    def run(self, function: Any, x: Tensor) -> Tensor:
        if not self.recomputes:
            return function(x)
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


def of_experts(recomputes: bool, is_nested: bool) -> Any:
    """Losses, and the last experts after two micro-batches whose backwards come in the other order.

    In earlier blocks gradients come from a router that has chosen others.
    """
    torch.manual_seed(0)
    model = Model(recomputes, is_nested=is_nested)
    given = config(1, accumulation=2, expert_parallel=section(2) | {"chunks": 2}, **SGD)
    engine = xds.initialize(model, given)
    generator = torch.Generator().manual_seed(engine.dp_rank)
    torch.manual_seed(1)
    losses = [engine(torch.randn(2, 3, 16, generator=generator)) for _ in range(2)]
    for loss in reversed(losses):
        engine.backward(loss)
        engine.step()
    values = engine.state_dict()
    engine.destroy()
    return [loss.item() for loss in losses], values["blocks.1.experts.weight"]


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_recomputation_has_the_routing_and_the_counts_of_its_forward(
    monkeypatch: pytest.MonkeyPatch, is_nested: bool
) -> None:
    route = exchange.route
    calls: list[None] = []
    monkeypatch.setattr(exchange, "route", lambda *args: (calls.append(None), route(*args))[1])
    losses, wanted = run_ranks(of_experts, 2, False, is_nested)[0]
    num_calls = len(calls)
    again, values = run_ranks(of_experts, 2, True, is_nested)[0]
    assert num_calls == 2 * 2 * 2 and len(calls) == 2 * num_calls
    assert again == losses
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-7)


def test_calls_in_nested_checkpoints_are_told_apart_in_any_order_of_backwards() -> None:
    first_calls, repeated = FirstCalls[Tensor](), []

    def layer(x: Tensor) -> Tensor:
        value, is_first = first_calls.value(x.detach)
        repeated.append(not is_first)
        assert torch.equal(value, x)
        return x.sin() * x

    def twice(x: Tensor) -> Tensor:
        return layer(layer(x))

    def outer(x: Tensor) -> Tensor:
        return checkpoint(twice, checkpoint(twice, x, use_reentrant=False), use_reentrant=False)

    starts = [torch.full((2,), value, requires_grad=True) for value in (0.5, 1.0, 1.5)]
    losses = [checkpoint(outer, x, use_reentrant=False).sum() for x in starts]
    assert repeated == [False] * 12
    for number in (1, 2, 0):
        losses[number].backward(retain_graph=number == 2)
    losses[2].backward()
    assert len(repeated) > 24 and all(repeated[12:])


# -- pipelines whose ranks build their own layers, compile, proofs ------------------------------------------


class Layers:
    """Layers of a PipelineModule: the experts are in the second half."""

    @staticmethod
    def model() -> Any:
        kinds = [LayerSpec(nn.Linear, 16, 16)] * 2 + [LayerSpec(Steady), LayerSpec(Steady)]
        return PipelineModule(kinds, loss_fn=nn.functional.mse_loss, partition_method="uniform")


class Steady(Noisy):
    """The same without noise."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        weights, index = logits.softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


def in_layers(size: int | str) -> Any:
    torch.manual_seed(0)
    given = config(1, accumulation=2, expert_parallel=section(size), **SGD, **stages("1f1b"))
    engine = xds.initialize(Layers.model(), given)
    generator = torch.Generator().manual_seed(engine.dp_rank)
    data = [tuple(torch.randn(2, 2, 16, generator=generator)) for _ in range(4)]
    found = []
    for step in range(2):
        loss = engine.train_batch(iter(data[2 * step : 2 * step + 2]))
        found.append((float(loss), float(engine.get_global_grad_norm())))
    engine.destroy()
    return found


def test_stages_that_build_their_own_layers_agree_on_the_ranks_of_experts() -> None:
    wanted = run_ranks(in_layers, 4, 1)[0]
    for size in (2, "auto"):
        for steps in run_ranks(in_layers, 4, size):
            assert steps == [pytest.approx(step, rel=1e-5) for step in wanted]


@pytest.mark.slow
def test_a_graph_breaks_at_experts_alone() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    given = config(1, accumulation=COUNT, expert_parallel=section(1), **SGD, **RECOMPUTE)
    check(qwen3, 1, 1, {**given, "compile": {"enabled": True, "backend": "aot_eager"}})
    assert all("ExpertLayer" in why for why in counters["graph_break"])
    assert counters["stats"]["unique_graphs"] > 2  # a checkpoint in a graph would leave none


def test_the_proof_of_slices_leaves_experts_out_and_finds_a_wrong_plan() -> None:
    plan = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkvo"}
    given = config(1, accumulation=COUNT, expert_parallel=section(2), **SGD)
    given["tensor_parallel"] = {
        "tp_size": 2,
        "plan": {**plan, "model.layers.*.mlp.experts": "colwise"},
    }
    with pytest.raises(AssertionError, match=r"tensor_parallel: model.layers.0"):
        run_ranks(trained, 2, mixtral, given, 9)
