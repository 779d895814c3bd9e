"""Accesses to parameters of one pipeline stage while an update still runs on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import run_ranks
from tensor_cases import build

import xds

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.01}},
    "pipeline": {"stages": 2, "schedule": "gpipe"},
    "zero_optimization": {
        "stage": 1,
        "offload_optimizer": {"device": "cpu", "overlap_step": True},
    },
}
EDITED = "transformer.h.0.mlp.c_proj.weight"


def _batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def _losses(way: str) -> list[float]:
    engine = xds.initialize(build("gpt2"), copy.deepcopy(CONFIG))
    found = []
    for step in range(3):
        found.append(engine.train_batch(iter([_batch(step)])).item())
        param = dict(engine.module.named_parameters()).get(EDITED)
        if param is None or step:
            continue  # the other stage goes on
        if way == "gathered":
            with xds.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                param.mul_(0.5)
        else:
            xds.zero.set_full_param(param, xds.zero.get_full_param(param) * 0.5)
    engine.destroy()
    return found


@pytest.mark.parametrize("way", ["gathered", "set"])
def test_a_stage_edits_its_own_weight_while_a_tied_one_is_updated(way: str) -> None:
    """The access waited for the tied weight's new values, which the other stage did not send: a hang."""
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01, weight_decay=0.01)
    wanted = []
    for step in range(3):
        loss = model(**_batch(step)).loss
        wanted.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            with torch.no_grad():
                model.get_parameter(EDITED).mul_(0.5)
    for found in run_ranks(_losses, 2, way):
        assert found == pytest.approx(wanted, rel=2e-5)
