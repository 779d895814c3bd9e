"""Experts on several ranks train as in one process: losses, norms and parameters, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MuseSparkConfig,
    MuseSparkForConditionalGeneration,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import xds

STEPS = 3
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


OTHER_SIZES = {**SIZES, "moe_intermediate_size": 16, "head_dim": 8}


def mixtral() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES))


def gpt_oss() -> Any:
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(head_dim=8, pad_token_id=0, **SIZES))


def qwen3_moe() -> Any:
    torch.manual_seed(0)
    sizes = {**OTHER_SIZES, "num_experts": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, output_router_logits=True))


def deepseek_v3() -> Any:
    """One layer without experts, and one with shared experts and groups of experts."""
    torch.manual_seed(0)
    sizes = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {**OTHER_SIZES, **sizes, "num_key_value_heads": 4}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ranks, v_head_dim=8))


def granite_moe() -> Any:
    torch.manual_seed(0)
    return GraniteMoeForCausalLM(GraniteMoeConfig(**SIZES, output_router_logits=True))


def nemotron_h() -> Any:
    """Experts without gates."""
    torch.manual_seed(0)
    sizes = {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16, "n_group": 1}
    layers = {"layers_block_type": ["attention", "moe"], "topk_group": 1}
    return NemotronHForCausalLM(NemotronHConfig(**OTHER_SIZES, **sizes, **layers))


def muse_spark() -> Any:
    """The output of each expert is normalized, by one weight for all."""
    torch.manual_seed(0)
    text = {**OTHER_SIZES, "moe_hidden_size": 24, "eos_token_id": 1, "bos_token_id": 2}
    text["initializer_range"] = 0.5  # else the norms see numbers as small as their rounding
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    audio = {"patch_sizes": [4], "hidden_sizes": [16], "depths": [1], "num_hidden_layers": 1}
    parts = {
        "text_config": text,
        "vision_config": {**vision, "intermediate_size": 32},
        "audio_config": {**audio, "out_hidden_size": 32},
    }
    model = MuseSparkForConditionalGeneration(
        MuseSparkConfig(**parts, out_hidden_size=32, projector_hidden_size=16)
    )
    model.set_experts_implementation("eager")
    return model


MODELS = {
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "granite_moe": granite_moe,
    "nemotron_h": nemotron_h,
    "muse_spark": muse_spark,
}


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 61, (2, 9), generator=generator)


def plain(name: str, world_size: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Losses, norms and parameters of one process with the batches of all ranks."""
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        loss = 0.0
        for rank in range(world_size):
            ids = batch(step, rank)
            one = model(input_ids=ids, labels=ids).loss / world_size
            one.backward()
            loss += one.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, norm))
    return found, model.state_dict()


def trained(name: str, stage: int, size: int, deterministic: bool = False, chunks: int = 1) -> Any:
    torch.use_deterministic_algorithms(deterministic)
    section = {"enabled": True, "autoep_size": size, "chunks": chunks}
    given = config(stage, optimizer="SGD", params={"lr": 0.1}, expert_parallel=section)
    return trained_with(MODELS[name], given)


def trained_with(build: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Losses, norms and whole parameters of a model with the config `given`."""
    engine = xds.initialize(build(), given)
    found = []
    for step in range(STEPS):
        ids = batch(step, dist.get_rank())
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    values = engine.state_dict()
    engine.destroy()
    return found, values


@pytest.mark.parametrize(
    ("name", "stage"),
    [("mixtral", 0), ("mixtral", 1), ("mixtral", 2), *((name, 3) for name in MODELS)],
)
@pytest.mark.quick("mixtral-1", "mixtral-3", "gpt_oss-3")
def test_equal_to_one_process(name: str, stage: int) -> None:
    wanted, params = plain(name, 2)
    ranks = run_ranks(trained, 2, name, stage, 2)
    for step, (loss, norm) in enumerate(wanted):
        mean = sum(found[step][0] for found, _ in ranks) / 2
        assert mean == pytest.approx(loss, rel=1e-6)
        assert ranks[0][0][step][1] == pytest.approx(norm, rel=1e-6)
    for key, value in params.items():
        torch.testing.assert_close(ranks[0][1][key], value, rtol=1e-5, atol=1e-7)


def test_no_bit_depends_on_the_ranks_of_experts_or_on_chunks() -> None:
    try:
        (one, params), (two, others) = (
            run_ranks(trained, 2, "mixtral", 2, size, True, chunks)[0]
            for size, chunks in ((1, 1), (2, 3))
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert [loss for loss, _ in one] == [loss for loss, _ in two]
    assert all(torch.equal(params[key], others[key]) for key in params)


def test_four_ranks_in_blocks_of_two_and_chunks_of_tokens() -> None:
    wanted, params = plain("mixtral", 4)
    ranks = run_ranks(trained, 4, "mixtral", 3, 2, False, 3)
    assert ranks[0][0][-1][1] == pytest.approx(wanted[-1][1], rel=1e-6)
    for key, value in params.items():
        torch.testing.assert_close(ranks[3][1][key], value, rtol=1e-5, atol=1e-7)
