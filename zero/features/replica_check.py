"""Finds writes to whole parameters that only some ranks made: the next update would mix old and new values.

Every rank adds to a message of the step how often user code has written since the last one: by torch's version
counters, which the engine's own writes do not move, and by assignments to `.data`. Only where these numbers
differ do the ranks compare values. So a write through `.data` in place (`p.data.fill_()`) is not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agree
from ...ops.flat import fingerprint
from ...ops.torch_internals import NoTorchFunction
from ...utils.errors import UsageError
from ..core.param_bucket import ParamBucket
from ..layout.groups import FlatGroups


@final
class _Watched:
    """A buffer that stays whole between steps, and the sum of its parameters' addresses from its start."""

    def __init__(self, flat: ParamBucket) -> None:
        pairs = list(zip(flat.params, flat.layout.slots, strict=True))
        filled = [(param, slot) for param, slot in pairs if slot.numel]
        self.flat = flat
        self.params = tuple(param for param, _ in filled)
        self.names = tuple(slot.name for _, slot in filled)
        self.counted = tuple(param for param in self.params if not param.is_inference())
        self._offsets = sum(slot.offset for _, slot in filled) * flat.raw.element_size()

    def is_assigned(self) -> bool:
        """User code has assigned to `.data` of some parameter."""
        start = self.flat.raw.data_ptr() * len(self.params)
        return sum([param.data_ptr() for param in self.params]) != start + self._offsets

    def fingerprints(self) -> list[torch.Tensor]:
        return [fingerprint(param.data.reshape(-1)) for param in self.params]


@final
class ReplicaCheck:
    """Compares over the ranks. It costs about 0.1 us for each parameter that stays whole, and no message."""

    def __init__(self, flats: Sequence[ParamBucket], groups: FlatGroups) -> None:
        """`flats`: those that stay whole are watched; they are known by now."""
        whole = [flat for flat in flats if flat.group.everyone.world_size > 1]
        self._groups = groups
        self._watched = [_Watched(flat) for flat in whole if not flat.may_be_resharded]
        self._versions = 0
        self._base = self._sum()

    def begin(self) -> None:
        """All ranks agree now."""
        self._base = self._versions = self._sum()

    def count(self) -> int:
        """The writes on this rank since all ranks agreed."""
        with NoTorchFunction():
            self._versions = self._sum()
            assigned = [watched.is_assigned() for watched in self._watched]
        return self._versions - self._base + sum(assigned)

    def _sum(self) -> int:
        return sum([param._version for watched in self._watched for param in watched.counted])

    @torch.no_grad()
    def agree(self, counts: Sequence[int]) -> None:
        """Check the `counts` of all ranks, after `count`. Where they differ: 8 bytes for each parameter.

        Raises:
            UsageError: on every rank; a parameter has different values. What is sharded has its old ones again.
        """
        if len(set(counts)) > 1:
            messages = [self._compare(group) for group in self._groups.holders]
            text = next((message for message in messages if message), "")
            if (
                len(self._groups.holders) > 1
                or self._groups.world is not self._groups.data.everyone
            ):
                agree(self._groups.world, text, UsageError, "the comparison of parameters")
            elif text:
                raise UsageError(text)
        self._base = self._versions

    def _compare(self, collectives: Collectives) -> str:
        """What differs in the buffers of one group; "" if nothing does."""
        inside = [
            watched for watched in self._watched if watched.flat.group.everyone is collectives
        ]
        fingerprints = [value for watched in inside for value in watched.fingerprints()]
        if not fingerprints:
            return ""
        table = collectives.gather_small(torch.stack(fingerprints)).tolist()
        columns = list(zip(*table, strict=True))
        places = [(watched, name) for watched in inside for name in watched.names]
        differing_at = [number for number, column in enumerate(columns) if len(set(column)) > 1]
        if not differing_at:
            return ""
        differing = dict.fromkeys(places[number][0].flat for number in differing_at)
        for flat in differing:
            if flat.shards_params:
                flat.start_publish()
                flat.wait()
        is_restored = all(flat.shards_params for flat in differing)
        if is_restored:
            self._base = self._versions
        name, first = places[differing_at[0]][1], columns[differing_at[0]]
        other = next(rank for rank, value in enumerate(first) if value != first[0])
        state = (
            "it has its old values again" if is_restored else "each rank still has its own values"
        )
        return (
            f"{name} was written on some ranks only: rank 0 and rank {other} have different "
            f"values; {state}, and nothing was updated; write the same values on every rank, or inside "
            "xds.zero.GatheredParameters(params, modifier_rank=0)"
        )


__all__ = ["ReplicaCheck"]
