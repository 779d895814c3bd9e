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
    losses, expected = plain_training(model, call, batches)
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
