"""Cutting plain models: every stage runs the model's own forward, numbers as without a pipeline."""

import copy

import pytest
import torch

from pipelines_in_one_process import Loop, cut_all, gradients, plain_training, train
from xds.zero.core.discover import found_blocks


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def check_equal(model, placement, batches, tolerance=1e-6, **options):
    """Losses and gradients equal those of the whole model. Returns the parts."""
    parts = cut_all(model, found_blocks, placement, **options)
    losses, expected = plain_training(copy.deepcopy(model), call, batches)
    assert train(parts, placement, batches) == pytest.approx(losses, abs=tolerance)
    found = gradients(parts)
    for name, grad in expected.items():
        if name in found:
            torch.testing.assert_close(found[name], grad, rtol=tolerance, atol=tolerance)
        else:
            assert not grad.any(), name
    assert set(found) <= set(expected)
    return parts


HUGGING_FACE = ("gpt2", "llama", "mixtral")


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_equal_the_whole_model(name):
    pytest.importorskip("transformers")
    from real_models import batch, build

    model = build(name)
    check_equal(model, Loop(3), [batch(name, step, samples=2) for step in range(2)])


def tiny_hugging_face(name):
    """A tiny model of a class that `real_models` does not have, and a batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1234)
    small = dict(vocab_size=61, hidden_size=24, num_hidden_layers=4, num_attention_heads=2)
    if name == "opt":
        config = transformers.OPTConfig(
            **small, ffn_dim=40, max_position_embeddings=32, word_embed_proj_dim=20, dropout=0.0
        )
        return transformers.OPTForCausalLM(config).train()
    if name == "bert":
        config = transformers.BertConfig(
            **small,
            intermediate_size=40,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.BertForMaskedLM(config).train()
    text = dict(intermediate_size=40, num_key_value_heads=1, head_dim=12, sliding_window=4)
    kind = {"gemma2": "Gemma2", "gemma3": "Gemma3Text"}[name]
    config = getattr(transformers, f"{kind}Config")(**small, **text, max_position_embeddings=32)
    if name == "gemma3":
        config.layer_types = ["sliding_attention"] * 3 + ["full_attention"]
        return transformers.Gemma3ForCausalLM(config).train()
    return transformers.Gemma2ForCausalLM(config).train()


@pytest.mark.parametrize("name", ["opt", "bert", "gemma2", "gemma3"])
def test_models_with_masks_norms_and_projections_equal_the_whole_model(name):
    model = tiny_hugging_face(name)
    ids = torch.randint(3, 61, (2, 10))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    batches = [{"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids, "attention_mask": mask}]
    check_equal(model, Loop(4), batches)
    check_equal(model, Loop(2, 2), batches)
    check_equal(model, Loop(2, 2, is_v=True), batches)
