"""Multiply-accumulates (MACs) of products, from shapes. Pure arithmetic: no tensor is read.

A MAC is one multiplication and one addition: two FLOPs. Causal masks do not lower a count: half of the work of
an attention is masked, but which part a kernel skips is its own matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

Shape = Sequence[int]


def matmul(left: Shape, right: Shape) -> int:
    """[..., rows, inner] x [..., inner, columns], the same leading dimensions on both sides.

    >>> matmul((4, 8), (8, 5)), matmul((3, 4, 8), (3, 8, 5))
    (160, 480)
    """
    return prod(left) * right[-1]


def attention(query: Shape, key: Shape, value: Shape) -> int:
    """Scores and their product with the values.

    query: [batch, heads, queries, width]; key, value: [batch, any heads, keys, width]. Query heads that share
    a head of keys count each.

    >>> attention((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))
    32768
    """
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward(query: Shape, key: Shape, value: Shape) -> int:
    """Five products: fused kernels compute the scores again, then gradients of scores, query, key and value.

    >>> attention_backward((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8)) / 32768
    2.5
    """
    return prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def convolution(inputs: Shape, weight: Shape, outputs: Shape, *, is_transposed: bool) -> int:
    """One product with the whole weight at each position of the outputs, or of the inputs if it is transposed.

    inputs, outputs: [batch, channels, *positions]. weight: [out, in / groups, *kernel]; transposed
    [in, out / groups, *kernel].

    >>> convolution((2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 6, 6), is_transposed=False)
    15552
    """
    places = inputs if is_transposed else outputs
    return places[0] * prod(places[2:]) * prod(weight)


def grouped_matmul(left: Shape, right: Shape) -> int:
    """Several products in one call. Rows of `left` (or columns of `right`) that no group has count as well.

        [rows, inner]         x [groups, inner, columns]   rows are divided over the groups
        [groups, rows, inner] x [groups, inner, columns]   a batch
        [groups, rows, inner] x [inner, columns]           columns are divided over the groups
        [rows, inner]         x [inner, columns]           inner is divided over the groups

    >>> grouped_matmul((8, 16), (2, 16, 4)), grouped_matmul((16, 8), (8, 4))
    (512, 512)
    """
    if len(left) == 3 and len(right) == 2:
        return prod(left[1:]) * right[-1]
    return prod(left) * right[-1]


def recurrent(rows: int, weights: Iterable[Shape]) -> int:
    """The matrices of recurrent layers, once for each of `rows`: steps times sequences. No element-wise work.

    >>> recurrent(10, [(64, 8), (64, 16), (64,)])
    15360
    """
    return rows * sum(prod(weight) for weight in weights if len(weight) > 1)


__all__ = [
    "attention",
    "attention_backward",
    "convolution",
    "grouped_matmul",
    "matmul",
    "recurrent",
]
