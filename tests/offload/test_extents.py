"""Extents: where each state begins, and how large the file is."""

from __future__ import annotations

import pytest

from xds.offload.disk.extents import Extents


@pytest.mark.parametrize(
    "sizes, offsets, total_bytes",
    [
        ([], [], 0),
        ([1], [0], 4096),
        ([4096], [0], 4096),
        ([4097, 1], [0, 8192], 12_288),
        ([4095, 4096, 4097, 0, 12], [0, 4096, 8192, 16_384, 16_384], 20_480),
        ([1 << 40, 5], [0, 1 << 40], (1 << 40) + 4096),
    ],
)
def test_extents_follow_each_other_at_multiples_of_4096(sizes, offsets, total_bytes):
    extents = Extents()
    given = [extents.add(f"state {number}", size) for number, size in enumerate(sizes)]
    assert [one.offset for one in given] == offsets
    assert [one.num_bytes for one in given] == sizes
    assert extents.total_bytes == sum(one.padded_bytes for one in given) == total_bytes
    assert list(extents) == given and len(extents) == len(sizes)
    assert all(extents[one.name] == one for one in given)


def test_a_name_occurs_once():
    extents = Extents()
    extents.add("exp_avg", 10)
    with pytest.raises(AssertionError, match="exp_avg"):
        extents.add("exp_avg", 10)
