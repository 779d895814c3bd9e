"""What a script holds stays as it is: configs of transformers, and other models of the same config."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor

import xds

transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")

VOCAB, TOKENS = 61, 32
TOKEN_DROP = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [1],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 16,
        "max_value": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 8},
    },
}
LOW_BITS = {
    "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True},
    "different_groups": {
        "mlp": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["mlp"]}
    },
}
FEATURES: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "sparse attention": {
        "sparse_attention": {
            "mode": "local_sliding_window",
            "block": 4,
            "num_sliding_window_blocks": 1,
        }
    },
    "sequence ranks": {"sequence_parallel_size": 2},
    "slices": {"tensor_parallel": {"tp_size": 2}},
    "pipeline": {"pipeline": {"stages": 2, "schedule": "gpipe"}},
    "packing": {"data_packing": {"tokens": TOKENS}},
    "layer drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 1.0}},
    "token drop": {
        "data_efficiency": {"data_routing": {"enabled": True, "random_ltd": TOKEN_DROP}}
    },
    "compressed training": {"compression_training": {"weight_quantization": LOW_BITS}},
    "recomputation": {"activation_checkpointing": {"enabled": True}},
    "tiles": {"sequence": {"tiled_mlp": 5, "tiled_loss": 7}},
}


def of_transformers() -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    return transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)


def build(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn_like(param))
    return model


def ids(seed: int) -> Tensor:
    return torch.randint(1, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids(9)).logits
    return found


def trains_beside(feature: str) -> None:
    """Another model of the same config object, built before, during or after, computes the same."""
    config = of_transformers()
    wanted = logits(build(of_transformers()))
    other, model = build(config), build(config)
    before = copy.deepcopy(vars(config))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        **copy.deepcopy(FEATURES[feature]),
    }
    given = copy.deepcopy(settings)
    samples = [{"input_ids": row, "labels": row} for row in torch.cat([ids(n) for n in range(8)])]
    engine = xds.initialize(
        model, settings, training_data=samples if feature == "packing" else None
    )
    batch = {"input_ids": ids(engine.dp_rank), "labels": ids(engine.dp_rank)}
    engine.train_batch(None if feature == "packing" else iter([batch]))
    assert torch.equal(logits(other), wanted), "while the engine lives"
    assert torch.equal(logits(build(config)), wanted), "built while the engine lives"
    if feature in ("stage 3", "sparse attention"):
        engine.generate(ids(1)[:, :8], max_new_tokens=2, do_sample=False)
    if feature == "sparse attention":
        sparse = engine(**batch).loss
        other.set_attn_implementation("eager")
        assert torch.equal(engine(**batch).loss, sparse)
        other.set_attn_implementation("sdpa")
    engine.destroy()
    assert vars(config) == before and settings == given
    assert model.config is config and torch.equal(logits(other), wanted)
    dist.barrier()


@pytest.mark.parametrize(
    "feature",
    FEATURES,
)
@pytest.mark.quick("packing", "slices", "stage 3")
def test_a_second_model_of_the_same_config_object_computes_as_before(feature: str) -> None:
    run_ranks(trains_beside, 2, feature)


def changes_its_config() -> None:
    config = of_transformers()
    model = build(config)
    settings = {"train_micro_batch_size_per_gpu": 1, **FEATURES["sparse attention"]}
    engine = xds.initialize(
        model, {**settings, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    engine.module.config.use_cache = False
    assert "xds" not in str(engine.module.config.to_dict())
    engine.destroy()
    # the write stays on the model that it was made on
    assert model.config.use_cache is False and config.use_cache is True
    assert model.config._attn_implementation == "sdpa"


def test_a_write_of_the_script_on_the_models_config_stays() -> None:
    run_ranks(changes_its_config, 1)
