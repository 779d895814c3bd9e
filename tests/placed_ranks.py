"""Test helper: ranks that believe to be on several machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from xds.ops.comm import hosts


@contextmanager
def placed(layout: str) -> Iterator[None]:
    """Inside, this rank is on the machine of its letter, e.g. of "aab"."""
    former, rank = hosts._host_id, dist.get_rank()
    hosts._host_id = lambda: f"machine {layout[rank]}"
    try:
        yield
    finally:
        hosts._host_id = former
