"""Random routings, hostile ones too: what ranks compute together against one process.

`compare(seed)` runs one case on ranks that are threads, and raises AssertionError where anything differs.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xds.experts.exchange import plan_trips, travel
from xds.ops.comm.opening import open_collectives

BYTES_A_PAIR = 64  # of what tells where a pair goes
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One call of a layer with `experts` experts on `ranks` ranks. tokens: of each rank, in `chunks`."""

    ranks: int
    experts: int
    choices: int
    width: int
    tokens: tuple[int, ...]
    kind: str
    dtype: torch.dtype
    index_dtype: torch.dtype
    seed: int
    chunks: int = 1


KINDS = ("uniform", "skewed", "one expert", "one rank", "dropped", "all dropped", "twice", "local")


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    ranks = rng.choice((1, 2, 3, 4))
    local = rng.choice((1, 1, 2, 3, 4, 8))
    tokens = tuple(rng.choice((0, 1, 2, 5, 17, 33)) for _ in range(ranks))
    return Case(
        ranks,
        ranks * local,
        rng.randint(1, min(8, ranks * local)),
        rng.choice((1, 3, 8)),
        tokens,
        rng.choice(KINDS),
        rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16)),
        rng.choice((torch.int64, torch.int32)),
        seed,
        rng.choice((1, 2, 3, 7)),
    )


def routing(case: Case, rank: int) -> Tensor:
    """The choices of a rank's tokens, [T, K]."""
    generator = torch.Generator().manual_seed(case.seed * 10 + rank)
    count, shape = case.tokens[rank], (case.tokens[rank], case.choices)
    scores = torch.rand(count, case.experts, generator=generator)
    if case.kind == "skewed":
        scores = scores * torch.arange(1, case.experts + 1) ** 2
    index = scores.topk(case.choices, dim=-1).indices
    local = case.experts // case.ranks
    if case.kind == "one expert":
        index = torch.where(torch.arange(case.choices) == 0, case.experts - 1, -1).expand(shape)
    elif case.kind == "one rank":
        index = torch.randint(local, shape, generator=generator)
    elif case.kind == "dropped":
        index = torch.where(torch.rand(shape, generator=generator) < 0.5, -1, index)
    elif case.kind == "all dropped":
        index = torch.full(shape, -1)
    elif case.kind == "twice":
        index = index[:, :1].expand(shape)
    elif case.kind == "local":
        index = rank * local + torch.randint(local, shape, generator=generator)
    return index.to(case.index_dtype).contiguous()


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden_states, top_k_index, top_k_weights, and the gradient of the output, of a rank."""
    generator = torch.Generator().manual_seed(case.seed * 10 + rank)
    shape = case.tokens[rank], case.width
    hidden, grad = (torch.randn(shape, generator=generator).to(case.dtype) for _ in range(2))
    weights = torch.rand(case.tokens[rank], case.choices, generator=generator).to(case.dtype)
    return hidden, routing(case, rank), weights, grad


def matrices(case: Case) -> Tensor:
    """The experts: matrices, [E, H, H]."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.experts, case.width, case.width, generator=generator).to(case.dtype)


def on_ranks(case: Case) -> Any:
    peak, most = peak_and_bound_of(case)
    assert peak <= most, (case, peak, most)
    results = computed(case, case.chunks)
    whole = results if case.chunks == 1 else computed(case, 1)
    # a product here has one row: chunks change the order of sums over tokens alone
    assert all(map(torch.equal, results[:3], whole[:3])), case
    return results


def computed(case: Case, chunks: int) -> Any:
    """The output, gradients of tokens, weights and own experts, and the rows sent, of this rank."""
    rank, local = dist.get_rank(), case.experts // case.ranks
    group = open_collectives(dist.group.WORLD if case.ranks > 1 else None, CPU)
    hidden, index, weights, grad = inputs(case, rank)
    hidden.requires_grad_()
    weights.requires_grad_()
    # in fp32: the backward of `own[experts]` adds the gradients of all tokens
    own = matrices(case)[rank * local : (rank + 1) * local]
    own = own.to(torch.promote_types(case.dtype, torch.float32)).requires_grad_()

    def compute(pairs: Tensor, experts: Tensor) -> Tensor:
        return torch.bmm(pairs.unsqueeze(1), own[experts].to(case.dtype)).squeeze(1)

    trips = plan_trips(group, "a layer", index, local, num_chunks=chunks)
    output = travel(trips, hidden, weights, compute)
    output.backward(grad)
    grads = hidden.grad, weights.grad, torch.zeros_like(own) if own.grad is None else own.grad
    return output.detach(), *grads, sum(trip.rows_sent for trip in trips)


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that live at most at once, of those that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._now_bytes = 0
        self._seen: dict[int, int] = {}  # storage -> bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = storage.nbytes()
                self._now_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self._now_bytes)
                weakref.finalize(storage, self._gone, storage._cdata)
        return result

    def _gone(self, key: int) -> None:
        self._now_bytes -= self._seen.pop(key)


def peak_and_bound_of(case: Case) -> tuple[int, int]:
    """Bytes of a trip there and back, without those of experts; and at most, see docs/design/experts.md."""
    group = open_collectives(dist.group.WORLD if case.ranks > 1 else None, CPU)
    hidden, index, weights, grad = inputs(case, group.rank)
    with Live() as live:
        local = case.experts // case.ranks
        trips = plan_trips(group, "a layer", index, local, num_chunks=case.chunks)
        outputs = travel(trips, hidden.requires_grad_(), weights.requires_grad_(), twice)
        outputs.backward(grad)
    own, tokens = len(hidden), sum(case.tokens)
    pairs = tokens * case.choices
    rows = 4 * pairs + 2 * tokens + (case.ranks + 1) * own
    places = BYTES_A_PAIR * (pairs + own * case.choices)
    return live.peak_bytes, rows * case.width * hidden.itemsize + places + 4096


def twice(pairs: Tensor, experts: Tensor) -> Tensor:
    return pairs * 2


def wanted(case: Case) -> Any:
    """The same in one process in fp64, by the definition."""
    experts = matrices(case).double().requires_grad_()
    found = []
    for rank in range(case.ranks):
        hidden, index, weights, grad = inputs(case, rank)
        x, w = hidden.double().requires_grad_(), weights.double().requires_grad_()
        output = torch.zeros(x.shape, dtype=torch.float64)
        for choice in range(case.choices):
            chosen = index[:, choice].long()
            one = torch.bmm(x.unsqueeze(1), experts[chosen.clamp(min=0)]).squeeze(1)
            factor = torch.where(chosen < 0, 0.0, w[:, choice])
            output = output + one * factor.unsqueeze(1)
        output.backward(grad.double())
        local = case.experts // case.ranks
        places = [{int(e) // local for e in row if e >= 0} for row in index]
        rows_sent = sum(len(place - {rank}) for place in places)
        found.append((output.detach(), x.grad, w.grad, rows_sent))
    assert experts.grad is not None
    return found, experts.grad


def compare(seed: int) -> Case:
    case = draw(seed)
    ranks = run_ranks(on_ranks, case.ranks, case)
    one, experts = wanted(case)
    near = 4e-2 if case.dtype == torch.bfloat16 else 1e-5
    local = case.experts // case.ranks
    for rank, (output, x_grad, w_grad, e_grad, rows_sent) in enumerate(ranks):
        own = experts[rank * local : (rank + 1) * local]
        pairs = zip((output, x_grad, w_grad, e_grad), (*one[rank][:3], own), strict=True)
        for what, (got, exact) in enumerate(pairs):
            size = max(1.0, float(exact.abs().max()) if exact.numel() else 0.0)
            close = torch.allclose(got.double(), exact, rtol=near, atol=near * size)
            assert close, (case, rank, "output hidden weights experts".split()[what])
        assert rows_sent == one[rank][3], (case, rank, rows_sent, one[rank][3])
    return case
