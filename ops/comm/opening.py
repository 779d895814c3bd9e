"""Chooses the collectives for a process group and the device of its tensors.

one rank               SingleRank
gloo, CPU, one machine SharedMemory    where its ranks can map each other's memory
gloo, CPU, machines    Machines        where one of them has several ranks
gloo, CPU              PeerToPeer
gloo, CUDA             Staged          several ranks on one GPU
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
from .point_to_point import PeerToPeer, Staged
from .shared_memory import SharedMemory
from .single_rank import SingleRank

log = logging.getLogger("xds")
DEFAULT = Communication.model_construct()
NO_SHARED_MEMORY = "ranks of one machine do not share memory, and send messages instead"
STAGED = (
    "gloo sends messages of GPUs through host memory: use it for tests with several ranks on one GPU, and NCCL "
    "for training"
)
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
    if dist.get_backend(group) != "gloo":
        return Native(group, device, part_of)
    if device.type == "cpu":
        return _on_host(group, device, part_of, section)
    if group.rank() == 0 and part_of is None:
        log.warning(STAGED)
    return Staged(group, device, part_of)


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
        if why and part_of is None:  # of a part of a group the reason is that of the whole
            log.warning("%s: %s", NO_SHARED_MEMORY, why)
        return plain
    seconds = timeout_of(group, device) or DEFAULT_TIMEOUT_SECONDS
    if len(set(found.hosts)) == 1:
        return SharedMemory(group, device, found, seconds, part_of, plain)
    is_hierarchical = section.hierarchical
    return Machines(group, device, found, seconds, part_of, plain, is_hierarchical=is_hierarchical)


__all__ = ["open_collectives"]
