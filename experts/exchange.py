"""Sends tokens to the ranks of their experts, and the sums of their outputs back.

                forward                                                backward
    `there`     tokens [T, H] -> rows [R, H] -> pairs [P, H]           `there_back`
    (experts)   pairs of a token and an own expert -> outputs [P, H]
    `back`      outputs [P, H] -> sums for rows [R, H] -> sums for tokens [T, H]   `back_back`

A row is sent once each way and pass. Before the rows go the counts of rows and pairs, which the host waits for.
The numbers of experts and their weights travel beside the rows, as do the gradients of weights.

Tokens may travel in chunks, each a `Trip`: the rows of the next one travel while experts compute. `travel` says
in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError
from .routing import FEW, OrderedSum, Sent, chunk_sizes, odd_factor, route, sum_of_few, tree_places

KIND = "experts"
Map = Callable[[Tensor], Tensor]
Arrivals = Callable[[], tuple[Tensor, ...]]  # waits for messages


def plan_trips(
    group: Collectives,
    what: str,
    top_k_index: Tensor,
    num_local: int,
    number: int = 0,
    num_chunks: int = 1,
) -> list[Trip]:
    """Plan the messages of one call of a layer, a trip for each chunk of tokens. **Collective.**

    A rank sends 16 bytes for each chunk and pair of ranks, and 8 more, to each other one, and waits for theirs.

    Args:
        what: the layer, in messages. number: of the layer in the model.
        top_k_index, num_local: see `route`.
        num_chunks: the same on all ranks. It is 1 where there are no messages, and under
            `torch.use_deterministic_algorithms`: a product of fewer rows may have other bits.

    Raises:
        UsageError: on all ranks: they call different layers.
    """
    ranks = group.world_size
    if ranks == 1 or torch.are_deterministic_algorithms_enabled():
        num_chunks = 1
    sent = route(top_k_index, num_local, ranks, num_chunks)
    counts = torch.cat((sent.counts.view(-1), sent.counts.new_full((1,), number))).view(1, -1)
    if ranks > 1:
        counts = group.gather_small(counts[0], what=f"counts of tokens of {what}")
    # the device has the table as well: sizes that it needs are no copies from the host
    on_device = counts[:, :-1].reshape(ranks, num_chunks, ranks, 2).unbind(1)
    table = counts.tolist()
    if any(row[-1] != number for row in table):
        raise UsageError(
            f"expert_parallel: this rank calls {what} while another one calls other experts; give all "
            "ranks batches that use the same layers, such as images on all of them or on none, or leave "
            "the layers out with expert_parallel.expert_pattern"
        )
    width = 2 * ranks
    tables = [
        [row[first : first + width] for row in table]
        for first in range(0, width * num_chunks, width)
    ]
    sizes = chunk_sizes(len(top_k_index), num_chunks)
    parts = sent.chunks([each[group.rank] for each in tables], top_k_index.shape)
    return [
        Trip(group, what, part, torch.Size((size, top_k_index.shape[1])), num_local, counts, rows)
        for part, size, counts, rows in zip(parts, sizes, on_device, tables, strict=True)
    ]


@final
class Trip:
    """The messages of a chunk of tokens: all ranks of `group` make the same calls.

    A direction begins its messages, and returns what waits for them.

    Attributes:
        num_tokens: T, of the chunk.
        experts [P]: the number, among those of this rank, of each pair that it computes; set by `there`.
        rows_sent: the rows for other ranks. num_pairs: of own tokens and experts on all ranks.
    """

    def __init__(
        self,
        group: Collectives,
        what: str,
        sent: Sent,
        shape: torch.Size,
        num_local: int,
        counts: Tensor,
        table: Sequence[list[int]],
    ) -> None:
        """
        Args:
            sent: of these tokens. shape: of their top_k_index, [T, K].
            counts [E, E, 2]: rows and pairs from each rank to each. table [E, 2 E]: the same, on the host.
        """
        self._group, self._what, self._sent = group, what, sent
        self._shape, self.num_tokens = shape, shape[0]
        self._num_local, self._counts = num_local, counts
        of_rows, of_pairs = 2 * group.rank, 2 * group.rank + 1
        self._rows_out, self._pairs_out = table[group.rank][::2], table[group.rank][1::2]
        self._rows_in, self._pairs_in = ([row[at] for row in table] for at in (of_rows, of_pairs))
        self.rows_sent = sum(self._rows_out) - self._rows_out[group.rank]
        self.num_pairs = sum(self._pairs_out)
        self._ordered: OrderedSum | None = None
        self._weights: Tensor | None = None

    def there(self, top_k_weights: Tensor, hidden: Tensor) -> Arrivals:
        """The weight of each pair here [P] and its inputs [P, H], from weights [T, K] and tokens [T, H].

        A recomputation sends no weights: it has those of the forward.
        """
        rows = self._start(hidden.index_select(0, self._sent.tokens), self._rows_out, self._rows_in)
        pairs = None if self._weights is not None else self._start_pairs(top_k_weights)

        def arrived() -> tuple[Tensor, ...]:
            if pairs is not None:
                self._weights = self._weights_in(pairs(), top_k_weights.dtype)
            assert self._weights is not None
            return self._weights.clone(), rows().index_select(0, self._row)

        return arrived

    def there_back(self, weight_grads: Tensor, grads: Tensor) -> Arrivals:
        """The gradients of weights [T, K] and tokens [T, H], from those of pairs [P] and inputs [P, H]."""
        rows = self._start(self._of_rows(grads), self._rows_in, self._rows_out)
        weights = self._start(weight_grads.view(-1, 1), self._pairs_in, self._pairs_out)

        def arrived() -> tuple[Tensor, ...]:
            result = weight_grads.new_zeros(self._shape.numel())
            result[self._sent.pairs] = weights().view(-1)
            return result.view(self._shape), self._summed(rows())

        return arrived

    def back(self, dtype: torch.dtype, outputs: Tensor) -> Arrivals:
        """Outputs of pairs [P, H] -> their sums for each token [T, H], which travel in `dtype`."""
        rows = self._start(self._of_rows(outputs).to(dtype), self._rows_in, self._rows_out)
        return lambda: (self._summed(rows()),)

    def back_back(self, dtype: torch.dtype, grads: Tensor) -> Arrivals:
        """The gradients of outputs [P, H] in `dtype`, from those of tokens [T, H]."""
        rows = self._start(grads.index_select(0, self._sent.tokens), self._rows_out, self._rows_in)
        return lambda: (rows().to(dtype).index_select(0, self._row),)

    def _start_pairs(self, top_k_weights: Tensor) -> Callable[[], Tensor]:
        """Send the numbers of experts, and the weights: one message, of elements as wide as the weights."""
        weights = top_k_weights.reshape(-1)[self._sent.pairs]
        wide = _wide(weights.dtype)
        whole = torch.int64 if wide == torch.float64 else torch.int32
        message = torch.stack((self._sent.codes.to(whole), weights.to(wide).view(whole)), 1)
        return self._start(message, self._pairs_out, self._pairs_in)

    def _weights_in(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of each pair here [P]. Sets what the other directions need."""
        code = message[:, 0].long()
        rows_in, pairs_in = self._counts[:, self._group.rank].unbind(1)
        before = rows_in.cumsum(0) - rows_in  # rows of earlier ranks
        first = before.repeat_interleave(pairs_in, output_size=sum(self._pairs_in))
        self.experts = code % self._num_local
        self._row = code // self._num_local + first
        self._of_rows: Map
        if self._shape[1] <= FEW:
            self._of_rows = partial(sum_of_few, self._row, sum(self._rows_in))
        else:
            node = tree_places(self.experts, odd_factor(self._num_local))
            self._of_rows = OrderedSum(self._row, node, sum(self._rows_in))
        return message[:, 1].contiguous().view(_wide(dtype)).to(dtype)

    def _summed(self, received: Tensor) -> Tensor:
        """Rows that came back -> the sum of each token's rows [T, H]."""
        tokens = self._sent.tokens
        if min(self._shape[1], self._group.world_size) <= FEW:
            return sum_of_few(tokens, self.num_tokens, received)
        if self._ordered is None:
            counts = self._counts[self._group.rank, :, 0]
            ranks = torch.arange(self._group.world_size, device=counts.device)
            rank = ranks.repeat_interleave(counts, output_size=len(tokens))
            node = tree_places(rank, odd_factor(self._group.world_size))
            place, order = torch.sort(tokens, stable=True)
            self._ordered = OrderedSum(place, node[order], self.num_tokens, order)
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
        outs, parts = result.split_with_sizes(sizes_in), rows.split_with_sizes(sizes_out)
        handle = self._group.all_to_all(outs, parts, what=f"tokens of {self._what}", kind=KIND)

        def received() -> Tensor:
            handle.wait()
            return result

        return received


def _wide(dtype: torch.dtype) -> torch.dtype:
    """That in which weights travel."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@final
class _Way:
    """Messages of forward, `forth`, and those of their gradients, `back`, in flight."""

    def __init__(self, forth: Callable[..., Arrivals], back: Callable[..., Arrivals]) -> None:
        self.forth, self.back = forth, back
        self.arrivals: Arrivals | None = None

    def arrived(self) -> tuple[Tensor, ...]:
        """Wait for what has been started."""
        arrivals, self.arrivals = self.arrivals, None
        assert arrivals is not None
        return arrivals()


class _Start(torch.autograd.Function):
    """Starts messages, in backward waits for gradients. `anchor` makes it part of every graph."""

    @staticmethod
    def forward(ctx: Any, way: _Way, anchor: Tensor, *values: Tensor) -> Tensor:
        ctx.way = way
        way.arrivals = way.forth(*values)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.way.arrived()


class _Arrive(torch.autograd.Function):
    """Waits for what `_Start` has started, in backward starts gradients. token: what that has returned."""

    @staticmethod
    def forward(ctx: Any, way: _Way, token: Tensor) -> tuple[Tensor, ...]:
        ctx.way = way
        return way.arrived()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.way.arrivals = ctx.way.back(*grads)
        return None, grads[0].new_empty(0)


def _start(way: _Way, anchor: Tensor, *values: Tensor) -> Arrivals:
    """Start the messages of `values`. Returns what waits for theirs, and returns what has arrived."""
    token = _Start.apply(way, anchor, *values)  # type: ignore[no-untyped-call]
    return lambda: _Arrive.apply(way, token)  # type: ignore[no-untyped-call]


def travel(
    trips: Sequence[Trip],
    hidden: Tensor,
    top_k_weights: Tensor,
    compute: Callable[[Tensor, Tensor], Tensor],
    weighs_inputs: bool = False,
) -> Tensor:
    """The outputs of all experts of each token, summed by weight [T, H]. For all ranks of the group of `trips`.

        forward    there 0, there 1, (experts 0), back 0, there 2, (experts 1), back 1, ...
        backward   back of all, (experts n), there n, (experts n-1), there n-1, ...

    Autograd runs the youngest of the nodes that are ready, so their age gives the order of backward.

    Args:
        hidden, top_k_weights: [T, H], [T, K].
        compute: (inputs [P, H], number of an own expert [P]) -> outputs [P, H].
        weighs_inputs: weights multiply the inputs; else the outputs.
    """
    # Ranks without tokens, and experts without, take part in every message of backward.
    anchor = hidden.new_empty(0, requires_grad=torch.is_grad_enabled())
    tokens, weights = ([value] for value in (hidden, top_k_weights))
    if len(trips) > 1:
        sizes = [trip.num_tokens for trip in trips]
        tokens, weights = (list(torch.split(value, sizes)) for value in (hidden, top_k_weights))
    there: list[Arrivals] = []
    back: list[Arrivals] = []
    for chunk, trip in enumerate(trips):
        while len(there) < min(chunk + 2, len(trips)):  # this one and the next
            at = len(there)
            way = _Way(trips[at].there, trips[at].there_back)
            there.append(_start(way, anchor, weights[at], tokens[at]))
        weight, pairs = there[chunk]()
        if weighs_inputs:
            outputs = trip.computed((pairs * weight.unsqueeze(-1)).to(pairs.dtype), compute)
        else:
            outputs = trip.computed(pairs, compute) * weight.unsqueeze(-1)
        way = _Way(partial(trip.back, hidden.dtype), partial(trip.back_back, outputs.dtype))
        # the graph of the sums has that of the pairs, whatever `compute` does with them
        back.append(_start(way, pairs, outputs))
    sums = [arrived()[0] for arrived in back]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


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


__all__ = ["KIND", "Share", "Trip", "plan_trips", "travel"]
