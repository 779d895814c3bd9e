"""Sequence ranks together with tensor ranks and stages: numbers of one process, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_runs import SAME, worst
from tensor_cases import Case, build, examine
from test_sequence_training import batch, config_of
from test_sequence_training import build as sequence_model
from torch import Tensor
from warm_ranks import warm

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 2, 1, 2, 1, 3),
        Case("gpt", 1, 1, 2, 2, 2),
        *(
            pytest.param(Case(*values), marks=pytest.mark.slow)
            for values in (
                ("qwen3", 1, 2, 2, 2, 2),
                ("gpt2", 2, 2, 2, 1, 1),  # embeddings tied over stages
                ("qwen3", 2, 1, 2, 2, 2),
            )
        ),
    ],
    ids=lambda case: case.name,
)
def test_products_of_sequence_ranks_equal_one_process(case: Case) -> None:
    difference, wrong = examine(case)
    assert not wrong and difference <= 1e-5


def saved_or_loaded(
    folder: str, case: Case, saves: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and first moments of the whole model, after a step and a save, or after a load."""
    from tensor_cases import batches

    engine = xds.initialize(build(case.model), case.config())
    if saves:
        engine.train_batch(batches(case.model, 0, engine.dp_rank))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    moments = {
        name: xds.zero.get_full_optimizer_state(param, "exp_avg")
        for name, param in engine.module.named_parameters()
    }
    engine.destroy()
    return values, moments


def test_a_checkpoint_of_a_product_loads_at_others(tmp_path: Path) -> None:
    product, one, other = (
        Case("llama", 1, *lengths) for lengths in ((1, 2, 2, 1), (1, 1, 1, 0), (2, 1, 2, 3))
    )
    saved = warm(4).run(saved_or_loaded, str(tmp_path), product, True)[0]
    for case in (one, other):
        for found in warm(case.mesh.size).run(saved_or_loaded, str(tmp_path), case, False):
            for kind, wanted in zip(found, saved, strict=True):
                assert kind.keys() == wanted.keys()
                assert all(torch.equal(kind[name], wanted[name]) for name in wanted)


def trained_in_stages(
    config: dict[str, Any], model: tuple[Any, ...] = ("llama",)
) -> list[tuple[float, float]]:
    engine = xds.initialize(sequence_model(*model), config)
    found = []
    for step in range(3):
        batches = (batch("padded", 10 * step + number, 0) for number in range(4))
        loss = engine.train_batch(batches)
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("schedule", "recomputes"),
    [("zero_bubble", True), pytest.param("gpipe", False, marks=pytest.mark.slow)],
)
def test_padded_batches_in_stages_equal_one_process(schedule: str, recomputes: bool) -> None:
    config = config_of(2, 2, activation_checkpointing={"enabled": recomputes})
    config |= {"gradient_accumulation_steps": 4, "pipeline": {"stages": 2, "schedule": schedule}}
    found = warm(4).run(trained_in_stages, config)
    plain = config | {"sequence_parallel_size": 1, "pipeline": {"stages": 1}}
    wanted = warm(1).run(trained_in_stages, plain)[0]
    assert all(worst(steps, wanted) <= SAME for steps in found)


def with_a_mask_of_its_own() -> str:
    """A model whose attention sees all tokens, after and before."""
    from transformers.models.llama import modeling_llama

    def all_tokens(**inputs: Any) -> Tensor:
        length = inputs["inputs_embeds"].shape[1]
        return torch.ones(1, 1, length, length, dtype=torch.bool)

    plain, modeling_llama.create_causal_mask = modeling_llama.create_causal_mask, all_tokens
    config = config_of(2, 1, pipeline={"stages": 2}, gradient_accumulation_steps=2)
    engine = xds.initialize(sequence_model("llama"), config)
    try:
        with pytest.raises(xds.UsageError) as caught:
            engine.train_batch(batch("plain", step, 0) for step in range(2))
    finally:
        modeling_llama.create_causal_mask = plain
        engine.destroy()
    return str(caught.value)


def test_stages_with_a_mask_of_their_own_are_found_on_every_rank() -> None:
    for said in warm(4).run(with_a_mask_of_its_own):
        assert "its attention has a mask of its own" in said
