"""Finds the modules of experts of a model, and keeps this rank's experts of each.

A module of experts has its weights in tensors whose first dimension is the number of experts, and is called as
`layer.py` says: transformers marks such classes. What is cut stays the same parameter, with a smaller tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import gcd
from typing import final

from torch import nn

from ..utils.errors import UsageError

CONTRACT = ("hidden_states", "top_k_index", "top_k_weights")
Range = tuple[int, int]


@final
@dataclass(frozen=True, eq=False)
class Found:
    """A module of experts: its name in the model, and how many experts it has."""

    name: str
    module: nn.Module
    num_experts: int


@final
@dataclass(frozen=True)
class CutExperts:
    """A parameter of experts: rank r of those that share them has `by_rank[r]` of dimension 0 of `whole`."""

    name: str
    whole: tuple[int, ...]
    dim: int
    by_rank: tuple[tuple[Range, ...], ...]


@final
@dataclass
class Cut:
    """What cutting has made. slices: id(parameter) -> its cut. num_ranks: that share the experts."""

    num_ranks: int
    found: Sequence[Found]
    slices: dict[int, CutExperts] = field(default_factory=dict)


def find_experts(model: nn.Module, pattern: str | None) -> list[Found]:
    """The modules of experts of `model`. pattern: a glob of their names; None: all.

    Raises:
        UsageError: `pattern` matches no module, or one that is no module of experts.
    """
    found = []
    for name, module in model.named_modules():
        if pattern is not None and not fnmatchcase(name, pattern):
            continue
        why = why_not(module)
        if not why:
            found.append(Found(name, module, int(module.num_experts)))
        elif pattern is not None:
            raise UsageError(
                f"expert_parallel.expert_pattern = {pattern!r}: {name} ({type(module).__name__}) {why}; "
                "give a pattern of modules of experts, or remove it"
            )
    if pattern is not None and not found:
        raise UsageError(
            f"expert_parallel.expert_pattern = {pattern!r} matches no module of the model; give a glob such "
            'as "*.mlp.experts", or remove it'
        )
    return found


def why_not(module: nn.Module) -> str:
    """Why `module` is no module of experts, as a predicate; "": it is one."""
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    is_marked = hasattr(module, "_is_expert_parallel")
    if names != CONTRACT and not is_marked:
        return f"is not called with ({', '.join(CONTRACT)})"
    num_experts = getattr(module, "num_experts", None)
    if not isinstance(num_experts, int) or num_experts < 1:
        return "has no attribute num_experts"
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return "has no parameters of its own"
    others = [name for name, param in own.items() if param.shape[:1] != (num_experts,)]
    if others:
        return f"has the parameter {others[0]}, whose first dimension is not num_experts = {num_experts}"
    return ""


def fitting_size(found: Sequence[Found], num_ranks: int) -> int:
    """The most ranks that can share the experts of every layer, of the `num_ranks` ranks of a stage."""
    most = num_ranks
    for one in found:
        most = gcd(most, one.num_experts)
    return most


def check_size(found: Sequence[Found], size: int, num_ranks: int, setting: str) -> None:
    """
    Raises:
        UsageError: `size` ranks cannot share the experts.
    """
    if not found:
        raise UsageError(
            f"{setting}: the model has no module of experts, which is called with ({', '.join(CONTRACT)}); "
            "set expert_parallel.enabled to false"
        )
    if num_ranks % size:
        raise UsageError(
            f"{setting}: it must divide the {num_ranks} data, sequence and tensor ranks of a stage; "
            f"set it to {fitting_size(found, num_ranks)}, or to 0 for as many as fit"
        )
    for one in found:
        if one.num_experts % size:
            raise UsageError(
                f"{setting}: it must divide the experts of every layer, and {one.name} has "
                f"{one.num_experts}; set it to {fitting_size(found, num_ranks)}, or to 0 for as many as fit"
            )


def cut_experts(found: Sequence[Found], size: int, rank: int) -> Cut:
    """Keep the experts of `rank`, of `size` ranks."""
    cut = Cut(size, found)
    for one in found:
        share = one.num_experts // size
        by_rank = tuple(((at * share, (at + 1) * share),) for at in range(size))
        for name, param in one.module.named_parameters(recurse=False):
            full = f"{one.name}.{name}" if one.name else name
            cut.slices[id(param)] = CutExperts(full, tuple(param.shape), 0, by_rank)
            if size > 1:
                param.data = param.data[rank * share : (rank + 1) * share].clone()
    return cut


__all__ = [
    "Cut",
    "CutExperts",
    "Found",
    "check_size",
    "cut_experts",
    "find_experts",
    "fitting_size",
]
