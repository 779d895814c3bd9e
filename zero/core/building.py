"""Builds units: moves parameters into flat buffers, one for each kind of parameter in each unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import nn

from ...compression.reducer import GradientReducer
from ...offload.homes import Homes
from ...ops.comm.collectives import Collectives
from ...ops.comm.pool import BufferPool
from ...utils.errors import UsageError
from ..config import ZeroConfig
from .discover import UnitPlan, find_units
from .disk_failures import agree
from .flat_grads import FlatGrads
from .flat_params import FlatParams
from .layout import Entry, FlatLayout, plan_flat
from .policy import Policy
from .tensors import broadcast_whole
from .unit import Unit

_Entries = Sequence[tuple[str, nn.Parameter]]


class _Kind(NamedTuple):
    """The properties that all parameters of one flat buffer of a unit share.

    is_single: the parameter has one element. torch allows writes to a placeholder of one element, so stage 3
    never drops such parameters, and writes between steps count. They have their own buffer at every stage,
    so that all stages sum the norm in the same order.
    """

    trains: bool
    is_single: bool
    dtype: torch.dtype


@final
class Builder:
    """Builds units with the values of rank 0. `groups` as in `ShardedModel`."""

    def __init__(
        self,
        groups: Mapping[int, int],
        policy: Policy,
        collectives: Collectives,
        reducer: GradientReducer,
        pool: BufferPool,
        homes: Homes,
    ) -> None:
        self._groups = groups
        self._policy = policy
        self._collectives = collectives
        self._reducer = reducer
        self._pool = pool
        self._homes = homes
        self._numbers = 0

    def build(self, model: nn.Module, config: ZeroConfig) -> list[Unit]:
        """The units of `model`, the root last."""
        blocks, root = find_units(model, config.units, config.unit_min_numel)
        for buffer in model.buffers():
            buffer.data = broadcast_whole(self._collectives, buffer.data)
        self._cast_empty(model)
        self._reserve([*blocks, root])
        units = [self._build(plan, is_root=False) for plan in blocks]
        units.append(self._build(root, is_root=True))
        return [unit for unit in units if unit.params or unit.is_root]

    def _cast_empty(self, model: nn.Module) -> None:
        """Cast parameters without elements, which are in no buffer, to the dtype of the others."""
        for param in model.parameters():
            if not param.numel():
                param.data = param.data.to(self._policy.param_dtype(param.dtype))

    def _build(self, plan: UnitPlan, *, is_root: bool) -> Unit:
        unit = Unit(plan.name, plan.modules, is_root)
        for kind, entries in self._kinds(plan):
            if kind.trains or self._policy.shards_params:
                self._add_flat(unit, entries, kind)
            else:
                for _, param in entries:
                    value = param.data.to(kind.dtype)
                    param.data = broadcast_whole(self._collectives, value)
        return unit

    def _reserve(self, plans: Sequence[UnitPlan]) -> None:
        """Reserve space for shards on a disk.

        Raises UsageError: on every rank, if one has too little space.
        """
        shards = self._homes.shards
        if not shards.is_on_disk:
            return
        kinds = [found for plan in plans for found in self._kinds(plan)]
        for index, (kind, entries) in enumerate(kinds):
            shards.plan(index, self._layout(entries).shard_numel, kind.dtype.itemsize)
        failure = ""
        try:
            shards.open()
        except UsageError as error:
            failure = str(error)
        agree(self._collectives, failure, UsageError)

    def _kinds(self, plan: UnitPlan) -> list[tuple[_Kind, _Entries]]:
        """The parameters of a unit by kind, those that are trained first."""
        kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
        for name, param in plan.params:
            dtype = self._policy.param_dtype(param.dtype)
            kind = _Kind(id(param) in self._groups, param.numel() == 1, dtype)
            kinds.setdefault(kind, []).append((name, param))
        return sorted(kinds.items(), key=lambda found: not found[0].trains)

    def _layout(self, entries: _Entries) -> FlatLayout:
        return plan_flat(
            [Entry(name, tuple(p.shape), self._groups.get(id(p), 0)) for name, p in entries],
            self._collectives.world_size,
        )

    def _add_flat(self, unit: Unit, entries: _Entries, kind: _Kind) -> None:
        by_name = dict(entries)
        layout = self._layout(entries)
        ordered = [by_name[slot.name] for slot in layout.slots]
        index = self._numbers
        self._numbers += 1
        frozen = "" if kind.trains else " (frozen)"
        name = f"unit '{unit.name}'" if unit.name else "the root unit"
        self._collectives.name_buffer(index, name + frozen)
        params = FlatParams(
            layout,
            ordered,
            kind.dtype,
            self._collectives,
            index=index,
            is_sharded=self._policy.shards_params,
            home=self._homes.shards,
        )
        if kind.is_single and self._policy.shards_params:
            params.keep_gathered()
            params.unshard()
        unit.params.append(params)
        if kind.trains:
            home = self._homes.next(layout.numel)
            sums = home.sums(self._policy.sum_dtype(kind.dtype))
            grads = (layout, ordered, self._policy, self._collectives, self._reducer, self._pool)
            unit.grads.append(FlatGrads(*grads, sums, index))
            unit.homes.append(home)


__all__ = ["Builder"]
