"""Calls of gates, by name and arguments: the stored table and benchmarks/experts/gates.py run them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

STORED = 29  # one of so many cases is in gates.json
SHAPES = ((8, 4), (64, 4), (257, 8), (1000, 64))
FACTORS = (0.3, 1.0, 1.1, 4.0)
SKEWED: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: x,
    "skewed": lambda x: x + torch.arange(x.shape[1]) * 0.5,
    "equal": torch.zeros_like,  # every score is equal
    "far apart": lambda x: x * 200,  # most probabilities are 0
    "repeated": lambda x: x[: (len(x) + 7) // 8].repeat(8, 1)[: len(x)],  # such as padding
}


def logits_of(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Logits [S, E] of made tokens. Uniform numbers have the same bits on every CPU."""
    generator = torch.Generator().manual_seed(seed)
    return SKEWED[kind](torch.rand(shape, generator=generator) * 4)


def used_of(num_tokens: int) -> Tensor:
    """Two of three tokens are used."""
    return (torch.arange(num_tokens) % 3 != 0).long()


def cases(*seeds: int) -> Iterator[dict[str, Any]]:
    """Every gate with every option."""
    for shape, kind, factor, least, drops, seed in product(
        SHAPES, SKEWED, FACTORS, (0, 4), (True, False), seeds
    ):
        common = {"logits": kind, "shape": shape, "seed": seed}
        limits = {"capacity_factor": factor, "min_capacity": least, "drop_tokens": drops}
        for rts, noise, used in product((True, False), (None, "RSample"), (True, False)):
            options = {**limits, "noisy_gate_policy": noise, "use_rts": rts}
            yield {"gate": "top1", **common, "used": used, "options": options}
        for sampling in (True, False):
            yield {
                "gate": "top2",
                **common,
                "options": {**limits, "top2_2nd_expert_sampling": sampling},
            }
        for k, policy in product((1, 3, 4), ("probs", "position")):
            yield {"gate": "topk", **common, "options": {**limits, "k": k, "drop_policy": policy}}


def call(gates: dict[str, Callable[..., Any]], case: dict[str, Any]) -> tuple[Any, Tensor]:
    """What a gate returns, and its logits, which require a gradient."""
    logits = logits_of(case["logits"], tuple(case["shape"]), case["seed"]).requires_grad_()
    more = {"used_token": used_of(len(logits))} if case.get("used") else {}
    torch.manual_seed(case["seed"])
    return gates[case["gate"]](logits, **case["options"], **more), logits


def gradient(logits: Tensor, weights: Tensor, l_aux: Tensor) -> Tensor:
    """The gradient of the logits for a sum that tells routes apart. weights: [S, K]."""
    factors = torch.arange(1.0, weights.numel() + 1).view_as(weights) / weights.numel()
    (gradient,) = torch.autograd.grad((weights * factors).sum() + 10 * l_aux, logits)
    return gradient


def digest(index: Tensor, counts: Tensor) -> str:
    """Of the choices [S, K] and the counts [E] of a gate."""
    tensors = (index.long().contiguous(), counts.long())
    content = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:12]
