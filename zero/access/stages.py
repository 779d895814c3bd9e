"""The whole of a model whose pipeline stages are on several ranks: its names, and its state dict.

    stage 0   embed.weight  blocks.0...        names      embed.weight = head.weight  blocks.0...  blocks.1...
    stage 1   blocks.1...   head.weight   ->   sources    rank 0                      rank 0       rank 2

A rank has modules with the names of its own stage only. A weight tied over stages has a name on each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Bounds, Collectives
from ...ops.comm.exchange import all_gather_json
from ...ops.flat import numel_of
from ...utils.errors import UsageError
from ...utils.progress import counted
from ..core.owners import find_owner
from ..layout.groups import FlatGroups

GATHERING = "gathering weights"


def spans_stages(groups: FlatGroups | None) -> bool:
    """Other ranks have other parts of the model."""
    return groups is not None and groups.mesh.has_parts


def groups_of(model: nn.Module) -> FlatGroups | None:
    """The groups of the engine that owns the parameters of `model`; None: it is an ordinary model."""
    owners = (find_owner(param) for param in model.parameters())
    return next((owner.flat_groups for owner in owners if owner is not None), None)


def all_names(
    groups: FlatGroups, own_names: Iterable[tuple[list[str], Tensor]]
) -> dict[str, list[str]]:
    """First name -> all names, of every tensor of the whole model. A collective of all ranks.

    Args:
        own_names: the names of each tensor of this rank.
    """
    own_rows = [(groups.names.get(id(tensor), names[0]), names) for names, tensor in own_names]
    is_first = groups.is_first
    by_first: dict[str, list[str]] = {}
    for stage in all_gather_json(
        groups.world, own_rows if is_first else [], "the names of a model"
    ):
        for first, names in stage:
            known = by_first.setdefault(first, [first])
            known += [name for name in names if name not in known]
    return by_first


@dataclass(frozen=True)
class _Source:
    """A value of the state dict, which rank `rank` gets from its stage. first: the same for all its names."""

    name: str
    first: str
    rank: int
    shape: tuple[int, ...]
    dtype: str  # "": it is `plain`, and no tensor
    plain: Any


def whole_state_dict(
    model: nn.Module, groups: FlatGroups, *, target: int | None, full_precision: bool
) -> dict[str, Any]:
    """See `full_state_dict`, for a model whose stages are on several ranks. For all ranks.

    Sends: within a stage, each rank its part of every parameter to the first one; this one to `target` or all.

    Raises:
        UsageError: on every rank: a module's own state is not JSON, so it cannot be sent.
    """
    own_tensors, sources = _sources(model, groups, full_precision)
    world = groups.world
    wanted = target in (None, world.rank)
    values: dict[str, Any] = {}
    state_dict: dict[str, Any] = {}
    with torch.no_grad():
        for source in counted(
            sources, GATHERING, len(sources), "tensors", is_shown=world.rank == 0
        ):
            if source.dtype and source.first not in values:
                value = own_tensors.get(source.first)
                own_value = None if value is None else _to_first(value, full_precision)
                values[source.first] = _sent(world, source, own_value, target)
            state_dict[source.name] = values[source.first] if source.dtype else source.plain
    return state_dict if wanted else {}


def _sources(
    model: nn.Module, groups: FlatGroups, full_precision: bool
) -> tuple[Mapping[str, Tensor], list[_Source]]:
    """This rank's tensors by first name, and all values of the whole state dict, stage by stage."""
    own_tensors: dict[str, Tensor] = {}
    firsts: dict[int, str] = {}  # by id of a tensor
    rows: list[Any] = []
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            first = firsts.setdefault(id(value), groups.names.get(id(value), name))
            own_tensors.setdefault(first, value)
            dtype = _dtype_of(value, groups, full_precision)
            rows.append([name, first, _full_shape(value), str(dtype).removeprefix("torch."), None])
        else:
            rows.append([name, name, [], "", _as_json(value)])
    is_first = groups.is_first
    tables = all_gather_json(groups.world, rows if is_first else [], "the names of a state dict")
    ranks: dict[str, int] = {}
    sources: dict[str, _Source] = {}
    for rank, table in enumerate(tables):
        for name, first, shape, dtype, plain in table:
            if plain == _UNSENDABLE:
                raise UsageError(
                    f"the state dict of a pipeline: {name} is not JSON, so it cannot be sent to other ranks; "
                    "let get_extra_state return numbers, text, lists and dicts, or a tensor"
                )
            source = ranks.setdefault(first, rank)
            sources.setdefault(name, _Source(name, first, source, tuple(shape), dtype, plain))
    return own_tensors, list(sources.values())


_UNSENDABLE = {"$": "unsendable"}


def _as_json(value: Any) -> Any:
    try:
        is_same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        is_same = False
    return value if is_same else _UNSENDABLE


def _full_shape(value: Tensor) -> list[int]:
    owner = find_owner(value)
    return list(value.shape if owner is None else owner.full_shape(value))  # type: ignore[arg-type]


def _dtype_of(value: Tensor, groups: FlatGroups, full_precision: bool) -> torch.dtype:
    owner = find_owner(value) if full_precision else None
    param: nn.Parameter = value  # type: ignore[assignment]
    if owner is None or not owner.trains(param):
        return value.dtype
    return groups.of(param).policy.master_dtype(value.dtype)


def _to_first(value: Tensor, full_precision: bool) -> Tensor | None:
    """The whole value on the first rank that holds it; other ranks of its group send their parts."""
    owner = find_owner(value)
    if owner is None:
        return value.detach()
    param: nn.Parameter = value  # type: ignore[assignment]
    stored = owner.value(param) if full_precision else owner.compute(param)
    if not owner.is_first_replica(param):
        return None
    return stored.read(owner.group_of(param), 0)


def _sent(
    world: Collectives, source: _Source, value: Tensor | None, target: int | None
) -> Tensor | None:
    """A new tensor on the CPU on `target`, or on every rank. `value`: on the source."""
    wanted = target in (None, world.rank)
    dtype = getattr(torch, source.dtype)
    size_bytes = numel_of(source.shape) * dtype.itemsize
    if target == source.rank or not size_bytes:
        if wanted and value is not None:
            return value.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return torch.empty(source.shape, dtype=dtype) if wanted else None
    mine = torch.empty(0, dtype=torch.uint8, device=world.device)
    if world.rank == source.rank:
        assert value is not None
        mine = value.to(world.device).resolve_conj().resolve_neg().contiguous()
        mine = mine.view(-1).view(torch.uint8)
    bounds: Bounds = [
        (0, size_bytes if rank == source.rank else 0) for rank in range(world.world_size)
    ]
    out = mine.new_empty(size_bytes) if wanted else None
    world.collect(out, mine, bounds, target=target)
    return None if out is None else out.view(dtype).view(source.shape).cpu()


__all__ = ["GATHERING", "all_names", "groups_of", "spans_stages", "whole_state_dict"]
