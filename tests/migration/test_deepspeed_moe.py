"""Tests of `deepspeed.moe.sharded_moe`: gates choose experts for tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from warm_ranks import warm

from xds.deepspeed.moe import sharded_moe
from xds.deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating

# the largest gate of the tokens is that of expert 0, 0, 0, 1; the second is 1, 1, 2, 2
LOGITS = torch.tensor([[5.0, 4.0, 0.0], [6.0, 3.0, 0.0], [7.0, 0.0, 3.0], [0.0, 5.0, 4.0]])


def sent(mask: Tensor) -> list[list[int]]:
    """[token, expert, place] of each."""
    return mask.nonzero().tolist()


def test_one_expert_keeps_as_many_tokens_as_it_has_places() -> None:
    loss, weights, mask, counts = top1gating(LOGITS, 1.5, 0, use_rts=False)
    gates = LOGITS.softmax(1)
    assert counts.tolist() == [3, 1, 0] and mask.shape == (4, 3, 2)
    assert mask.sum((0, 2)).tolist() == [2, 1, 0] and mask.sum((0, 1)).tolist() == [2, 1]
    torch.testing.assert_close(weights.sum((1, 2)), gates.max(1).values * mask.sum((1, 2)))
    even = (gates.mean(0) * torch.tensor([3, 1, 0]) / 4).sum() * 3
    torch.testing.assert_close(loss, even)
    torch.manual_seed(0)
    kept = {tuple(top1gating(LOGITS, 1.5, 0)[2][:, 0].any(1).tolist()) for _ in range(30)}
    assert len(kept) == 3 and all(sum(tokens) == 2 for tokens in kept)
    used = torch.tensor([0, 1, 0, 1])
    assert sent(top1gating(LOGITS, 1.5, 0, used_token=used, use_rts=False)[2]) == [
        [1, 0, 0],
        [3, 1, 0],
    ]
    with pytest.raises(AssertionError, match=r"No. of tokens \(batch-size\) should be greater"):
        top1gating(LOGITS, 1.0, 8)


def test_two_experts_give_places_to_first_choices_before_second_ones() -> None:
    given = LOGITS.clone()
    sampling = {"top2_2nd_expert_sampling": False}
    _, weights, mask, counts = top2gating(given, 0.75, 0, **sampling)
    assert counts.tolist() == [3, 3, 2]
    # two places: token 2 comes third at expert 0, and token 1 third at expert 1
    assert sent(mask) == [[0, 0, 0], [0, 1, 1], [1, 0, 1], [2, 2, 0], [3, 1, 0], [3, 2, 1]]
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(4))
    top2gating(given, 0.75, 0)
    assert torch.equal(given, LOGITS)  # noise of the second choice is not written into them
    assert top2gating(given, 0.75, 0, drop_tokens=False, **sampling)[2].sum() == 8


def test_experts_keep_the_tokens_with_the_largest_gates_or_the_first_ones() -> None:
    for policy, kept in (("probs", [1, 2]), ("position", [0, 1])):
        mask = topkgating(LOGITS, 1, 1.5, 0, drop_policy=policy)[2]
        assert mask[:, 0].any(1).nonzero().flatten().tolist() == kept
    mask = topkgating(LOGITS, 2, 2.0, 9)[2]
    assert mask.shape == (4, 3, 9) and mask.sum() == 8
    loss, capacity, num_experts, experts, places, gates, _ = topkgating(
        LOGITS, 1, 1.5, 0, drop_policy="position", sparse_routes=True
    )
    assert (int(capacity), num_experts) == (2, 3) and loss > 0
    assert experts.tolist() == [[0, 0, -1, 1]] and places.tolist() == [[0, 1, 0, 0]]
    assert gates.tolist() == [[1, 1, 0, 1]]
    with pytest.raises(ValueError, match="drop_policy = 'first'"):
        topkgating(LOGITS, 1, 1.0, 0, drop_policy="first")


def test_a_gate_is_a_layer_in_fp32_with_a_capacity_of_its_own_in_eval() -> None:
    x = torch.randn(8, 4, dtype=torch.bfloat16)
    for k in (1, 2, 3):
        gate = TopKGate(4, 4, k, 1.0, 2.0, min_capacity=0, noisy_gate_policy="Jitter").bfloat16()
        places = [gate.train(mode)(x)[2].shape[2] for mode in (True, False)]
        assert places == [2 * k, 4 * k]
        weights = gate(x)[1]
        assert weights.dtype is torch.float32
        weights.square().sum().backward()
        assert gate.wg.weight.grad is not None


def without_drops() -> list[int]:
    tokens = LOGITS if dist.get_rank() else LOGITS[:2]
    gates: Any = (
        lambda group: top1gating(tokens, 1.0, 0, drop_tokens=False, ep_group=group),
        lambda group: top2gating(tokens, 1.0, 0, drop_tokens=False, ep_group=group),
        lambda group: topkgating(tokens, 3, 1.0, 0, drop_tokens=False, ep_group=group),
    )
    heard: list[Any] = []
    torch.manual_seed(0)  # the second expert is drawn
    real = sharded_moe.dist.all_reduce
    sharded_moe.dist.all_reduce = lambda *args, **options: (
        heard.append(options),
        real(*args, **options),
    )
    try:
        found = [gate(None)[2].shape[2] for gate in gates]
        assert not heard
        return found + [gate(dist.group.WORLD)[2].shape[2] for gate in gates]
    finally:
        sharded_moe.dist.all_reduce = real
        assert len(heard) == 3


def test_without_drops_the_ranks_of_a_group_have_the_capacity_of_the_fullest() -> None:
    few, many = warm(2).run(without_drops)
    assert few[:3] == [2, 2, 2] and many[:3] == [3, 3, 4]
    assert few[3:] == [2, 3, 4] and many[3:] == [3, 3, 4]
