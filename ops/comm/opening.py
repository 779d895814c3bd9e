"""Chooses the collectives for a process group and the device of its tensors.

one rank               SingleRank
gloo, CPU, one machine SharedMemory    where its ranks can map each other's memory
gloo, CPU, machines    Machines        where one of them has several ranks
gloo, CPU              PeerToPeer
else                   Native
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from .collectives import Collectives, PartOf, timeout_of
from .config import Communication
from .machines import Machines
from .memory.peers import connect
from .native import Native
from .point_to_point import PeerToPeer
from .shared_memory import SharedMemory
from .single_rank import SingleRank

log = logging.getLogger("xds")
DEFAULT = Communication.model_construct()
DEFAULT_TIMEOUT_SECONDS = 600.0  # where torch does not say that of the group


def open_collectives(
    group: dist.ProcessGroup | None,
    device: torch.device,
    part_of: PartOf | None = None,
    section: Communication = DEFAULT,
) -> Collectives:
    """The collectives for `group` and the device of its tensors. For all ranks of the group.

    Args:
        part_of: the collectives of all ranks, if the group is a part of them.
        section: the same on all ranks.
    """
    if group is None or group.size() == 1:
        return SingleRank(device)
    if device.type == "cpu" and dist.get_backend(group) == "gloo":
        return _on_host(group, device, part_of, section)
    return Native(group, device, part_of)


def _on_host(
    group: dist.ProcessGroup,
    device: torch.device,
    part_of: PartOf | None,
    section: Communication,
) -> Collectives:
    plain = PeerToPeer(group, device, part_of)
    if not section.shared_memory:
        return plain
    found, why = connect(
        plain.rank, plain.world_size, lambda mine, what: plain.gather_small(mine, what=what)
    )
    if found is None:
        _tell(why, is_part=part_of is not None)
        return plain
    seconds = timeout_of(group, device) or DEFAULT_TIMEOUT_SECONDS
    if len(set(found.hosts)) == 1:
        return SharedMemory(group, device, found, seconds, part_of, plain)
    is_hierarchical = section.hierarchical
    return Machines(group, device, found, seconds, part_of, plain, is_hierarchical=is_hierarchical)


_told: set[str] = set()  # "" once a group of this process has found no neighbours


def _tell(why: str, *, is_part: bool) -> None:
    """Log why ranks do not share memory: once, and not for each part of a group that has told it."""
    if why and why not in _told and not (is_part and _told):
        log.warning("ranks of one machine do not share memory, and send messages instead: %s", why)
    _told.add(why)


__all__ = ["open_collectives"]
