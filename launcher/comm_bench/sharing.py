"""Whether the ranks share memory, and why not; where they do, what other rows compare it with.

xds        reads the memory of peers           buffers in memory that peers read in place
xds-gloo   the same algorithms over messages   buffers of torch
torch      gloo's own collectives              buffers of torch
/ copy     a plain copy by every rank          buffers of torch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist

from ...ops.comm.hosts import host_numbers
from ...ops.comm.memory.peers import connect
from ...ops.comm.opening import DEFAULT, open_collectives
from .cases import RankContext


@final
@dataclass(frozen=True)
class Sharing:
    """num_machines: whose ranks share memory; 0: none do, and `why_not` says why."""

    num_machines: int
    why_not: str = ""

    @property
    def is_used(self) -> bool:
        return self.num_machines > 0

    def __str__(self) -> str:
        if not self.is_used:
            return f"not used, {self.why_not}"
        if self.num_machines == 1:
            return "used, ranks read each other's buffers"
        return f"used inside each of {self.num_machines} hosts, messages between them"

    def facts(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {"shares_memory": self.is_used, "shared_memory": str(self)}


def open_sharing(context: RankContext) -> Sharing:
    """For all ranks. As in ops/comm/opening.py, which chooses."""
    where = context.collectives
    if where.world_size == 1:
        return Sharing(0, "there is one rank")
    backend = str(dist.get_backend(context.group))
    if where.device.type != "cpu" or backend != "gloo":
        return Sharing(0, f"{backend} carries the messages")
    found, why_not = connect(
        where.rank, where.world_size, lambda mine, what: where.gather_small(mine, what=what)
    )
    if found is None:
        is_alone = len(set(host_numbers(where))) == where.world_size
        other = "each rank has a host of its own" if is_alone else "another rank's log says why"
        return Sharing(0, why_not or other)
    return Sharing(len(set(found.hosts)))


def contexts_of(context: RankContext, sharing: Sharing) -> Callable[[str], RankContext]:
    """The context for the rows of a way: `Row.by`. For all ranks."""
    if not sharing.is_used:
        return lambda by: context
    group, device = context.group, context.collectives.device
    section = DEFAULT.model_copy(update={"shared_memory": False})
    messages = open_collectives(group, device, None, section)
    over_messages = replace(context, collectives=messages)
    return lambda by: context if by == "xds" else over_messages


def copies_of(
    context: RankContext, sharing: Sharing, max_bytes: int
) -> Callable[[int], Callable[[], object] | None]:
    """Makes a plain copy of so many bytes, up to `max_bytes`; None where there is none to compare with."""
    if sharing.num_machines != 1:
        return lambda size_bytes: None
    source, target = (torch.ones(max_bytes, dtype=torch.uint8) for _ in range(2))

    def copy_of(size_bytes: int) -> Callable[[], object] | None:
        there, here = (whole[:size_bytes].view(context.dtype) for whole in (target, source))
        return lambda: there.copy_(here)

    return lambda size_bytes: copy_of(size_bytes) if size_bytes else None


__all__ = ["Sharing", "contexts_of", "copies_of", "open_sharing"]
