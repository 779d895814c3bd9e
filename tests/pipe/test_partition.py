"""Partitions of layers into stages, as literal tables."""

from itertools import combinations, combinations_with_replacement, pairwise

import pytest

from xds.pipe.partition import Ends, LayerSize, partition_layers, split, stage_of_layer, uniform
from xds.utils.errors import UsageError


@pytest.mark.parametrize(
    ("costs", "num_stages", "first", "last", "bounds"),
    [
        ([1, 1, 1, 1], 2, 0, 0, (0, 2, 4)),
        ([1] * 12, 4, 2, 4, (0, 2, 6, 11, 12)),
        ([5, 1, 1, 1, 1, 1], 3, 0, 0, (0, 1, 3, 6)),
        ([1] * 6, 3, 100, 0, (0, 1, 3, 6)),
        ([1] * 6, 3, 0, 100, (0, 2, 5, 6)),
        ([0, 0, 3], 2, 0, 0, (0, 1, 3)),
        ([7], 1, 1, 1, (0, 1)),
    ],
)
def test_split_minimizes_the_largest_stage(costs, num_stages, first, last, bounds):
    assert split(costs, num_stages, first, last) == bounds


def sums(costs, bounds, first, last):
    found = [sum(costs[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    found[0] += first
    found[-1] += last
    return found


def largest(costs, bounds, first, last):
    return max(sums(costs, bounds, first, last))


def squares(costs, bounds, first, last):
    return sum(cost * cost for cost in sums(costs, bounds, first, last))


def test_split_is_exact():
    costs = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    for num_stages in range(1, 10):
        every = [(0, *cuts, 9) for cuts in combinations(range(1, 9), num_stages - 1)]
        found = split(costs, num_stages, 2, 3)
        best = min(largest(costs, bounds, 2, 3) for bounds in every)
        assert largest(costs, found, 2, 3) == best
        ties = [bounds for bounds in every if largest(costs, bounds, 2, 3) == best]
        assert squares(costs, found, 2, 3) == min(squares(costs, bounds, 2, 3) for bounds in ties)


@pytest.mark.parametrize("alone", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("extras", [(0, 0), (2, 3), (12, 20)])
def test_split_with_ends_that_may_be_alone_is_exact(alone, extras):
    costs = [3, 1, 4, 1, 5, 9, 2]
    for num_stages in range(2, len(costs) + sum(alone) + 1):
        every = [
            (0, *cuts, 7)
            for cuts in combinations_with_replacement(range(8), num_stages - 1)
            if all(a < b for a, b in pairwise(cuts))
            and cuts[0] >= 1 - alone[0]
            and cuts[-1] <= 6 + alone[1]
        ]
        found = split(costs, num_stages, *extras, alone)
        plain = [b for b in every if 0 < b[1] and b[-2] < 7]
        limit = min(largest(costs, bounds, *extras) for bounds in every)
        if plain and min(largest(costs, bounds, *extras) for bounds in plain) == limit:
            every = plain
        best = min(
            (largest(costs, bounds, *extras), squares(costs, bounds, *extras)) for bounds in every
        )
        assert (largest(costs, found, *extras), squares(costs, found, *extras)) == best
        assert found in every


def test_uniform_gives_the_first_stages_one_more():
    assert uniform(10, 4) == (0, 3, 6, 8, 10)
    assert uniform(3, 4, (False, True)) == uniform(3, 4, (True, True)) == (0, 1, 2, 3, 3)
    assert uniform(3, 4, (True, False)) == (0, 0, 1, 2, 3)
    assert uniform(3, 5, (True, True)) == (0, 0, 1, 2, 3, 3)
    assert stage_of_layer((0, 3, 4)) == (0, 0, 0, 1)


LAYERS = [LayerSize("Embed", 90, 0), *[LayerSize("Block", 30, 30)] * 4, LayerSize("Head", 5, 90)]


@pytest.mark.parametrize(
    ("partition", "bounds"),
    [
        ("uniform", (0, 3, 6)),
        ("Parameters", (0, 2, 6)),
        ("best", (0, 4, 6)),
        ("type:block", (0, 3, 6)),
        ("type:embed|head", (0, 1, 6)),
        ([0, 1, 6], (0, 1, 6)),
    ],
)
def test_methods(partition, bounds):
    assert partition_layers(partition, LAYERS, 2) == bounds


@pytest.mark.parametrize(
    ("partition", "num_stages", "message"),
    [
        ("best", 7, "7 stages .* for 6 layers; each stage needs at least one layer"),
        ("profile", 2, '"profile": must be one of uniform, parameters'),
        ("type:(", 2, "what follows type: must be a regular expression"),
        ("type:conv", 2, "matches no layer; the layers' classes are Block, Embed, Head"),
        ([0, 3, 3, 6], 3, "needs 4 rising bounds from 0 to 6"),
        ([0, 6], 2, "needs 3 rising bounds"),
    ],
)
def test_bad_partitions_get_a_sentence(partition, num_stages, message):
    with pytest.raises(UsageError, match=message):
        partition_layers(partition, LAYERS, num_stages)


@pytest.mark.parametrize(
    ("partition", "alone", "bounds"),
    [
        ([0, 0, 2, 4, 4], (True, True), (0, 0, 2, 4, 4)),
        ("best", (False, True), (0, 1, 2, 4, 4)),
        ("best", (False, False), (0, 1, 2, 3, 4)),
        ("uniform", (True, True), (0, 1, 2, 3, 4)),
        ("type:block", (True, True), (0, 1, 2, 3, 4)),
        ([0, 0, 2, 4, 4], (True, False), None),
        ([0, 0, 0, 2, 4], (True, True), None),
        ([0, 2, 2, 4, 4], (True, True), None),
    ],
)
def test_ends_without_layers(partition, alone, bounds):
    layers = [LayerSize("Block", 30, 30)] * 4
    ends = Ends(LayerSize("", 90, 0), LayerSize("", 5, 90), alone)
    if bounds is not None:
        assert partition_layers(partition, layers, 4, ends) == bounds
    else:
        with pytest.raises(UsageError, match="needs 5 rising bounds from 0 to 4"):
            partition_layers(partition, layers, 4, ends)
