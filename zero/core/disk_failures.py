"""Raises the failure of one rank's disk on every rank, so that none waits for the others in vain."""

from __future__ import annotations

from ...offload.homes import Homes
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agree
from ...utils.errors import XdsError


def agree_on_disks(collectives: Collectives, homes: Homes) -> None:
    """Sends 512 bytes to each rank if values are on a disk, and nothing otherwise. A collective.

    Raises:
        XdsError: on every rank; the disk of one has failed.
    """
    if homes.are_on_disk:
        agree(collectives, homes.failure(), XdsError, "offload to NVMe")


__all__ = ["agree_on_disks"]
