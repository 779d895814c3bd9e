"""Raises the failure of one rank's disk on every rank, so that none waits for the others in vain."""

from __future__ import annotations

from ...offload.homes import Homes
from ...ops.comm.collectives import Collectives
from ...ops.from_host import bytes_to
from ...utils.errors import XdsError

TEXT_BYTES = 512


def agree_on_disks(collectives: Collectives, homes: Homes) -> None:
    """Sends 512 bytes to each rank if values are on a disk, and nothing otherwise. A collective.

    Raises:
        XdsError: on every rank; the disk of one has failed.
    """
    if homes.are_on_disk:
        agree(collectives, homes.failure(), XdsError)


def agree(
    collectives: Collectives, text: str, kind: type[XdsError], doing: str = "offload to NVMe"
) -> None:
    """Raise `kind` on every rank if one has a `text`; "" is none. Sends 512 bytes to each rank."""
    # a character that is cut in two is left out
    own = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    sent = bytes_to(collectives.device, own)
    table = collectives.gather_small(sent, what=f"whether {doing} works").view(-1, TEXT_BYTES).cpu()
    if not table[:, 0].any():
        return
    failed = [rank for rank, row in enumerate(table) if row[0]]
    first = bytes(table[failed[0]].tolist()).rstrip(b"\0").decode(errors="ignore")
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    raise kind(f"{doing} failed on rank {failed[0]}{others}: {text or first}")


__all__ = ["agree", "agree_on_disks"]
