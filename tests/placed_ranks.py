"""Test helper: ranks that believe to be on several machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from xds.ops.comm import hosts


@contextmanager
def placed(layout: Sequence[object]) -> Iterator[None]:
    """Inside, rank r says that it is on machine layout[r], e.g. of "aab" or [0, 0, 1]."""
    former, rank = hosts._host_id, dist.get_rank()
    hosts._host_id = lambda: f"machine {layout[rank]}"
    try:
        yield
    finally:
        hosts._host_id = former
