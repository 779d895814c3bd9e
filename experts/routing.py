"""Which tokens go to which rank, and the order in which their outputs are summed. Index arithmetic only.

    experts 0 1 | 2 3      two ranks with two experts each
    token 0  1 3           to rank 0: row 0, for its expert 1     to rank 1: row 0, for its expert 1
    token 1  2 3                                                  to rank 1: row 1, for its experts 0 and 1

A *pair* is a token and one of its experts. A *row* is a token on its way to a rank that has experts of it. So a
token is sent once to a rank, however many of its experts are there.

Order of sums. A token's outputs are summed in the tree of the bits of its experts' numbers: experts 2i and
2i + 1 first, then groups of four, and so on. A rank with a power of two experts holds a node of this tree. So
the sum has the same bits for each such number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class Sent:
    """What a rank sends. Pairs are in the order of (chunk, rank, token, expert), rows in that of their tokens.

    pairs [P]: the place of each pair in the flattened top_k_index; those that go nowhere come last.
    codes [P]: row in the message x own experts of its rank + number of the expert on that rank.
    tokens [T * K]: of each row; undefined behind the last one.
    counts [C, E, 2]: rows and pairs of each chunk for each rank; of one chunk [E, 2].
    """

    pairs: Tensor
    codes: Tensor
    tokens: Tensor
    counts: Tensor

    def chunks(self, counts: Sequence[list[int]], shape: torch.Size) -> list[Sent]:
        """What goes of each chunk, as if its tokens were all.

        counts [C, 2 E]: those of `counts`, on the host. shape: of top_k_index.
        """
        rows, pairs = ([sum(each[first::2]) for each in counts] for first in (0, 1))
        parts = zip(
            self.pairs[: sum(pairs)].split_with_sizes(pairs),
            self.codes[: sum(pairs)].split_with_sizes(pairs),
            self.tokens[: sum(rows)].split_with_sizes(rows),
            self.counts.unbind(),
            accumulate(chunk_sizes(shape[0], len(counts)), initial=0),
            strict=False,
        )
        return [
            Sent(places - first * shape[1], codes, tokens - first, own)
            if first
            else Sent(places, codes, tokens, own)
            for places, codes, tokens, own, first in parts
        ]


def route(top_k_index: Tensor, num_local: int, num_ranks: int, num_chunks: int = 1) -> Sent:
    """Plan the messages of a rank. The host does not wait for the device.

    Args:
        top_k_index: [T, K], numbers of experts; -1 for none.
        num_local: the experts of each of `num_ranks` ranks.
        num_chunks: of the tokens, of the sizes `chunk_sizes`. A rank gets a message of each.
    """
    num_tokens, num_choices = top_k_index.shape
    device, num_messages = top_k_index.device, num_chunks * num_ranks
    expert = top_k_index.reshape(-1).long()
    token = torch.arange(num_tokens, device=device).repeat_interleave(num_choices)
    message = expert // num_local
    if num_chunks > 1:
        chunk = ((token + 1) * num_chunks - 1) // max(num_tokens, 1)
        message = message + chunk * num_ranks
    message = torch.where(expert < 0, num_messages, message)
    key = (message * num_tokens + token) * num_local + expert.clamp(min=0) % num_local
    key, pairs = torch.sort(key, stable=True)  # a token may choose an expert twice
    place = key // num_local  # (message, token)
    message, token = place // max(num_tokens, 1), place % max(num_tokens, 1)
    is_first = torch.ones_like(place)
    is_first[1:] = place[1:] != place[:-1]
    is_first = is_first * (message < num_messages)
    row = is_first.cumsum(0) - 1
    counts = torch.zeros(num_messages + 1, 2, dtype=torch.int64, device=device)
    counts.index_add_(0, message, torch.stack((is_first, torch.ones_like(is_first)), 1))
    before = counts[:, 0].cumsum(0) - counts[:, 0]  # rows of earlier messages
    codes = (row - before[message]) * num_local + key % num_local
    tokens = token.new_zeros(len(token) + 1)
    # a row's pairs write one number
    tokens[torch.where(message < num_messages, row, len(token))] = token
    return Sent(pairs, codes, tokens[:-1], counts[:-1].view(num_chunks, num_ranks, 2))


def chunk_sizes(num_tokens: int, num_chunks: int) -> list[int]:
    """
    >>> chunk_sizes(7, 3)
    [2, 2, 3]
    """
    ends = [num_tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [stop - start for start, stop in pairwise(ends)]


# -- sums in one order --------------------------------------------------------------------------------------


NODE_BITS = 24  # of a leaf of the tree; terms of unlike sums meet above them


def tree_places(numbers: Tensor, odd: int) -> Tensor:
    """Numbers whose bits are the tree of sums. odd: the odd factor of how many numbers there are.

    >>> tree_places(torch.arange(6), 3).tolist()
    [0, 1, 2, 4, 5, 6]
    """
    width = (odd - 1).bit_length()
    return ((numbers // odd) << width) | (numbers % odd)


def odd_factor(number: int) -> int:
    """
    >>> [odd_factor(number) for number in (1, 8, 12, 7)]
    [1, 1, 3, 7]
    """
    return number // (number & -number)


FEW = 2


def sum_of_few(place: Tensor, num_sums: int, terms: Tensor) -> Tensor:
    """Sums [N, H] of at most `FEW` of the terms [P, H] each, which have one order. place [P]: of each term."""
    return terms.new_zeros(num_sums, terms.shape[1]).index_add_(0, place, terms)


@final
class OrderedSum:
    """Sums terms [P, H] to sums [N, H], in an order that does not depend on how terms are split over ranks.

    On a CPU, and under `torch.use_deterministic_algorithms`, the order is the tree. Elsewhere the terms of
    a sum are added one after the other, which needs no wait of the host.
    """

    def __init__(
        self, place: Tensor, node: Tensor, num_sums: int, order: Tensor | None = None
    ) -> None:
        """place, node [P]: the sum of each term and its leaf in the tree; sorted by (place, node).

        order [P]: the place of each of these terms among those that are given; None: they are sorted too.
        """
        self._place, self._node, self._num_sums, self._order = place, node, num_sums, order

    def __call__(self, terms: Tensor) -> Tensor:
        """The sums in the dtype of `terms`; those without terms are 0."""
        is_tree = terms.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        is_own = self._order is not None
        terms = terms if self._order is None else terms.index_select(0, self._order)
        if not is_tree:
            lengths = torch.zeros(self._num_sums, dtype=torch.int64, device=terms.device)
            lengths.index_add_(0, self._place, torch.ones_like(self._place))
            return torch.segment_reduce(terms, "sum", lengths=lengths, unsafe=True, initial=0)
        firsts, merges = self._merges
        if merges and not is_own:
            terms = terms.clone()
        for into, other in merges:
            terms.index_add_(0, into, terms.index_select(0, other))
        whole = terms.index_select(0, firsts) if merges else terms
        if len(firsts) == self._num_sums:
            return whole
        sums = terms.new_zeros(self._num_sums, terms.shape[1])
        return sums.index_copy_(0, self._place[firsts], whole)

    @cached_property
    def _merges(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The first term of each sum, and (into, other) of each round: terms[into] += terms[other].

        Two neighbours of a sum meet in the tree at the height of the highest bit in which their leaves differ.
        There the terms from the right one on, summed so far in its place, are added to those on its left: to
        the first term that has equal bits from this height on.
        """
        if not len(self._place):
            return self._place, []
        leaf = (self._place << NODE_BITS) | self._node
        differing = (leaf[1:] ^ leaf[:-1]).clamp_(max=1 << NODE_BITS)  # exact in fp32
        height = torch.frexp(differing.float()).exponent
        counts = torch.bincount(height, minlength=NODE_BITS + 2).tolist()
        height, right = torch.sort(height, stable=True)
        right = right + 1
        left = torch.searchsorted(leaf, (leaf[right] >> height) << height)
        rights = torch.split(right, counts)
        rounds = zip(torch.split(left, counts), rights, counts[:-1], strict=False)
        firsts = torch.cat((right.new_zeros(1), rights[-1]))
        return firsts, [(into, other) for into, other, count in rounds if count]


__all__ = [
    "FEW",
    "OrderedSum",
    "Sent",
    "chunk_sizes",
    "odd_factor",
    "route",
    "sum_of_few",
    "tree_places",
]
