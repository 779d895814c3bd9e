"""Builds units: moves parameters into flat buffers, one for each kind of parameter in each unit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from ...offload.stores import Stores
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agree, agreeing
from ...ops.flat import is_channels_last, numel_of
from ...ops.pool import BufferPool
from ...utils.errors import UsageError
from ..core.grad_bucket import GradBucket
from ..core.local_sum import GradDtypes
from ..core.param_bucket import LiveElements, ParamBucket, ParamMemory, own_memory
from ..core.unit import Unit
from ..features.shared_memory import KEY, check_not_written, shared_memory
from ..layout.discover import UnitPlan, plan_units
from ..layout.groups import FlatGroup, FlatGroups, buffer_of
from ..layout.layout import FlatLayout, ParamEntry, plan_flat

log = logging.getLogger("xds")
WHOLE_BUFFERS = 1 << 11  # the first number of buffers of what tensor ranks hold whole
SHARED_BUFFERS = 1 << 12  # the first number of buffers of shared groups
BUFFERS_OF_ONE = 1 << 4  # numbers of one shared group

_Entries = Sequence[tuple[str, nn.Parameter]]


class _Kind(NamedTuple):
    """The properties that all parameters of one flat buffer of a unit share.

    is_single: the parameter has one element, or its slice on some rank. torch allows writes to a placeholder of
    one element, so stage 3 never drops such parameters, and writes between steps count. They have their own
    buffer at every stage, so that all stages sum the norm in the same order.
    group: the number of its group of ranks. cast: see `FlatGroups.casts`; at every stage, for the same reason.
    """

    trains: bool
    is_single: bool
    dtype: torch.dtype
    group: int
    cast: torch.dtype | None


@final
class Builder:
    """Builds units with the values of rank 0. `groups` as in `ShardedModel`."""

    def __init__(
        self,
        groups: Mapping[int, int],
        flat_groups: FlatGroups,
        pool: BufferPool,
        stores: Stores,
        *,
        shares_params: bool = False,
    ) -> None:
        """shares_params: the ranks of a machine have one copy of what is trained, if they share memory."""
        self._shares_params = shares_params
        self._has_told = False  # that the ranks share no memory
        self._groups = groups
        self._flat_groups = flat_groups
        self._policy = flat_groups.data.policy
        self._pool = pool
        self._stores = stores
        self._counts: Counter[int] = Counter()  # buffers of each group, by its number
        self.live = LiveElements()  # of all buffers that it builds

    def build(
        self, model: nn.Module, runs: Sequence[Sequence[tuple[str, nn.Module]]], min_numel: int
    ) -> list[Unit]:
        """The units of `model`, the root last. `runs`, `min_numel`: see `plan_units`."""
        with agreeing(self._flat_groups.world, "xds.initialize"):
            if self._shares_params:
                check_not_written(model)
            blocks, root = self._plan(model, runs, min_numel)
        for buffer in model.buffers():
            buffer.data = broadcast_whole(self._flat_groups.data.everyone, buffer.data)
        self._cast_empty(model)
        self._reserve([*blocks, root])
        units = [self._build(plan, is_root=False) for plan in blocks]
        units.append(self._build(root, is_root=True))
        return [unit for unit in units if unit.params or unit.is_root]

    def _plan(
        self, model: nn.Module, runs: Sequence[Sequence[tuple[str, nn.Module]]], min_numel: int
    ) -> tuple[list[UnitPlan], UnitPlan]:
        groups = self._flat_groups

        def most(param: nn.Parameter) -> int:
            return numel_of(groups.shapes_of(param)[1])

        return plan_units(model, runs, min_numel, groups.in_several_stages, most)

    def _cast_empty(self, model: nn.Module) -> None:
        """Cast parameters without elements, which are in no buffer, to the dtype of the others."""
        for param in model.parameters():
            if not param.numel():
                param.data = param.data.to(self._flat_groups.dtype_of(param))

    def _build(self, plan: UnitPlan, *, is_root: bool) -> Unit:
        unit = Unit(plan.name, plan.modules, is_root)
        for kind, entries in self._kinds(plan):
            group = self._flat_groups.of(entries[0][1])
            if kind.trains or group.policy.shards_params:
                self._add_flat(unit, entries, kind, group)
            else:
                for _, param in entries:
                    value = param.data.to(kind.dtype)
                    param.data = broadcast_whole(group.everyone, value)
        return unit

    def _reserve(self, plans: Sequence[UnitPlan]) -> None:
        """Reserve space for shards on a disk.

        Raises UsageError: on every rank, if one has too little space.
        """
        shards = self._stores.shards
        if not shards.is_on_disk:
            return
        kinds = [of_kind for plan in plans for of_kind in self._kinds(plan) if not of_kind[0].group]
        for index, (kind, entries) in enumerate(kinds):
            layout = self._layout(entries, self._flat_groups.data)
            shards.plan(index, layout.shard_numel, kind.dtype.itemsize)
        failure = ""
        try:
            shards.open()
        except UsageError as error:
            failure = str(error)
        agree(self._flat_groups.world, failure, UsageError, "offload to NVMe")

    def _kinds(self, plan: UnitPlan) -> list[tuple[_Kind, _Entries]]:
        """The parameters of a unit by kind, those that are trained first."""
        kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
        for name, param in plan.params:
            dtype = self._flat_groups.dtype_of(param)
            group = self._flat_groups.of(param)
            is_single = 1 in map(numel_of, self._flat_groups.shapes_of(param))
            cast = self._flat_groups.casts.get(id(param))
            kind = _Kind(id(param) in self._groups, is_single, dtype, group.number, cast)
            kinds.setdefault(kind, []).append((self._flat_groups.name_of(param, name), param))

        def place(item: tuple[_Kind, _Entries]) -> tuple[bool, int, str]:
            # stages find the parameters that they share in different orders
            is_shared = self._flat_groups.of(item[1][0][1]).is_shared
            dtype = str(item[0].dtype) if is_shared else ""
            return not item[0].trains, item[0].group, dtype

        return sorted(kinds.items(), key=place)

    def _layout(self, entries: _Entries, group: FlatGroup) -> FlatLayout:
        box_of = self._flat_groups.box_of
        return plan_flat(
            [
                ParamEntry(
                    name,
                    tuple(p.shape),
                    self._groups.get(id(p), 0),
                    box_of(p),
                    box_of(p) is None and is_channels_last(p),
                )
                for name, p in entries
            ],
            group.collectives.world_size,
            group.policy.align_numel,
            group.policy.num_parts,
        )

    def _most_numel(self, entries: _Entries, group: FlatGroup) -> int:
        """The elements of the buffer with `entries` on the rank of those with slices that has the most."""
        shapes = [self._flat_groups.all_shapes_of(param) for _, param in entries]
        numels = []
        for rank in range(max(map(len, shapes))):
            parts = [
                ParamEntry(name, of_ranks[min(rank, len(of_ranks) - 1)], self._groups.get(id(p), 0))
                for (name, p), of_ranks in zip(entries, shapes, strict=True)
            ]
            world_size, align_numel = group.collectives.world_size, group.policy.align_numel
            numels.append(plan_flat(parts, world_size, align_numel).numel)
        return max(numels)

    def _number(self, group: FlatGroup) -> int:
        """The number of a new buffer: the same on all ranks of its group, and used once on each."""
        # the groups of what tensor ranks hold whole have the same ranks: one count for both
        counted = group.number if group.is_shared else min(group.number, 1)
        count = self._counts[counted]
        self._counts[counted] += 1
        if group.is_shared:
            return SHARED_BUFFERS + group.number * BUFFERS_OF_ONE + count
        return count + (WHOLE_BUFFERS if group.number else 0)

    def _add_flat(self, unit: Unit, entries: _Entries, kind: _Kind, group: FlatGroup) -> None:
        if group.is_shared:  # stages find the parameters in different orders
            entries = sorted(entries, key=lambda entry: entry[0])
        by_name = dict(entries)
        layout = self._layout(entries, group)
        ordered = [by_name[slot.name] for slot in layout.slots]
        index = self._number(group)
        frozen = "" if kind.trains else " (frozen)"
        name = f"unit '{unit.name}'" if unit.name else "the root unit"
        shared = ", shared by several stages" if group.is_shared else ""
        group.collectives.name_buffer(index, name + frozen + shared)
        most_numel = self._most_numel(entries, group)
        params = ParamBucket(
            layout,
            ordered,
            group,
            index=index,
            store=self._stores.shards,
            memory=self._memory(layout, kind, group, index, name),
            live=self.live,
            most_numel=most_numel,
        )
        if kind.is_single and group.policy.shards_params:
            params.keep_gathered()
            params.unshard()
        unit.params.append(params)
        unit.most_numel += most_numel
        if kind.trains:
            store = self._stores.next(layout.numel)
            sums = store.sums(self._policy.sum_dtype(kind.dtype))
            policy = group.policy
            dtypes = GradDtypes(
                kind.dtype, policy.sum_dtype(kind.dtype), policy.sent_dtype(kind.dtype)
            )
            unit.grads.append(
                GradBucket(layout, ordered, group, dtypes, pool=self._pool, store=sums, index=index)
            )
            unit.master_stores.append(store)

    def _memory(
        self, layout: FlatLayout, kind: _Kind, group: FlatGroup, index: int, name: str
    ) -> ParamMemory:
        """The memory of flat buffer `index`."""
        collectives, numel = group.collectives, layout.numel
        if self._shares_params and not kind.is_single and collectives.world_size > 1:
            shared = shared_memory(collectives, numel, kind.dtype, buffer=index, name=name)
            if shared is not None:
                return shared
            if collectives.rank == 0 and not self._has_told:
                self._has_told = True
                log.warning("%s: ranks share no memory here, so each one has all parameters", KEY)
        sender = group.scheme.sender(
            buffer_of(layout, index, kind.dtype, group, trains=kind.trains, cast=kind.cast)
        )
        is_dropped = group.policy.shards_params
        return own_memory(collectives, numel, kind.dtype, sender, is_dropped=is_dropped)


def broadcast_whole(collectives: Collectives, tensor: Tensor) -> Tensor:
    """Rank 0's values of a tensor of any dtype and strides: in `tensor` itself, or in its replacement.

    Elements of an expanded tensor share memory, so it cannot be written. It is replaced if its values differ
    from rank 0's.
    """
    if collectives.world_size == 1 or not tensor.numel() or tensor.layout != torch.strided:
        return tensor
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    received = dense.clone() if dense is not tensor else dense
    collectives.broadcast(received.view(-1).view(torch.uint8))  # gloo does not support every dtype
    if received is tensor:
        return tensor
    if any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return (
            tensor
            if received.view(-1).view(torch.uint8).equal(dense.view(-1).view(torch.uint8))
            else received
        )
    return tensor.copy_(received)


__all__ = ["Builder"]
