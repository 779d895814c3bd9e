"""The model of torch's allocator (benchmarks/gpu_memory) on traces that are small enough to follow by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_memory"))
from caching_allocator import (  # noqa: E402
    MIB,
    CachingAllocator,
    OutOfMemory,
    replay,
    smallest_device,
)


def test_sizes_of_segments() -> None:
    for num_bytes, reserved in [(1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB + 1, 12)]:
        allocator = CachingAllocator()
        allocator.allocate("a", num_bytes)
        assert allocator.reserved == reserved * MIB
        assert allocator.allocated == -(-num_bytes // 512) * 512


def test_the_best_block_is_split_and_joined_again() -> None:
    mib = [f"alloc a {30 * MIB} 0", f"alloc b {20 * MIB} 0", "free a", "free b"]
    assert replay(mib).reserved == 50 * MIB
    # 12 of the 20; then 25 of the 30; the rest of the 20 serves 8, and joined again it serves 20
    more = [f"alloc c {12 * MIB} 0", f"alloc d {25 * MIB} 0", f"alloc e {8 * MIB} 0"]
    assert replay(mib + more).reserved == 50 * MIB
    again = [*mib, *more, "free c", "free e", f"alloc f {20 * MIB} 0"]
    assert replay(again).reserved == 50 * MIB
    assert replay([*mib, *more, "free c", f"alloc f {20 * MIB} 0"]).reserved == 70 * MIB


def test_blocks_stay_with_their_stream_and_pool() -> None:
    lines = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {30 * MIB} 1"]
    assert replay(lines).reserved == 60 * MIB
    gathered = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {30 * MIB} 0 gathered"]
    assert replay(gathered).reserved == 30 * MIB
    assert replay(gathered, pools=True).reserved == 60 * MIB


def test_a_full_device_returns_free_segments_first() -> None:
    lines = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {40 * MIB} 0"]
    assert replay(lines).most_reserved == 70 * MIB
    assert replay(lines, limit=40 * MIB).reserved == 40 * MIB
    with pytest.raises(OutOfMemory):
        replay(lines, limit=39 * MIB)
    assert smallest_device(lines, 1) == 40 * MIB
    # b holds its segment, in which 30 are free: 20 + 40 are in use
    held = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {11 * MIB} 0", f"alloc c {40 * MIB} 0"]
    assert smallest_device(held, 1) == pytest.approx(70 * MIB, rel=0.01)
