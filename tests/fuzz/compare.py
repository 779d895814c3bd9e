"""When the results of both sides count as equal, and the first thing that does not.

fp32: both compute the same products in the same order; what differs is the order in which ranks and
micro-batches are added, and fused updates. That is some 1e-7 of a value a step; sums of `width` terms and
three or four steps of a smooth network leave it under 4e-5. A lost or doubled gradient is 1e-2 or more.

bf16 (8 bits of mantissa, 4e-3 a rounding), fp16 (11 bits, 5e-4): both sides compute in the same dtype on the
same values, but gradients of a weight that is used several times, of several ranks and of several
micro-batches are rounded in another order. An update that differs by such a rounding can change the last bit
of a weight, and everything after it by as much. So some roundings are allowed, which is far under what a
gradient that is lost, doubled or stale makes; those are seen in fp32 to the last digits as well.

A sign (Lion) of a gradient near 0 may come out either way: as many elements may have taken the other
direction as have gradients that small.

Some cases are worse conditioned than that: a sign, or a division by a small state, makes much of a last bit.
That is not guessed at. Where a case differs, plain PyTorch trains it twice more, with gradients that are wrong
by about one rounding, and for fp32 once in fp64. What these runs differ from the first by is what roundings do
to this case; a difference counts only if it is more than SENSITIVE times as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .optimizers import OPTIMIZERS

ROUNDING = {"fp32": 1.2e-7, "fp16": 4.9e-4, "bf16": 3.9e-3}
SENSITIVE = 4.0


@dataclass(frozen=True)
class Difference:
    """How far apart one result of the two sides is, and how far it may be."""

    what: str
    off: float
    limit: float
    told: str


@dataclass(frozen=True)
class Tolerance:
    """`value`: of losses and norms, relative. `param`: of an update, relative to its length."""

    value: float
    param: float
    flips: float

    @classmethod
    def of(cls, case: Case) -> Tolerance:
        one = ROUNDING["bf16" if case.has("Autocast") else case.precision]
        few = 300 if one == ROUNDING["fp32"] else 24
        is_sign = OPTIMIZERS[case.optimizer].is_sign
        value = few * one * (4 if is_sign and few == 24 else 1)
        return cls(value, few * one, 4 * one + 1e-5 if is_sign else 0.0)


Reports = list[dict[str, Any]]  # of each rank: seen, norms, params, states, buffers


def differences(
    case: Case, plain: Reports, ours: Reports, noisy: Sequence[Reports] = ()
) -> list[str]:
    """What is not equal, the first of it first; empty where all is.

    Args:
        noisy: what plain PyTorch makes of gradients that are wrong by a rounding.
    """
    slack: dict[str, float] = {}
    for other in noisy:
        for one in _compared(case, plain, other):
            slack[one.what] = max(slack.get(one.what, 0.0), SENSITIVE * one.off)
    found = [
        f"{one.what}: {one.told}"
        for one in _compared(case, plain, ours)
        if not one.off <= max(one.limit, slack.get(one.what, 0.0))
    ]
    return found + _apart(ours)


def is_beyond_range(plain: Reports) -> bool:
    """Plain PyTorch itself came to inf or nan, or would have where ranks send sums in fp16."""
    numbers = [
        torch.as_tensor(value).double()
        for report in plain
        for value in (*report["norms"], *(value for _, value in report["seen"]))
    ]
    is_finite = all(bool(number.isfinite().all()) for number in numbers)
    return not is_finite or any(report["is_beyond"] for report in plain)


def _compared(case: Case, plain: Reports, ours: Reports) -> list[Difference]:
    allowed = Tolerance.of(case)
    found: list[Difference] = []
    for rank, (want, got) in enumerate(zip(plain, ours, strict=True)):
        found += _seen(rank, want, got, allowed)
        found += _norms(rank, want["norms"], got["norms"], allowed)
        found += _tensors(f"rank {rank} buffer", case, want["buffers"], got["buffers"], allowed)
    found += _tensors("parameter", case, plain[0]["params"], ours[0]["params"], allowed)
    found += _tensors("state of", case, plain[0]["states"], ours[0]["states"], allowed)
    return found


def _apart(ours: Reports) -> list[str]:
    found = []
    for rank, got in enumerate(ours[1:], start=1):
        for what in ("params", "computed", "states"):
            for name, value in ours[0][what].items():
                if not torch.equal(value, got[what].get(name, torch.empty(0))):
                    found.append(f"rank {rank} has another value of {name} ({what}) than rank 0")
    return found


def _seen(rank: int, want: Any, got: Any, allowed: Tolerance) -> list[Difference]:
    """A loss is a square: where it comes near 0, its error is as the root of it."""
    norm = max(want["norms"], default=0.0)
    want, got = want["seen"], got["seen"]
    if [name for name, _ in want] != [name for name, _ in got]:
        told = f"{[n for n, _ in got]} where plain PyTorch saw {[n for n, _ in want]}"
        return [Difference(f"rank {rank} saw", math.inf, 0.0, told)]
    found = []
    losses = [abs(value) for name, value in want if name == "loss"]
    typical = sum(losses) / max(len(losses), 1)
    for number, ((name, one), (_, two)) in enumerate(zip(want, got, strict=True)):
        one, two = torch.as_tensor(one), torch.as_tensor(two)
        what = f"rank {rank} {name} (number {number})"
        if one.shape != two.shape:
            told = f"shape {tuple(two.shape)} not {tuple(one.shape)}"
            found.append(Difference(what, math.inf, 0.0, told))
            continue
        off = (one.double() - two.double()).norm().item()
        size = one.double().norm().item()
        limit = allowed.value * max(size, math.sqrt(size * typical), 1e-4 * typical)
        if name.startswith("gradient"):  # one of several that cancel out has their rounding
            limit = allowed.value * max(size, 0.3 * norm)
        is_one = one.numel() == 1
        told = f"{two.item():.7g} not {one.item():.7g}" if is_one else f"off by {off:.3g}"
        found.append(Difference(what, off, limit, told))
    return found


def _norms(rank: int, want: list[float], got: list[Any], allowed: Tolerance) -> list[Difference]:
    return [
        Difference(
            f"rank {rank} gradient norm of step {step}",
            math.inf if two is None else abs(one - two),
            allowed.value * max(one, 0.05 * max(want)),
            f"{two} not {one:.7g}",
        )
        for step, (one, two) in enumerate(zip(want, got, strict=True))
    ]


def _tensors(
    what: str, case: Case, want: dict[str, Tensor], got: dict[str, Tensor], allowed: Tolerance
) -> list[Difference]:
    found = []
    for name, one in want.items():
        if not one.numel():
            continue
        two = got.get(name)
        if two is None or two.shape != one.shape:
            told = "is not there, or has another shape"
            found.append(Difference(f"{what} {name}", math.inf, 0.0, told))
            continue
        off = (_finite(one) - _finite(two)).norm().item()
        told = f"off by {off:.3g} of {one.norm().item():.3g}"
        off = off if torch.equal(one.isfinite(), two.isfinite()) else math.inf
        found.append(Difference(f"{what} {name}", off, _limit(what, case, one, allowed), told))
    return found


def _finite(value: Tensor) -> Tensor:
    """Squares of very large gradients are inf on both sides."""
    return value.double().nan_to_num(0.0, 0.0, 0.0)


def _limit(what: str, case: Case, value: Tensor, allowed: Tolerance) -> float:
    """In the 2-norm. A step is about as long as the learning rate for each element (Adam, Lion)."""
    root = math.sqrt(value.numel())
    # a group, or a later step, may have three times the learning rate
    step = 3 * case.lr * case.num_steps * OPTIMIZERS[case.optimizer].reach
    length = max(_finite(value).norm().item(), root * step)
    is_low = case.precision != "fp32" or case.has("Autocast")
    if is_low and what == "parameter":  # masters have full precision: only the updates differ
        length = root * step + 0.1 * value.double().norm().item()
    flips = 2 * step * math.sqrt(max(allowed.flips * value.numel(), 2.0)) if allowed.flips else 0.0
    return allowed.param * length + flips
