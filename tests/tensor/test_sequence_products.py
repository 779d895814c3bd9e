"""Sequence ranks together with tensor ranks: numbers of one process, and checkpoints of any product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensor_cases import Case, build, examine
from torch import Tensor
from warm_ranks import warm

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 1, 1, 2, 2, 3),
        *(
            pytest.param(Case(*values), marks=pytest.mark.slow)
            for values in (
                ("qwen3", 1, 2, 2, 2, 2),
                ("gpt2", 1, 1, 2, 2, 0),
            )
        ),
    ],
    ids=lambda case: case.name,
)
def test_sequence_and_tensor_ranks_equal_one_process(case: Case) -> None:
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
