"""Chooses the collectives for a process group and the device of its tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .collectives import Collectives, PartOf
from .native import Native
from .point_to_point import PeerToPeer
from .single_rank import SingleRank


def open_collectives(
    group: dist.ProcessGroup | None, device: torch.device, part_of: PartOf | None = None
) -> Collectives:
    """The collectives for `group` and the device of its tensors.

    part_of: the collectives of all ranks, if the group is a part of them.
    """
    if group is None or group.size() == 1:
        return SingleRank(device)
    if device.type == "cpu" and dist.get_backend(group) == "gloo":
        return PeerToPeer(group, device, part_of)
    return Native(group, device, part_of)
