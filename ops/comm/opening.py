"""Chooses the backend for a process group and the device of its tensors.

one rank               SingleRank
fake                   WaitingBackend         a rank that waits for its place in the group
gloo, CPU, one machine SharedMemoryBackend    where its ranks can map each other's memory
gloo, CPU, machines    MachinesBackend        where one of them has several ranks
gloo, CPU              GlooBackend
gloo, another device   StagedGlooBackend      several ranks on one GPU; devices without a backend
else                   NcclBackend
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ..device import device_of
from ..watch.watch import Probe
from .backend import Member, SingleRank, state_of
from .collectives import Collectives, PartOf, timeout_of
from .config import Communication
from .memory.machines import MachinesBackend
from .memory.peers import connect
from .memory.shared_memory import SharedMemoryBackend
from .nccl import NcclBackend
from .point_to_point import GlooBackend, StagedGlooBackend

log = logging.getLogger("xds")
DEFAULT = Communication.model_construct()
NO_SHARED_MEMORY = "ranks of one machine do not share memory, and send messages instead"
STAGED = (
    "gloo sends messages of GPUs through host memory: use it for tests with several ranks on one GPU, and NCCL "
    "for training"
)
DEFAULT_TIMEOUT_SECONDS = 600.0  # where torch does not provide that of the group


def open_collectives(
    group: dist.ProcessGroup | None,
    device: torch.device,
    part_of: PartOf | None = None,
    section: Communication = DEFAULT,
    *,
    recovers: bool = False,
    wait_seconds: float | None = None,
) -> Collectives:
    """Return the collectives for `group` and the device of its tensors. **Collective.**

    Args:
        group: None is a group of this rank alone.
        part_of: The collectives of all ranks, if the group is a part of them.
        section: The same on all ranks.
        recovers: Another rank may fail meanwhile, and nobody reports why: see `Watch.recovers`.
        wait_seconds: The timeout of later waits; None: that with which the group was opened.
    """
    if group is None or group.size() == 1:
        return Collectives(SingleRank(device), part_of)
    member = member_of(group, device, part_of)
    if dist.get_backend(group) == "fake":
        from .waiting import WaitingBackend

        return Collectives(WaitingBackend(member), part_of)
    if dist.get_backend(group) != "gloo":
        return open_nccl(member, part_of)
    if device.type == "cpu":
        return _open_on_host(member, group, part_of, section, recovers, wait_seconds)
    if group.rank() == 0 and part_of is None:
        log.warning(STAGED)
    return Collectives(StagedGlooBackend(member), part_of)


def member_of(
    group: dist.ProcessGroup, device: torch.device, part_of: PartOf | None = None
) -> Member:
    """This rank as a member of `group`, with the next number of an engine. **Collective.**"""
    state = state_of(group)
    engine, state.num_engines = state.num_engines, state.num_engines + 1
    ranks = range(group.size()) if part_of is None else part_of.ranks
    return Member(group, device, group.rank(), ranks, engine)


def open_nccl(member: Member, part_of: PartOf | None = None) -> Collectives:
    """The collectives of torch's own backend, e.g. NCCL."""
    collectives = Collectives(NcclBackend(member), part_of)
    if device_of(member.device).has_streams:  # waits return before the work is done
        collectives.watch.probe = Probe(member.device)
    return collectives


def _open_on_host(
    member: Member,
    group: dist.ProcessGroup,
    part_of: PartOf | None,
    section: Communication,
    recovers: bool,
    wait_seconds: float | None,
) -> Collectives:
    collectives = Collectives(GlooBackend(member), part_of)
    collectives.watch.recovers |= recovers
    if not section.shared_memory:
        return collectives
    neighbours, reason = connect(collectives)
    if neighbours is None:
        if reason and part_of is None:  # the reason of a part of a group is that of the whole group
            log.warning("%s: %s", NO_SHARED_MEMORY, reason)
        return collectives
    seconds = wait_seconds or timeout_of(group, member.device) or DEFAULT_TIMEOUT_SECONDS
    if len(set(neighbours.hosts)) == 1:
        collectives.replace_backend(SharedMemoryBackend(member, neighbours, seconds))
        return collectives
    machines = MachinesBackend(member, neighbours, seconds, is_hierarchical=section.hierarchical)
    collectives.replace_backend(machines)
    collectives.traffic.is_across = machines.is_across
    return collectives


__all__ = ["PartOf", "member_of", "open_collectives", "open_nccl"]
