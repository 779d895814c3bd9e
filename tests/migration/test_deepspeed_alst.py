"""Tests of what DeepSpeed's tutorials of long sequences do beside training by an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from warm_ranks import warm

from xds import deepspeed
from xds.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from xds.utils.errors import UsageError

transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")


def llama(attention: str = "sdpa") -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)


def register(model: Any, attention: str = "sdpa", **options: Any) -> Any:
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=attention,
        sequence_parallel_size=2,
        micro_batch_size=1,
        seq_length=8,
        **options,
    )


def without_an_engine() -> None:
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

        mpu = register(llama())
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        }
        model = llama()
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        torch.testing.assert_close(engine(**inputs).logits, whole[:, mine])
        with pytest.raises(UsageError, match="has no position_ids"):
            cut.train()
            replaced(cut.model.layers[0].self_attn, *[torch.zeros(1, 4, 4, 4)] * 3, None)
        with pytest.raises(UsageError, match="keys in a cache"):
            x = torch.zeros(1, 4, 4, 4)
            replaced(cut.model.layers[0].self_attn, x[:, :, :1], x, x, None)
    finally:
        table["sdpa"] = own


def test_registered_attention_sees_all_tokens_without_an_engine_too() -> None:
    warm(2).run(without_an_engine)


def refusals() -> list[str]:
    said = []
    for model, attention, options in (
        (llama(), "flash_attention_2", {}),
        ("a/path", "eager", {}),
        ("a/path", "no_such", {}),
    ):
        with pytest.raises(ValueError) as caught:
            register(model, attention, **options)
        said.append(str(caught.value))
    return said


def test_attention_that_the_model_does_not_use_is_refused() -> None:
    for mismatch, eager, unknown in warm(2).run(refusals):
        assert "does not match model config attn_implementation = 'sdpa'" in mismatch
        assert "cannot be replaced" in eager
        assert "transformers has no such attention" in unknown and "sdpa" in unknown


def by_config() -> tuple[int, int, list[float]]:
    """The script cuts its batches, so that each rank's loss has gradients of its own."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    sizes = {"data_parallel_size": 1, "sequence_parallel_size": 2}
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine, *_ = deepspeed.initialize(model=model, config_params=config | sizes)
    group = engine.seq_parallel_group
    loss: Tensor = torch.tensor(1.0 + dist.get_rank(), requires_grad=True)
    total = loss.clone()
    deepspeed.comm.all_reduce(total, group=group)
    (total / 2).backward()
    data = engine.data_parallel_group
    return dist.get_world_size(group), dist.get_world_size(data), [float(total), float(loss.grad)]


def test_a_config_with_both_sizes_makes_sequence_ranks_for_any_model() -> None:
    assert warm(2).run(by_config) == [(2, 1, [3.0, 0.5])] * 2
