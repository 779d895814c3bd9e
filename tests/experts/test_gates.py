"""Tests of the gates of DeepSpeed's layer. gates.json has what DeepSpeed 0.19.8 returns for the cases here.

`python benchmarks/experts/gates.py --store tests/experts/gates.json` writes it, where DeepSpeed is installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gate_cases import STORED, call, cases, digest, gradient

import xds
from xds.experts import gates

ROWS = json.loads((Path(__file__).parent / "gates.json").read_text())
GATES = {"top1": gates.top1, "top2": gates.top2, "topk": gates.topk}


def test_choices_counts_losses_and_gradients_are_those_of_deepspeed() -> None:
    some = list(cases(0))[::STORED]
    for case, (choices, *numbers) in zip(some, ROWS, strict=True):
        routes, logits = call(GATES, case)
        assert digest(routes.top_k_index, routes.exp_counts) == choices, case
        size = gradient(logits, routes.top_k_weights, routes.l_aux).norm()
        found = [value.item() for value in (routes.l_aux, routes.top_k_weights.sum(), size)]
        assert found == pytest.approx(numbers, rel=1e-5, abs=1e-6), case


def test_an_expert_keeps_first_choices_before_second_ones_and_the_loss_counts_first_ones() -> None:
    wants = torch.tensor([[3.0, 2, 0], [2, 3, 0], [3, 2, 0], [0, 3, 2]])  # first and second choices
    routes = gates.top2(wants, 0.75, 0, top2_2nd_expert_sampling=False)  # a capacity of 2
    assert routes.top_k_index.tolist() == [[0, -1], [1, -1], [0, -1], [1, 2]]
    assert routes.exp_counts.tolist() == [3, 4, 1]
    assert routes.top_k_weights[0].tolist() == [1.0, 0.0]
    means = wants.softmax(1).mean(0)
    torch.testing.assert_close(routes.l_aux, 3 * (means[0] + means[1]) / 2)


def test_random_tokens_are_kept_and_unused_ones_go_nowhere() -> None:
    logits = torch.tensor([[9.0, 0.0]]).repeat(100, 1)
    used = torch.arange(100) % 2
    torch.manual_seed(0)
    routes = gates.top1(logits, 0.4, 4, used_token=used)
    kept = (routes.top_k_index[:, 0] >= 0).nonzero().squeeze(1)
    assert len(kept) == 20 and (kept % 2 == 1).all() and kept[-1] > 60
    assert routes.exp_counts.tolist() == [50, 0]


def test_a_gate_compiles_as_one_graph() -> None:
    logits = torch.rand(64, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    plain = gates.top1(logits, 1.0, 4)
    compiled = torch.compile(gates.top1, backend="eager", fullgraph=True)
    torch.manual_seed(1)
    assert torch.equal(compiled(logits, 1.0, 4).top_k_index, plain.top_k_index)


def test_no_tokens_have_no_loss() -> None:
    for routes in (
        gates.top1(torch.zeros(0, 4), 1.0, 0),
        gates.top2(torch.zeros(0, 4), 1.0, 4),
        gates.topk(torch.zeros(0, 4), 3, 1.0, 4),
    ):
        assert routes.l_aux == 0 and routes.exp_counts.tolist() == [0] * 4


def test_wrong_arguments_are_one_sentence() -> None:
    logits = torch.zeros(3, 4)
    with pytest.raises(xds.UsageError, match="min_capacity = 4 is above the 3 tokens of this call"):
        gates.top1(logits, 1.0, 4)
    with pytest.raises(xds.UsageError, match="drop_policy = 'last': it must be one of probs, posi"):
        gates.topk(logits, 3, 1.0, 4, drop_policy="last")
    assert gates.top1(logits, 1.0, 4, drop_tokens=False).exp_counts.tolist() == [3, 0, 0, 0]
