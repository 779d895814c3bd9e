"""`deepspeed.moe.sharded_moe`: the gates, which choose experts for tokens. Layers of experts are stand-ins.

Tokens are S, experts E, and places in an expert's batch C (its capacity). A token without a place in the
batch of an expert is not sent to it: it is dropped. GShard, https://arxiv.org/abs/2006.16668.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...utils.errors import UsageError
from .. import comm as dist
from ..errors import raises_theirs
from ..missing import placeholder

JITTER = 1e-2


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = JITTER) -> Tensor:
    """Each value times a random number from 1 - epsilon to 1 + epsilon."""
    if epsilon == 0:
        return x
    return x * (1 + epsilon * (2 * torch.rand(x.shape, device=device) - 1))


def gumbel_rsample(shape: Any, device: torch.device) -> Tensor:
    zero, one = torch.tensor(0.0, device=device), torch.tensor(1.0, device=device)
    found: Tensor = torch.distributions.Gumbel(zero, one).rsample(shape)
    return found


def _capacity(gates: Tensor, capacity_factor: Tensor, min_capacity: Tensor) -> Tensor:
    """So many times the even share of an expert, at least `min_capacity`."""
    num_tokens, num_experts = gates.shape
    share = torch.ceil(num_tokens / num_experts * capacity_factor).to(torch.int64)
    return torch.maximum(share, min_capacity.to(torch.int64))


def _capacity_for_all(counts: Tensor, group: Any) -> Tensor:
    """No token is dropped. A collective of the ranks that share experts."""
    most = counts.max()
    if group is not None and dist.get_world_size(group=group) > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most


@final
@dataclass(frozen=True)
class _Routes:
    """What the K experts of each token are. Tensors are [S, K]; `counts` is [E].

    is_kept: the token has a place. places: its place, where it has one.
    """

    loss: Tensor  # that makes the numbers of tokens even
    capacity: Tensor
    counts: Tensor
    experts: Tensor
    is_kept: Tensor
    places: Tensor
    gates: Tensor

    def answer(self, *, is_sparse: bool) -> tuple[Any, ...]:
        """(loss, weights [S, E, C], mask [S, E, C], counts).

        Sparse: (loss, capacity, E, experts [K, S] or -1, places [K, S], weights [K, S], counts).
        """
        num_experts, capacity = self.counts.numel(), int(self.capacity)
        gates, places = self.gates * self.is_kept, self.places * self.is_kept
        if is_sparse:
            experts = torch.where(self.is_kept, self.experts, -1)
            ints = (experts.t().to(torch.int32), places.t().to(torch.int32))
            return (self.loss, self.capacity, num_experts, *ints, gates.t(), self.counts)
        weights = gates.new_zeros(len(gates), num_experts * capacity)
        weights = weights.scatter_add(1, self.experts * capacity + places, gates)
        weights = weights.view(-1, num_experts, capacity)
        return self.loss, weights, weights.bool(), self.counts


def _normalized(gates: Tensor) -> Tensor:
    """[S, K] -> the same with the sum 1 for each token, or 0."""
    return gates / gates.sum(1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)


@raises_theirs
def top1gating(  # noqa: PLR0913 (DeepSpeed's arguments)
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """The best expert of each token. See `_Routes.answer` for what is returned.

    Args:
        logits: [S, E], fp32.
        used_token: [S], 0 or 1: tokens that count.
        noisy_gate_policy: "RSample" adds noise before the choice.
        use_rts: which tokens an expert drops is random, else as torch.topk picks among equals.
    Raises:
        UsageError: there are fewer tokens than `min_capacity`, or `use_tutel` is set.
    """
    if use_tutel:
        raise UsageError("use_tutel = True: xds has no such kernels; leave it out")
    num_tokens, num_experts = logits.shape
    if num_tokens < min_capacity:
        raise UsageError(
            f"min_capacity = {min_capacity}: there are {num_tokens} tokens; No. of tokens (batch-size) should "
            "be greater than min_capacity. Set min_capacity to 0, or use a larger batch"
        )
    gates = logits.softmax(1)
    is_noisy = noisy_gate_policy == "RSample"
    best = (logits + gumbel_rsample(logits.shape, logits.device) if is_noisy else gates).argmax(1)
    chosen = functional.one_hot(best, num_experts)
    if used_token is not None:
        chosen = chosen * used_token.to(chosen.dtype).unsqueeze(1)
    counts = chosen.sum(0)
    if drop_tokens:
        capacity = _capacity(gates, torch.tensor(capacity_factor), torch.tensor(min_capacity))
    else:
        capacity = _capacity_for_all(counts, ep_group).clamp(max=num_tokens)
    loss = (gates.mean(0) * chosen.float().mean(0)).sum() * num_experts
    order = chosen * torch.rand(chosen.shape, device=logits.device) if use_rts else chosen
    first = order.topk(min(int(capacity), num_tokens), dim=0).indices
    kept = chosen * torch.zeros_like(chosen).scatter(0, first, 1)
    places = ((kept.cumsum(0) - 1) * kept).sum(1, keepdim=True)
    own = best.unsqueeze(1)
    is_kept = kept.sum(1, keepdim=True).bool()
    routes = _Routes(loss, capacity, counts, own, is_kept, places, gates.gather(1, own))
    return routes.answer(is_sparse=sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """The two best experts of each token; first choices get places before second ones.

    Args:
        top2_2nd_expert_sampling: noise is added before the second choice. `logits` stay as they are.
    """
    num_experts = logits.shape[1]
    gates = logits.softmax(1)
    best = gates.argmax(1)
    first = functional.one_hot(best, num_experts)
    if top2_2nd_expert_sampling:
        logits = logits + gumbel_rsample(logits.shape, logits.device)
    other = logits.masked_fill(first.bool(), float("-inf")).argmax(1)
    second = functional.one_hot(other, num_experts)
    counts = (first + second).sum(0)
    loss = (gates.mean(0) * first.float().mean(0)).mean() * num_experts * num_experts
    experts = torch.stack((best, other), 1)
    before = (first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0))
    places = torch.stack([x.gather(1, experts)[:, at] for at, x in enumerate(before)], 1)
    if drop_tokens:
        factor = torch.tensor(capacity_factor * 2)
        capacity = _capacity(gates, factor, torch.tensor(min_capacity))
    else:
        capacity = _capacity_for_all(counts, ep_group)
    is_kept = places < capacity if drop_tokens else torch.ones_like(places, dtype=torch.bool)
    weights = _normalized(gates.gather(1, experts) * is_kept)
    routes = _Routes(loss, capacity, counts, experts, is_kept, places, weights)
    return routes.answer(is_sparse=sparse_routes)


@raises_theirs
def topkgating(  # noqa: PLR0913 (DeepSpeed's arguments)
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """The `k` best experts of each token.

    Args:
        drop_policy: which tokens an expert keeps, "probs": those with the largest gates, "position": the first.
    """
    if drop_policy not in ("probs", "position"):
        raise UsageError(f'drop_policy = {drop_policy!r}: must be "probs" or "position"')
    num_tokens, num_experts = logits.shape
    gates = logits.softmax(1)
    best, experts = gates.topk(k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter(1, experts, True)
    counts = mask.sum(0)
    loss = (gates.mean(0) * mask.float().mean(0)).mean() * num_experts * num_experts / k
    if drop_tokens:
        capacity = _capacity(gates, torch.tensor(capacity_factor * k), torch.tensor(min_capacity))
    else:
        capacity = _capacity_for_all(counts, ep_group)
    if drop_tokens and drop_policy == "probs":
        values = torch.zeros_like(gates).scatter(1, experts, best)
        largest = values.topk(min(int(capacity), num_tokens), dim=0).indices
        mask = mask & torch.zeros_like(mask).scatter(0, largest, True)
    places = mask.cumsum(0) - 1
    if drop_tokens and drop_policy == "position":
        mask = mask & (places < capacity)
    is_kept = mask.gather(1, experts)
    weights = _normalized(best * is_kept)
    own = places.gather(1, experts)
    routes = _Routes(loss, capacity, counts, experts, is_kept, own, weights)
    return routes.answer(is_sparse=sparse_routes)


@final
class TopKGate(nn.Module):
    """A linear layer without bias, in fp32, and the choice of `k` experts for each token."""

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.ep_group = ep_group
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> tuple[Any, ...]:
        """[S, hidden] -> as the functions; `used_token` and `use_tutel` are for k = 1."""
        x = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = multiplicative_jitter(x, device=x.device)
        logits = functional.linear(x, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        options: dict[str, Any] = {"drop_tokens": self.drop_tokens, "ep_group": self.ep_group}
        options["sparse_routes"] = sparse_routes
        if self.k == 1:
            options |= {"used_token": used_token, "use_rts": self.use_rts, "use_tutel": use_tutel}
            options["noisy_gate_policy"] = self.noisy_gate_policy if self.training else None
            found: tuple[Any, ...] = top1gating(logits, factor, self.min_capacity, **options)
            return found
        if self.k == 2:
            options["top2_2nd_expert_sampling"] = self.top2_2nd_expert_sampling
            return top2gating(logits, factor, self.min_capacity, **options)
        return topkgating(logits, self.k, factor, self.min_capacity, **options)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "TopKGate",
    "gumbel_rsample",
    "multiplicative_jitter",
    "top1gating",
    "top2gating",
    "topkgating",
]
