"""Which ranks of a group are on one machine."""

from __future__ import annotations

import hashlib
import platform

import torch

from .collectives import Collectives


def host_numbers(collectives: Collectives) -> list[int]:
    """For each rank a number that identifies its machine."""
    table = collectives.gather_small(torch.tensor([host_key()], device=collectives.device))
    return [int(number) for number in table.flatten().tolist()]


def host_key() -> int:
    """A number of 56 bits that identifies this machine."""
    return int.from_bytes(hashlib.sha256(_host_id().encode()).digest()[:7], "big")


def _host_id() -> str:
    """Host name and boot id. Containers and network namespaces of one machine may have different names."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return platform.node() + file.read()
    except OSError:
        return platform.node()


__all__ = ["host_key", "host_numbers"]
