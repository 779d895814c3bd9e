"""Chooses the collectives for a process group and the device of its tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .collectives import Collectives
from .native import Native
from .point_to_point import PeerToPeer
from .single_rank import SingleRank


def open_collectives(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """The collectives for `group` and the device of its tensors."""
    if group is None or group.size() == 1:
        return SingleRank(device)
    if device.type == "cpu" and dist.get_backend(group) == "gloo":
        return PeerToPeer(group, device)
    return Native(group, device)
