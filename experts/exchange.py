"""Sends tokens to the ranks of their experts, and the sums of their outputs back.

                forward                                                backward
    `there`     tokens [T, H] -> rows [R, H] -> pairs [P, H]           `there_back`
    (experts)   pairs of a token and an own expert -> outputs [P, H]
    `back`      outputs [P, H] -> sums for rows [R, H] -> sums for tokens [T, H]   `back_back`

A row is sent once each way and pass. Before the rows go the counts of rows and pairs, which the host waits for.
The numbers of experts and their weights travel beside the rows, as do the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError
from .routing import OrderedSum, odd_factor, route, tree_places

KIND = "experts"
Map = Callable[[Tensor], Tensor]


@final
class Trip:
    """The messages of one call of a layer: all ranks of `group` make the same calls.

    Attributes:
        experts [P]: the number, among those of this rank, of each pair that it computes; set by `there`.
        rows_sent: the rows for other ranks.
    """

    def __init__(
        self, group: Collectives, what: str, top_k_index: Tensor, num_local: int, number: int = 0
    ) -> None:
        """Sends 16 bytes for each pair of ranks and 8 to each, and waits for them.

        what: the layer, in messages. top_k_index: see `route`. number: of the layer in the model.

        Raises:
            UsageError: on all ranks: they call different layers.
        """
        self._group, self._what = group, what
        self._shape = top_k_index.shape
        self._num_local = num_local
        ranks = group.world_size
        self._sent = sent = route(top_k_index, num_local, ranks)
        counts = torch.cat((sent.counts.view(-1), sent.counts.new_full((1,), number))).view(1, -1)
        if ranks > 1:
            counts = group.gather_small(counts[0], what=f"counts of tokens of {what}")
        # the device has the table as well: sizes that it needs are no copies from the host
        self._on_device = counts[:, :-1].reshape(ranks, ranks, 2)
        rows = counts.tolist()
        if any(row[-1] != number for row in rows):
            raise UsageError(
                f"expert_parallel: this rank calls {what} while another one calls other experts; give all "
                "ranks batches that use the same layers, such as images on all of them or on none, or leave "
                "the layers out with expert_parallel.expert_pattern"
            )
        table = [[row[at : at + 2] for at in range(0, 2 * ranks, 2)] for row in rows]
        mine = table[group.rank]
        self._rows_out = [rows for rows, _ in mine]
        self._pairs_out = [pairs for _, pairs in mine]
        self._rows_in = [table[rank][group.rank][0] for rank in range(ranks)]
        self._pairs_in = [table[rank][group.rank][1] for rank in range(ranks)]
        self.rows_sent = sum(self._rows_out) - self._rows_out[group.rank]
        num_rows, self._num_pairs = sum(self._rows_out), sum(self._pairs_out)
        self._tokens = sent.tokens[:num_rows]
        self._pairs = sent.pairs[: self._num_pairs]
        self._ordered: OrderedSum | None = None
        self._weights: Tensor | None = None

    def there(self, top_k_weights: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each pair here [P] and its inputs [P, H], from weights [T, K] and tokens [T, H].

        A recomputation sends no weights: it has those of the forward.
        """
        rows = self._start(hidden[self._tokens], self._rows_out, self._rows_in)
        if self._weights is None:
            self._weights = self._pair_weights(top_k_weights)
        return self._weights.clone(), rows()[self._row]

    def there_back(self, weight_grads: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of weights [T, K] and tokens [T, H], from those of pairs [P] and inputs [P, H]."""
        rows = self._start(self._of_rows(grads), self._rows_in, self._rows_out)
        weights = self._start(weight_grads.view(-1, 1), self._pairs_in, self._pairs_out)
        result = weight_grads.new_zeros(self._shape[0] * self._shape[1])
        result[self._pairs] = weights().view(-1)
        return result.view(self._shape), self._summed(rows())

    def back(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Outputs of pairs [P, H] -> their sums for each token [T, H], which travel in `dtype`."""
        rows = self._of_rows(outputs).to(dtype)
        return self._summed(self._start(rows, self._rows_in, self._rows_out)())

    def back_back(self, grads: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradients of outputs [P, H] in `dtype`, from those of tokens [T, H]."""
        return self._start(grads[self._tokens], self._rows_out, self._rows_in)().to(dtype)[
            self._row
        ]

    def _pair_weights(self, top_k_weights: Tensor) -> Tensor:
        """Send the numbers of experts, and the weights. Returns the weight of each pair here [P]."""
        weights = top_k_weights.reshape(-1)[self._pairs]
        # numbers and weights are one message, of elements as wide as the weights
        wide = torch.float64 if weights.dtype == torch.float64 else torch.float32
        whole = torch.int64 if wide == torch.float64 else torch.int32
        codes = self._sent.codes[: self._num_pairs].to(whole)
        message = torch.stack((codes, weights.to(wide).view(whole)), 1)
        message = self._start(message, self._pairs_out, self._pairs_in)()
        code = message[:, 0].long()
        rows_in, pairs_in = self._on_device[:, self._group.rank].unbind(1)
        before = rows_in.cumsum(0) - rows_in  # rows of earlier ranks
        first = before.repeat_interleave(pairs_in, output_size=sum(self._pairs_in))
        self.experts = code % self._num_local
        self._row = code // self._num_local + first
        node = tree_places(self.experts, odd_factor(self._num_local))
        self._of_rows = OrderedSum(self._row, node, sum(self._rows_in))
        return message[:, 1].contiguous().view(wide).to(weights.dtype)

    def _summed(self, received: Tensor) -> Tensor:
        """Rows that came back -> the sum of each token's rows [T, H]."""
        if self._ordered is None:
            counts = self._on_device[self._group.rank, :, 0]
            ranks = torch.arange(self._group.world_size, device=counts.device)
            rank = ranks.repeat_interleave(counts, output_size=len(self._tokens))
            node = tree_places(rank, odd_factor(self._group.world_size))
            place, order = torch.sort(self._tokens, stable=True)
            self._ordered = OrderedSum(place, node[order], self._shape[0], order)
        return self._ordered(received)

    def computed(self, pairs: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The outputs of own experts [P, H]. See `travel` for `compute`.

        Under `torch.use_deterministic_algorithms` the pairs of each rank are computed apart, as on that rank
        without an exchange. Gradients are then added in the order of ranks: autograd begins with the last call.
        """
        if not torch.are_deterministic_algorithms_enabled() or self._group.world_size == 1:
            return compute(pairs, self.experts)
        sizes = self._pairs_in
        parts = zip(torch.split(pairs, sizes), torch.split(self.experts, sizes), strict=True)
        outputs = [compute(*part) for part in reversed(list(parts))]
        return torch.cat(outputs[::-1])

    def _start(
        self, rows: Tensor, sizes_out: list[int], sizes_in: list[int]
    ) -> Callable[[], Tensor]:
        """Send rows, in the order of ranks. Returns what waits for those of the others, and returns them."""
        if self._group.world_size == 1:
            return lambda: rows
        rows = rows.contiguous()
        result = rows.new_empty(sum(sizes_in), *rows.shape[1:])
        outs, parts = list(torch.split(result, sizes_in)), list(torch.split(rows, sizes_out))
        handle = self._group.all_to_all(outs, parts, what=f"tokens of {self._what}", kind=KIND)

        def received() -> Tensor:
            handle.wait()
            return result

        return received


class _There(torch.autograd.Function):
    """`Trip.there`. `anchor` makes it part of every graph."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, hidden: Tensor, anchor: Tensor, trip: Trip
    ) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        return trip.there(weights, hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.trip.there_back(*grads), None, None


class _Back(torch.autograd.Function):
    """`Trip.back`. `anchor` makes it part of every graph."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, anchor: Tensor, trip: Trip, dtype: torch.dtype
    ) -> Tensor:
        ctx.trip, ctx.dtype = trip, outputs.dtype
        return trip.back(outputs, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.back_back(grad, ctx.dtype), None, None, None


class _Apply(torch.autograd.Function):
    """A linear map, whose transposed map is its backward. `anchor` makes it part of every graph."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad), None, None, None


def applied(value: Tensor, anchor: Tensor, there: Map, back: Map) -> Tensor:
    """`there(value)`, whose backward is `back`."""
    result: Tensor = _Apply.apply(value, anchor, there, back)  # type: ignore[no-untyped-call]
    return result


def travel(
    trip: Trip,
    hidden: Tensor,
    top_k_weights: Tensor,
    compute: Callable[[Tensor, Tensor], Tensor],
    weighs_inputs: bool = False,
) -> Tensor:
    """The outputs of all experts of each token, summed by weight [T, H]. For all ranks of the group of `trip`.

    Args:
        hidden, top_k_weights: [T, H], [T, K].
        compute: (inputs [P, H], number of an own expert [P]) -> outputs [P, H].
        weighs_inputs: weights multiply the inputs; else the outputs.
    """
    # Ranks without tokens, and experts without, take part in every message of backward.
    anchor = hidden.new_empty(0, requires_grad=torch.is_grad_enabled())
    weights, pairs = _There.apply(top_k_weights, hidden, anchor, trip)  # type: ignore[no-untyped-call]
    if weighs_inputs:
        outputs = trip.computed((pairs * weights.unsqueeze(-1)).to(pairs.dtype), compute)
    else:
        outputs = trip.computed(pairs, compute) * weights.unsqueeze(-1)
    # the graph of the sums has that of the pairs, whatever `compute` does with them
    sums: Tensor = _Back.apply(outputs, pairs, trip, hidden.dtype)  # type: ignore[no-untyped-call]
    return sums


@final
class Share:
    """This rank's tokens of activations that all ranks of a group have whole, as those of tensor ranks.

    Gradients of whole activations are equal on all ranks.
    """

    def __init__(self, group: Collectives, what: str, num_tokens: int) -> None:
        """what: the layer, in messages."""
        self._group, self._what = group, what
        ranks = group.world_size
        self._lengths = [num_tokens // ranks + (rank < num_tokens % ranks) for rank in range(ranks)]
        self._start = sum(self._lengths[: group.rank])

    def cut(self, whole: Tensor) -> Tensor:
        """[tokens of all, ...] -> [own tokens, ...]. Backward joins."""
        anchor = whole.new_empty(0, requires_grad=torch.is_grad_enabled())
        return applied(whole, anchor, self.of_own, self._joined)

    def join(self, part: Tensor) -> Tensor:
        """[own tokens, ...] -> [tokens of all, ...]. Backward cuts."""
        return applied(part, part.new_empty(0), self._joined, self.of_own)

    def of_own(self, whole: Tensor) -> Tensor:
        """The rows of own tokens, without a graph."""
        return whole.narrow(0, self._start, self._lengths[self._group.rank]).clone()

    def _joined(self, part: Tensor) -> Tensor:
        outs = [part.new_empty(length, *part.shape[1:]) for length in self._lengths]
        parts = [part.contiguous()] * len(outs)
        self._group.all_to_all(outs, parts, what=f"shares of {self._what}", kind=KIND).wait()
        return torch.cat(outs)


__all__ = ["KIND", "Share", "Trip", "travel"]
