"""The messages of experts where routing is uniform, for a plan: shapes alone, nothing is computed or sent.

A token chooses K of the experts, each choice equally often. A rank then has one of them with the probability
1 - C(n - n/E, K) / C(n, K), where n is the number of experts and E that of the ranks that share them.
"""

from __future__ import annotations

from math import comb
from typing import Any, final

import torch
from torch import Tensor, nn

from ..ops.comm.collectives import Collectives
from ..ops.recomputation import FirstCalls
from .cut import Found
from .exchange import KIND, Share
from .layer import Forward, having
from .routing import chunk_sizes

Part = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of what goes to each rank


def row_share(num_experts: int, num_ranks: int, choices: int) -> float:
    """The share of its tokens that a rank sends to each rank.

    >>> round(4 * row_share(128, 4, 8) / 8, 3)  # rows for each pair
    0.454
    """
    others = num_experts - num_experts // num_ranks
    return 1 - comb(others, choices) / comb(num_experts, choices)


class _Message(torch.autograd.Function):
    """A tensor of another shape. `there` and `back` are what is sent to each rank for it, and its gradient.

    waits: for both. Chunks do not: one travels while experts compute another one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        shape: tuple[int, ...],
        group: Collectives,
        there: Part | None,
        back: Part | None,
        waits: bool,
    ) -> Tensor:
        ctx.group, ctx.shape, ctx.back, ctx.waits = group, value.shape, back, waits
        _send(group, there, value, waits=waits)
        return value.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _send(ctx.group, ctx.back, grad, waits=ctx.waits)
        return grad.new_empty(ctx.shape), None, None, None, None, None


def _send(group: Collectives, part: Part | None, like: Tensor, *, waits: bool) -> None:
    """waits: nothing is computed beside it."""
    if part is not None:
        parts = [torch.empty(part[0], dtype=part[1], device=like.device)] * group.world_size
        handle = group.all_to_all(parts, parts, what="tokens of experts", kind=KIND)
        if waits:
            handle.wait()


@final
class ExpectedLayer:
    """A module of experts, which has those of one rank: its forward in a plan.

    most: the rows and pairs of a call that a rank gets at most; "" before the first call.
    """

    def __init__(
        self,
        found: Found,
        group: Collectives,
        together: Collectives | None = None,
        num_chunks: int = 1,
    ) -> None:
        """The arguments are those of `ExpertLayer`."""
        self.most = ""
        self._name, self._num_experts, self._group = found.name, found.num_experts, group
        local = found.num_experts // group.world_size
        self._children = list(found.experts or ())[group.rank * local :][:local]
        self._together, self._num_chunks = together, num_chunks if group.world_size > 1 else 1
        self._calls = FirstCalls[None]()

    def rerouted(self, forward: Forward) -> Forward:
        """A forward in place of the module's own, on the meta device."""
        ranks = self._group.world_size

        def shared(
            module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            if self._together is None:
                return sent(module, hidden_states, top_k_index, top_k_weights)
            share = Share(self._together, self._name, len(hidden_states))
            hidden, weights = share.cut(hidden_states), share.cut(top_k_weights)
            return share.join(sent(module, hidden, share.of_own(top_k_index), weights))

        def sent(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            self._describe(*index.shape)
            is_first = self._calls.value(lambda: None)[1]  # a recomputation sends no numbers again
            sizes = chunk_sizes(len(hidden), self._num_chunks)
            parts = zip(torch.split(hidden, sizes), torch.split(weights, sizes), strict=True)
            sums = [chunk(module, *part, is_first) for part in parts]
            return torch.cat(sums) if len(sums) > 1 else sums[0]

        def chunk(module: nn.Module, hidden: Tensor, weights: Tensor, is_first: bool) -> Tensor:
            num_rows, num_pairs = self._sizes(*weights.shape)
            rows, pairs = (ranks * num_rows, hidden.shape[1]), (ranks * num_pairs, hidden.shape[1])
            number = torch.int64 if weights.dtype == torch.float64 else torch.int32
            numbers, grads = ((num_pairs, 2), number), ((num_pairs, 1), weights.dtype)
            weight = self._message(weights, pairs[:1], numbers if is_first else None, grads)
            part = ((num_rows, hidden.shape[1]), hidden.dtype)
            inputs = self._message(self._message(hidden, rows, part, part), pairs)
            outputs = self._own(module, forward, inputs)
            sums = self._message(outputs * weight.unsqueeze(-1), rows).to(hidden.dtype)
            return self._message(sums, tuple(hidden.shape), part, part)

        return shared

    def _own(self, module: nn.Module, forward: Forward, inputs: Tensor) -> Tensor:
        """The outputs of this rank's experts [P, H]. Those of a list get equal parts of the inputs."""
        if self._children:
            parts = torch.tensor_split(inputs, len(self._children))
            return torch.cat([e(part) for e, part in zip(self._children, parts, strict=True)])
        index = torch.empty(len(inputs), 1, dtype=torch.int64, device=inputs.device)
        with having(module, self._num_experts // self._group.world_size):
            outputs: Tensor = forward(module, inputs, index, inputs.new_ones(len(inputs), 1))
        return outputs

    def _sizes(self, tokens: int, choices: int) -> tuple[int, int]:
        """The rows and pairs that a rank sends to each rank."""
        ranks = self._group.world_size
        share = row_share(self._num_experts, ranks, choices)
        return round(tokens * share), round(tokens * choices / ranks)

    def _message(
        self,
        value: Tensor,
        shape: tuple[int, ...],
        there: Part | None = None,
        back: Part | None = None,
    ) -> Tensor:
        waits = self._num_chunks == 1
        result: Tensor = _Message.apply(value, shape, self._group, there, back, waits)  # type: ignore[no-untyped-call]
        return result

    def _describe(self, tokens: int, choices: int) -> None:
        ranks, (num_rows, num_pairs) = self._group.world_size, self._sizes(tokens, choices)
        most = ranks * tokens, ranks * tokens * min(choices, self._num_experts // ranks)
        self.most = (
            f"experts: messages and activations are those of uniform routing, of {ranks * num_rows:,} rows and "
            f"{ranks * num_pairs:,} pairs of a token and an expert in a call of {self._name}. If all tokens "
            f"chose experts of one rank, it would get {most[0]:,} rows and {most[1]:,} pairs"
        )


__all__ = ["ExpectedLayer", "row_share"]
