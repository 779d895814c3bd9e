"""Tests of the arithmetic of rings: which rank has what, and attention block by block equals torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from xds.tensor.sequence.blocks import Visibility, attend, gradients, merge
from xds.tensor.sequence.layout import layout_of, num_exchanging
from xds.tensor.sequence.shares import Range, shares

SAMPLES, TOKENS, WIDTH = 2, 11, 4


def test_the_ranks_that_exchange_heads_are_the_largest_divisor() -> None:
    wanted = {
        (1, 2): 1,
        (2, 4): 2,
        (3, 4): 2,
        (9, 4): 4,
        (4, 6): 3,
        (5, 6): 3,
        (3, 5): 1,
        (2, 8): 2,
    }
    assert {one: num_exchanging(*one) for one in wanted} == wanted


def test_four_ranks_with_three_heads_are_two_blocks() -> None:
    found = layout_of(((0, 2), (2, 5), (5, 7), (7, 10)), 3, 1, 3)
    assert found.blocks == ((0, 5), (5, 10))
    assert found.tokens == ((0, 0), (0, 0), (0, 2), (2, 5))
    assert found.heads == ((0, 0), (0, 0), (0, 1), (1, 3))
    assert found.key_heads == ((0, 0), (0, 0), (0, 1), (0, 1))
    assert (found.own, found.ring, found.size) == (1, (1, 3), 2)


def test_enough_heads_give_one_block() -> None:
    found = layout_of(shares(10, 2), 4, 2, 1)
    assert (found.blocks, found.ring) == (((0, 10),), (1,))
    assert (found.tokens, found.heads) == (((0, 5), (5, 10)), ((0, 2), (2, 4)))
    assert found.key_heads == ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("window", "queries", "keys", "wanted"),
    [
        (None, (4, 8), (0, 4), (0, 4)),
        (None, (4, 8), (4, 8), (4, 8)),
        (None, (4, 6), (4, 8), (4, 6)),
        (None, (0, 4), (4, 8), (4, 4)),
        (2, (4, 8), (0, 4), (3, 4)),
        (1, (4, 8), (0, 4), (4, 4)),
        (5, (8, 12), (0, 4), (4, 4)),
        (6, (8, 12), (0, 4), (3, 4)),
    ],
)
def test_keys_that_are_too_early_or_too_late_are_left_out(
    window: int | None, queries: Range, keys: Range, wanted: Range
) -> None:
    assert Visibility(window).keys(queries, keys) == wanted


def seen_of(kind: str) -> Visibility:
    kept = torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
    if kind == "padded right":
        kept[0, 7:] = False
    if kind == "padded left":
        kept[0, :6] = False
    documents = torch.tensor([[0] * 3 + [1] * 5 + [2] * 3, [0] * 8 + [1] * 3])
    window = 4 if "window" in kind else None
    return Visibility(
        window, kept if "padded" in kind else None, documents if "packed" in kind else None
    )


def whole_mask(seen: Visibility) -> Tensor:
    """[B, 1, N, N], pair by pair."""
    found = torch.zeros(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.bool)
    for sample in range(SAMPLES):
        for i in range(TOKENS):
            for j in range(i + 1):
                near = seen.window is None or i - j < seen.window
                kept = seen.kept is None or seen.kept[sample, j]
                given = seen.documents
                together = given is None or given[sample, i] == given[sample, j]
                found[sample, 0, i, j] = bool(near and kept and together)
    return found


KINDS = ["causal", "window", "padded right", "padded left", "packed", "packed window"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_masks_of_blocks_are_parts_of_the_whole_mask(kind: str, num_blocks: int) -> None:
    seen = seen_of(kind)
    wanted = whole_mask(seen)
    found = torch.zeros_like(wanted)
    for queries in shares(TOKENS, num_blocks):
        for block in shares(TOKENS, num_blocks):
            keys = seen.keys(queries, block)
            if keys[0] < keys[1]:
                mask = seen.mask(queries, keys, torch.device("cpu"))
                found[:, :, slice(*queries), slice(*keys)] = True if mask is None else mask
    assert torch.equal(found, wanted)


def by_blocks(
    tensors: tuple[Tensor, Tensor, Tensor], grad: Tensor, seen: Visibility, num_blocks: int
) -> list[Tensor]:
    """Output and gradients, computed block by block as ring ranks do."""
    query, key, value = tensors
    blocks, scale = shares(TOKENS, num_blocks), 0.7
    output = torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype)
    found = [torch.zeros_like(x) for x in tensors]
    for queries in blocks:
        rows, parts = slice(*queries), []
        for block in reversed(blocks):
            keys = seen.keys(queries, block)
            if keys[0] < keys[1]:
                mask = seen.mask(queries, keys, query.device)
                near = (query[:, :, rows], key[:, :, slice(*keys)], value[:, :, slice(*keys)])
                parts.append((near, mask, slice(*keys)))
        merged = attend(parts[0][0], parts[0][1], scale)
        for near, mask, _ in parts[1:]:
            merged = merge(merged, attend(near, mask, scale))
        output[:, :, rows] = merged[0]
        products = (merged[0] * grad[:, :, rows]).sum(-1, keepdim=True)
        for near, mask, columns in parts:
            grads = gradients(near, grad[:, :, rows], merged[1], products, mask, scale)
            for total, part, places in zip(found, grads, (rows, columns, columns), strict=True):
                total[:, :, places] += part
    return [output, *found]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kv_heads", "num_blocks"), [(2, 3), (1, 4)])
def test_attention_by_blocks_equals_that_of_torch(
    kind: str, kv_heads: int, num_blocks: int
) -> None:
    torch.manual_seed(3)
    options: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    query = torch.randn(SAMPLES, 4, TOKENS, WIDTH, **options)
    key = torch.randn(SAMPLES, kv_heads, TOKENS, WIDTH, **options)
    value = torch.randn(SAMPLES, kv_heads, TOKENS, WIDTH + 2, **options)
    seen = seen_of(kind)
    mask = whole_mask(seen)
    sees = mask.any(-1, keepdim=True)
    grad = torch.randn(SAMPLES, 4, TOKENS, WIDTH + 2, dtype=torch.float64)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask | ~sees, scale=0.7, enable_gqa=True
    ).masked_fill(~sees, 0)
    wanted.backward(grad)
    with torch.no_grad():
        found = by_blocks((query, key, value), grad, seen, num_blocks)
    for x, y in zip(found, (wanted, query.grad, key.grad, value.grad), strict=True):
        assert y is not None
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
