"""Tests of sums in rank order, norms, chunks and the buffer pool."""

from __future__ import annotations

import pytest
import torch

from xds.ops.flat import CHUNK_NUMEL, align_up, chunks, fingerprint, overlap, sum_in_order
from xds.ops.pool import BufferPool

CPU = torch.device("cpu")


def test_ranges_are_aligned_and_cut_into_chunks_that_cover_them() -> None:
    assert [align_up(numel, 16) for numel in (0, 1, 16, 17)] == [0, 16, 16, 32]
    pieces = list(chunks(2 * CHUNK_NUMEL + 5, on_cpu=True))
    assert [(p.start, p.stop) for p in pieces] == [
        (0, CHUNK_NUMEL),
        (CHUNK_NUMEL, 2 * CHUNK_NUMEL),
        (2 * CHUNK_NUMEL, 2 * CHUNK_NUMEL + 5),
    ]
    assert len(list(chunks(10 * CHUNK_NUMEL, on_cpu=False))) == 1
    assert list(chunks(0, on_cpu=True)) == []


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_sum_in_order(world: int, dtype: torch.dtype, add: bool) -> None:
    parts = [torch.randn(CHUNK_NUMEL + 33).to(dtype) for _ in range(world)]
    out = torch.randn(CHUNK_NUMEL + 33)
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    if add:
        want = out + want
    sum_in_order(out, parts, add=add)
    assert torch.equal(out, want)


@pytest.mark.parametrize("own", [0, 1, 2, 3])
def test_sum_in_order_into_one_of_its_parts(own: int) -> None:
    parts = [torch.randn(CHUNK_NUMEL + 33) for _ in range(4)]
    want = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    sum_in_order(parts[own], parts, add=False)
    assert torch.equal(parts[own], want)


def test_the_sum_of_an_element_does_not_depend_on_its_place() -> None:
    values = [1.0, 1e8, -1e8]
    parts = [torch.full((CHUNK_NUMEL + 7,), value) for value in values]
    out = torch.empty(CHUNK_NUMEL + 7)
    sum_in_order(out, parts, add=False)
    assert out.unique().tolist() == [0.0]


def test_the_pool_hands_the_same_memory_out_again() -> None:
    pool = BufferPool()
    first = pool.take(100, torch.float32, CPU)
    assert first.shape == (100,) and pool.allocated_bytes == 400
    at = first.data_ptr()
    pool.give(first)
    again = pool.take(150, torch.bfloat16, CPU)
    assert again.data_ptr() == at and again.dtype == torch.bfloat16
    assert pool.allocated_bytes == 400
    other = pool.take(10, torch.float32, CPU)
    assert other.data_ptr() != at and pool.allocated_bytes == 440
    for _ in range(2):  # a buffer that is smaller than its block
        pool.give(again)
        assert pool.allocated_bytes == 440
        again = pool.take(150, torch.bfloat16, CPU)


def test_the_pool_replaces_blocks_that_are_too_small() -> None:
    pool = BufferPool()
    pool.give(pool.take(10, torch.float32, CPU))
    pool.take(1000, torch.float32, CPU)
    assert pool.allocated_bytes == 4000


@pytest.mark.parametrize("numel", [8 * CHUNK_NUMEL, 8 * CHUNK_NUMEL + 5])  # in 64 and in 16 bits
def test_a_fingerprint_changes_where_values_change_or_swap(numel: int) -> None:
    flat = torch.arange(numel, dtype=torch.float32).bfloat16()
    before = fingerprint(flat)
    assert fingerprint(flat.clone()) == before
    for place in (0, numel // 2, numel - 1):
        written = flat.clone()
        written[place] += 1e6
        assert fingerprint(written) != before
    swapped, words = flat.clone(), slice(0, 4 * CHUNK_NUMEL)
    swapped[words] = flat[4 * CHUNK_NUMEL : 8 * CHUNK_NUMEL]
    swapped[4 * CHUNK_NUMEL : 8 * CHUNK_NUMEL] = flat[words]
    assert fingerprint(swapped) != before


@pytest.mark.parametrize(
    "one, within, want",
    [
        ((0, 10), (0, 10), (0, 10)),
        ((2, 4), (0, 10), (2, 4)),
        ((0, 10), (2, 4), (2, 4)),
        ((0, 5), (3, 9), (3, 5)),
        ((5, 12), (3, 9), (5, 9)),
        ((0, 3), (3, 9), (3, 3)),  # neighbours, and apart: empty, and inside of `within`
        ((9, 12), (3, 9), (9, 9)),
        ((0, 1), (3, 9), (3, 3)),
        ((20, 30), (3, 9), (9, 9)),
        ((4, 4), (3, 9), (4, 4)),
        ((0, 10), (4, 4), (4, 4)),
    ],
)
def test_the_overlap_of_two_ranges(
    one: tuple[int, int], within: tuple[int, int], want: tuple[int, int]
) -> None:
    assert overlap(one, within) == want
