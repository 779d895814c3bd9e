"""DeepSpeed's gates: which experts a token goes to, which routes a capacity drops, and the balance loss.

A *route* is a token and one of its experts. An expert takes at most `capacity` routes of a rank; the others are
dropped. Choices, draws of random numbers, losses and counts are those of DeepSpeed 0.19.8 (moe/sharded_moe.py).
Where scores at the limit are equal, its choice is that of `torch.topk` on the scores of all tokens, and so is
the one here. No tensor has a dimension of the capacity: DeepSpeed's buffers of equal size are not needed.

Without dropped tokens DeepSpeed asks all ranks for their largest count, the size of those buffers. It changes
no result, so no message is sent here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from ..utils.errors import UsageError

JITTER = 1e-2
LARGEST = 2**31 - 1
NOISES = ("None", "Jitter", "RSample")
POLICIES = ("probs", "position")


@final
@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of S tokens.

    top_k_index [S, K]: int64, the experts; -1 for a dropped route. top_k_weights [S, K]: 0 for a dropped route.
    l_aux: the balance loss, a scalar. exp_counts [E]: int64, routes of each expert before any is dropped.
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    l_aux: Tensor
    exp_counts: Tensor


def top1(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
) -> Routes:
    """One expert for each token, weighted by its probability.

    Args:
        logits: [S, E].
        used_token: [S], 0 for tokens that go nowhere, such as padding.
        noisy_gate_policy: "RSample" adds Gumbel noise to the logits for the choice alone.
        use_rts: random token selection: an expert keeps random tokens. Without it the choice is that of
            `torch.topk` among equal scores.
    Raises:
        UsageError: fewer tokens than `min_capacity`.
    """
    num_tokens, num_experts = logits.shape
    if drop_tokens and num_tokens < min_capacity:
        raise UsageError(
            f"min_capacity = {min_capacity} is above the {num_tokens} tokens of this call, so an expert "
            "cannot take so many; lower min_capacity, use larger batches, or set drop_tokens to False"
        )
    gates = logits.softmax(1)
    index = (logits + _gumbel(logits) if noisy_gate_policy == "RSample" else gates).argmax(1)
    routed = (
        index if used_token is None else torch.where(used_token.to(index.device) != 0, index, -1)
    )
    counts = _counts(routed, num_experts)
    draws = torch.rand(logits.shape, device=logits.device) if use_rts else None
    l_aux = (_mean(gates) * _share(counts, num_tokens)).sum() * num_experts
    routed = routed.unsqueeze(1)
    if drop_tokens:
        capacity = capacity_of(num_tokens, num_experts, capacity_factor, min_capacity)
        chosen = index.unsqueeze(1)
        scores = (
            torch.ones_like(chosen, dtype=torch.float32)
            if draws is None
            else draws.gather(1, chosen)
        )
        routed = torch.where(keep_largest(routed, scores, num_experts, capacity), routed, -1)
    return Routes(routed, _weights(gates, routed), l_aux, counts)


def top2(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    top2_2nd_expert_sampling: bool = True,
) -> Routes:
    """The two experts of each token, weighted by their probabilities, which are scaled to the sum 1.

    An expert takes first choices before second ones. The loss counts first choices alone.

    Args:
        logits: [S, E].
        top2_2nd_expert_sampling: the second expert is drawn by its probability (the Gumbel-max trick).
    """
    num_tokens, num_experts = logits.shape
    gates = logits.softmax(1)
    first = gates.argmax(1, keepdim=True)
    with torch.no_grad():
        sampled = logits + _gumbel(logits) if top2_2nd_expert_sampling else logits.clone()
        second = sampled.scatter_(1, first, -torch.inf).argmax(1, keepdim=True)
    routed = torch.cat((first, second), 1)
    first_counts = _counts(first, num_experts)
    counts = first_counts + _counts(second, num_experts)
    l_aux = (_mean(gates) * _share(first_counts, num_tokens)).mean() * num_experts * num_experts
    if drop_tokens:
        capacity = capacity_of(num_tokens, num_experts, capacity_factor * 2, min_capacity)
        kept = places(routed.t(), num_experts).t() < capacity
        routed = torch.where(kept, routed, -1)
    return Routes(routed, _scaled(_weights(gates, routed)), l_aux, counts)


def topk(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    drop_policy: str = "probs",
) -> Routes:
    """The k experts of each token, weighted by their probabilities; those of kept routes get the sum 1.

    Args:
        logits: [S, E].
        drop_policy: an expert keeps the routes of the largest probabilities ("probs"), or those of the first
            tokens ("position").
    Raises:
        UsageError: another policy.
    """
    if drop_policy not in POLICIES:
        raise UsageError(f"drop_policy = {drop_policy!r}: it must be one of {', '.join(POLICIES)}")
    num_tokens, num_experts = logits.shape
    gates = logits.softmax(1)
    scores, routed = gates.topk(k, 1)
    counts = _counts(routed, num_experts)
    l_aux = (_mean(gates) * _share(counts, num_tokens)).mean() * num_experts * num_experts / k
    if drop_tokens:
        capacity = capacity_of(num_tokens, num_experts, capacity_factor * k, min_capacity)
        if drop_policy == "probs":
            kept = keep_largest(routed, scores.detach(), num_experts, capacity)
        else:
            kept = places(routed, num_experts) < capacity
        routed = torch.where(kept, routed, -1)
    return Routes(routed, _scaled(_weights(gates, routed)), l_aux, counts)


def jitter(hidden_states: Tensor) -> Tensor:
    """`hidden_states` times random numbers between 0.99 and 1.01, one for each element."""
    low = torch.tensor(1.0 - JITTER, device=hidden_states.device)
    high = torch.tensor(1.0 + JITTER, device=hidden_states.device)
    uniform = torch.rand(hidden_states.shape, device=hidden_states.device)
    return hidden_states * (low + uniform * (high - low))


# -- capacities ---------------------------------------------------------------------------------------------


def capacity_of(num_tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """The routes that an expert takes. DeepSpeed computes it in fp32, which rounds before `ceil`.

    >>> capacity_of(16, 4, 1.0, 0), capacity_of(16, 4, 1.1, 0), capacity_of(16, 4, 1.0, 8)
    (4, 5, 8)
    """
    share = np.float32(num_tokens / num_experts) * np.float32(factor)
    return max(int(np.ceil(share)), int(min_capacity))


def places(routed: Tensor, num_experts: int) -> Tensor:
    """How many routes to the same expert come before each, in the order of the elements of `routed`.

    routed: experts, of any shape; -1 for none. The result has its shape.
    """
    expert, order = (routed.reshape(-1) + 1).sort(stable=True)
    place = torch.arange(len(expert), device=expert.device) - _starts(expert, num_experts)[expert]
    return torch.empty_like(order).scatter_(0, order, place).view(routed.shape)


# an op: it waits for the device, and torch.compile does not look inside
@torch.library.custom_op("xds::keep_largest_scores", mutates_args=())
def keep_largest(routed: Tensor, scores: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Which routes have the `capacity` largest scores of their expert.

    routed, scores: [S, K]; -1 for no expert; scores are not negative. A token has an expert at most once.
    """
    num_tokens, num_choices = routed.shape
    if capacity >= num_tokens:
        return routed >= 0
    # bits of floats that are not negative have their order, and integers are sorted five times as fast
    bits = scores.detach().float().reshape(-1).view(torch.int32).long()
    keys, order = (((routed.reshape(-1) + 1) << 32) | (LARGEST - bits)).sort(stable=True)
    expert, sorted_bits = keys >> 32, LARGEST - (keys & LARGEST)
    starts = _starts(expert, num_experts)
    place = torch.arange(len(expert), device=expert.device) - starts[expert]
    kept = torch.empty_like(order, dtype=torch.bool)
    kept[order] = (place < capacity) & (expert > 0)
    for start, end in _undecided(sorted_bits, starts, capacity).tolist():
        routes = order[start:end]
        tokens = routes // num_choices
        column = scores.new_zeros(num_tokens)
        column[tokens] = scores.reshape(-1)[routes]
        is_chosen = torch.zeros_like(column, dtype=torch.bool)
        is_chosen[column.topk(capacity).indices] = True
        kept[routes] = is_chosen[tokens]
    return kept.view(routed.shape)


@keep_largest.register_fake
def _(routed: Tensor, scores: Tensor, num_experts: int, capacity: int) -> Tensor:
    return torch.empty_like(routed, dtype=torch.bool)


def _undecided(bits: Tensor, starts: Tensor, capacity: int) -> Tensor:
    """[N, 2]: begin and end of experts whose last kept score equals the next one. Tokens of others count as 0.

    bits: of scores, sorted by expert, then falling.
    """
    starts, ends = starts[1:-1], starts[2:]
    padded = torch.cat((bits, bits.new_zeros(1)))
    last = torch.minimum(ends, starts + capacity) - 1
    following = torch.where(starts + capacity < ends, starts + capacity, len(bits))
    is_undecided = (last >= starts) & (padded[last] == padded[following])
    return torch.stack((starts, ends), 1)[is_undecided]


def _starts(expert: Tensor, num_experts: int) -> Tensor:
    """[E + 2]: where -1, each expert and the end begin. expert: sorted numbers of experts, plus 1."""
    return torch.searchsorted(expert, torch.arange(num_experts + 2, device=expert.device))


# -- sums ---------------------------------------------------------------------------------------------------


def _gumbel(like: Tensor) -> Tensor:
    """Noise of the shape of `like` in fp32, with the draws and the bits of torch.distributions.Gumbel(0, 1)."""
    limits = torch.finfo(torch.float32)
    low = torch.full((), limits.tiny, device=like.device)
    uniform = torch.rand(like.shape, device=like.device)
    uniform = uniform.mul_(torch.full((), 1 - limits.eps, device=like.device) - low).add_(low)
    return uniform.log_().neg_().log_().neg_()


def _counts(routed: Tensor, num_experts: int) -> Tensor:
    """[E]: the routes of each expert; -1 is none."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=routed.device)
    expert = routed.reshape(-1) + 1
    return counts.index_add_(0, expert, torch.ones_like(expert))[1:]


def _mean(gates: Tensor) -> Tensor:
    """The mean over tokens, 0 where there is none."""
    return gates.mean(0) if len(gates) else gates.sum(0)


def _share(counts: Tensor, num_tokens: int) -> Tensor:
    return counts.float() / max(num_tokens, 1)


def _weights(gates: Tensor, routed: Tensor) -> Tensor:
    """The probability of each route; 0 for a dropped one."""
    return torch.where(routed >= 0, gates.gather(1, routed.clamp(min=0)), 0.0)


def _scaled(weights: Tensor) -> Tensor:
    """Weights of which each token's sum is 1, or 0."""
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


__all__ = [
    "NOISES",
    "POLICIES",
    "Routes",
    "capacity_of",
    "jitter",
    "places",
    "top1",
    "top2",
    "topk",
]
