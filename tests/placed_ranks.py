"""Test helper: ranks that believe to be on several machines."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from xds.ops.comm import exchange

_own, _lock = exchange._host_id, threading.Lock()
_inside: list[Sequence[object]] = []  # of each rank that is a thread of this process


@contextmanager
def placed(layout: Sequence[object]) -> Iterator[None]:
    """Inside, rank r says that it is on machine layout[r], e.g. of "aab" or [0, 0, 1]."""
    with _lock:
        _inside.append(layout)
        exchange._host_id = lambda: f"machine {layout[dist.get_rank()]}"
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                exchange._host_id = _own
