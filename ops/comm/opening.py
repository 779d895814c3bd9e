"""Which collectives suit a process group and the device of its tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .alone import Alone
from .collectives import Collectives
from .native import Native
from .point_to_point import PeerToPeer


def open_collectives(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """The collectives that suit `group` and the device its tensors live on."""
    if group is None or group.size() == 1:
        return Alone(device)
    if device.type == "cpu" and dist.get_backend(group) == "gloo":
        return PeerToPeer(group, device)
    return Native(group, device)
