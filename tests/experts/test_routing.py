"""Tokens are sent once to a rank, and their sums have one order: arithmetic and random routings."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from random_routings import CPU, KINDS, Case, compare, inputs, peak_and_bound_of
from torch import Tensor

from xds.experts.exchange import plan_trips, travel
from xds.experts.routing import OrderedSum, route, tree_places
from xds.ops.comm.opening import open_collectives


def test_a_token_is_sent_once_to_a_rank() -> None:
    sent = route(torch.tensor([[1, 3], [2, 3], [-1, 0]]), num_local=2, num_ranks=2)
    assert sent.counts.tolist() == [[[2, 2], [2, 3]]]  # rows and pairs for each rank
    assert sent.tokens[:4].tolist() == [0, 2, 0, 1]
    assert sent.codes[:5].tolist() == [0 * 2 + 1, 1 * 2 + 0, 0 * 2 + 1, 1 * 2 + 0, 1 * 2 + 1]


@pytest.mark.parametrize(("experts", "ranks"), [(8, (1, 2, 4, 8)), (12, (1, 2, 4)), (6, (1, 2))])
def test_sums_have_the_same_bits_on_any_power_of_two_of_ranks(experts: int, ranks: tuple) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(50, experts, generator=generator).topk(4).indices.sort(1).values
    terms = torch.randn(50, 4, 3, generator=generator)
    odd = experts // (experts & -experts)
    results = []
    for size in ranks:
        local = experts // size
        token = torch.arange(50).repeat_interleave(4)
        rank = index.view(-1) // local
        row_of = token * size + rank
        rows = OrderedSum(row_of, tree_places(index.view(-1) % local, odd), 50 * size)
        sums = rows(terms.view(-1, 3))
        has_terms = torch.zeros(50 * size, dtype=torch.bool).index_fill_(0, row_of, True)
        place = torch.arange(50 * size)[has_terms]
        results.append(OrderedSum(place // size, place % size, 50)(sums[has_terms]))
    assert all(torch.equal(result, results[0]) for result in results)


def sent_by_each_run(num_runs: int) -> list[int]:
    """Bytes of the forwards of one call, of which all but the first are recomputations."""
    group = open_collectives(dist.group.WORLD, torch.device("cpu"))
    hidden, index = torch.ones(5, 3), torch.tensor([[0, 2]]).expand(5, 2)  # one on each rank
    trips, found = plan_trips(group, "a layer", index, 2, num_chunks=2), []
    for _ in range(num_runs):
        before = sum(group.sent_bytes.values())
        travel(trips, hidden, torch.ones(5, 2), lambda pairs, experts: pairs)
        found.append(sum(group.sent_bytes.values()) - before)
    return found


def test_a_recomputation_sends_rows_alone() -> None:
    for first, second, third in run_ranks(sent_by_each_run, 2, 3):
        assert first == second + 5 * 8  # a number and a weight of each pair for the other rank
        assert second == third == 2 * 5 * 3 * 4  # rows there, and their sums back


@pytest.mark.slow
def test_random_routings_are_those_of_one_process() -> None:
    kinds = {compare(seed).kind for seed in range(60)}
    assert kinds == set(KINDS)


@pytest.mark.parametrize("kind", ["uniform", "one expert", "one rank"])
def test_memory_is_below_the_bound_of_the_design_page(kind: str) -> None:
    case = Case(4, 16, 4, 256, (64,) * 4, kind, torch.float32, torch.int64, 0)
    ranks = run_ranks(peak_and_bound_of, 4, case)
    assert all(peak <= most for peak, most in ranks)
    if kind == "one rank":  # that gets everything
        assert ranks[0][0] > 0.8 * ranks[0][1]


def events_of(case: Case) -> tuple[str, str]:
    """What a rank does in forward and in backward: s(tart of messages), w(ait for them), e(xperts)."""
    events: list[str] = []
    group = open_collectives(dist.group.WORLD, CPU)
    start = group.all_to_all

    class Waited:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def wait(self) -> None:
            events.append("w")
            self.handle.wait()

    class Experts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, pairs: Tensor) -> Tensor:
            events.append("e")
            return pairs.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append("e")
            return grad

    def started(*args: Any, **kwargs: Any) -> Waited:
        events.append("s")
        return Waited(start(*args, **kwargs))

    group.all_to_all = started  # type: ignore[method-assign]
    hidden, index, weights, grad = inputs(case, dist.get_rank())
    trips = plan_trips(group, "a layer", index, case.experts // 2, num_chunks=case.chunks)
    output = travel(
        trips, hidden.requires_grad_(), weights.requires_grad_(), lambda x, _: Experts.apply(x)
    )
    forward = "".join(events)
    events.clear()
    output.backward(grad)
    return forward, "".join(events)


def test_a_chunk_travels_while_another_computes() -> None:
    # rank 0 has an empty chunk, rank 1 has no tokens
    case = Case(2, 4, 2, 3, (2, 0), "uniform", torch.float32, torch.int64, 0, chunks=3)
    # rows and weights there, rows back; the gradients of rows, those of rows and weights
    forward = "ss ss ww e s ss ww e s ww e s www"
    backward = "sss w e ss w e ss ww w e ss ww ww"
    wanted = forward.replace(" ", ""), backward.replace(" ", "")
    assert run_ranks(events_of, 2, case) == [wanted] * 2
