"""Which layers each virtual stage of a pipeline gets. Pure arithmetic.

A partition is a list of bounds: stage s has the layers bounds[s] to bounds[s + 1] - 1. Every stage has at
least one layer, but for the first and the last one where they have other modules (`Ends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from re import IGNORECASE
from typing import final

from ..utils.arguments import items, wrong
from ..utils.errors import UsageError
from ..utils.patterns import check_expression, matching
from ..utils.quoting import quoted

METHODS = ("uniform", "parameters", "best", "type:REGEX")


@final
@dataclass(frozen=True)
class LayerSize:
    """What the methods know about a layer.

    Args:
        class_name: the name of its class or function.
        numel: the number of elements of its trained parameters.
        operations: multiplications by its parameters for each token.
    """

    class_name: str = ""
    numel: int = 0
    operations: int = 0


@final
@dataclass(frozen=True)
class Ends:
    """What the first and the last stage have in addition to their layers: an embedding, a head.

    Args:
        may_be_alone: whether the first, and the last, stage may have that only.
    """

    first: LayerSize = LayerSize()
    last: LayerSize = LayerSize()
    may_be_alone: tuple[bool, bool] = (False, False)


def partition_layers(
    partition: str | Sequence[int],
    layers: Sequence[LayerSize],
    num_stages: int,
    around: Ends = Ends(),  # noqa: B008 - it is frozen
) -> tuple[int, ...]:
    """The bounds of `num_stages` stages, num_stages + 1 numbers.

    Args:
        partition: "uniform", "parameters", "best", "type:REGEX", or the bounds themselves.

    Raises:
        UsageError: there are more stages than layers, or `partition` is none of the above.
    """
    alone = around.may_be_alone if num_stages > 1 else (False, False)
    if num_stages > len(layers) + sum(alone):
        ends = " and ".join(name for name, may in zip(("first", "last"), alone, strict=True) if may)
        others = f" but the {ends} one" if ends else ""
        raise UsageError(
            f"pipeline.stages: {num_stages} stages (with chunks) for {len(layers)} layers; each stage{others} "
            "needs at least one layer; use fewer stages or fewer chunks"
        )
    if not isinstance(partition, str):
        return _checked(partition, len(layers), num_stages, alone)
    method = partition.lower()
    if method == "uniform":
        return uniform(len(layers), num_stages, alone)
    first, last = around.first, around.last
    if method == "parameters":
        return split([layer.numel for layer in layers], num_stages, first.numel, last.numel, alone)
    if method == "best":
        costs = [layer.operations for layer in layers]
        return split(costs, num_stages, first.operations, last.operations, alone)
    if method.startswith("type:"):
        return split(_matches(partition, layers), num_stages, may_be_alone=alone)
    raise UsageError(
        f'pipeline.partition = "{partition}": must be one of {", ".join(METHODS)}, or a list of bounds'
    )


def uniform(
    num_layers: int, num_stages: int, may_be_alone: tuple[bool, bool] = (False, False)
) -> tuple[int, ...]:
    """Equal numbers of layers; the first stages get one more where the number does not divide.

    Of more stages than layers, the last one has none if it may, and then the first one.
    """
    last = int(num_stages > num_layers and may_be_alone[1])
    first = int(num_stages - last > num_layers)
    inner = num_stages - first - last
    each, more = divmod(num_layers, inner)
    bounds = (stage * each + min(stage, more) for stage in range(inner + 1))
    return (*[0] * first, *bounds, *[num_layers] * last)


def split(
    costs: Sequence[float],
    num_stages: int,
    first_extra: float = 0,
    last_extra: float = 0,
    may_be_alone: tuple[bool, bool] = (False, False),
) -> tuple[int, ...]:
    """The bounds with the least cost of the most expensive stage.

    Of several such bounds, those with the least sum of squared costs; then those with fewer layers on early
    stages, which keep more activations.

    Args:
        costs: the cost of each layer; each stage needs one.
        first_extra: added to the first stage.
        last_extra: added to the last stage.
        may_be_alone: the first, and the last, stage has no layer where that lowers the largest cost.
    """
    extras = first_extra, last_extra
    stages = _Stages(costs, num_stages, extras, may_be_alone)
    limit = _least_maximum(stages)
    if any(may_be_alone) and num_stages <= len(costs):
        others = _Stages(costs, num_stages, extras, (False, False))
        if _least_maximum(others) == limit:
            stages = others
    bounds = [len(costs)]
    for chosen in reversed(_least_squares(stages, limit)):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))


@final
class _Stages:
    """The cost of any stage, and where it may start and stop."""

    def __init__(
        self,
        costs: Sequence[float],
        num_stages: int,
        extras: tuple[float, float],
        may_be_alone: tuple[bool, bool],
    ) -> None:
        self.num_layers, self.num_stages = len(costs), num_stages
        self._sums: list[float] = list(accumulate(costs, initial=0))
        self._extras: list[float] = [0] * num_stages
        self._least = [1] * num_stages  # layers
        for end, extra, is_alone in zip((0, -1), extras, may_be_alone, strict=True):
            self._extras[end] += extra
            self._least[end] = 1 - is_alone
        self.starts = list(accumulate(self._least, initial=0))  # the earliest one of each stage

    def cost(self, start: int, stop: int, stage: int) -> float:
        """Of `stage` with the layers from `start` to `stop` - 1."""
        return self._sums[stop] - self._sums[start] + self._extras[stage]

    def stops(self, stage: int) -> range:
        """The last stage ends with the last layer."""
        last = self.num_layers - sum(self._least[stage + 1 :])
        return range(last if stage == self.num_stages - 1 else self.starts[stage + 1], last + 1)

    def last_start(self, stop: int, stage: int) -> int:
        """Of `stage` that ends at `stop`."""
        return 0 if stage == 0 else stop - self._least[stage]


def _least_maximum(stages: _Stages) -> float:
    """The least cost of the most expensive stage."""
    least: list[float] = [0] + [inf] * stages.num_layers  # by number of layers in the stages so far
    for stage in range(stages.num_stages):
        nearest = [inf] * (stages.num_layers + 1)
        start = stages.starts[stage]  # the best one grows with `stop`, as both costs do
        for stop in stages.stops(stage):
            most = max(least[start], stages.cost(start, stop, stage))
            while start < stages.last_start(stop, stage):
                next_most = max(least[start + 1], stages.cost(start + 1, stop, stage))
                if next_most > most:
                    break
                start, most = start + 1, next_most
            nearest[stop] = most
        least = nearest
    return least[stages.num_layers]


def _least_squares(stages: _Stages, limit: float) -> list[list[int]]:
    """By stage and its stop the start of the least sum of squares, where no stage costs more than `limit`."""
    squares: list[float] = [0] + [inf] * stages.num_layers
    choices: list[list[int]] = []
    for stage in range(stages.num_stages):
        nearest, chosen = [inf] * len(squares), [0] * len(squares)
        stops = stages.stops(stage)
        # squares are convex, so the best start grows with the stop: each half of the stops has its starts
        waiting = [(stops.start, stops.stop, stages.starts[stage], stages.num_layers)]
        while waiting:
            low, high, first, last = waiting.pop()
            if low == high:
                continue
            stop = (low + high) // 2
            for start in range(first, min(last, stages.last_start(stop, stage)) + 1):
                cost = stages.cost(start, stop, stage)
                if cost <= limit and squares[start] + cost * cost < nearest[stop]:
                    nearest[stop], chosen[stop] = squares[start] + cost * cost, start
            waiting.append((low, stop, first, chosen[stop] if nearest[stop] < inf else last))
            if nearest[stop] < inf:  # else no more layers fit into the stages so far
                waiting.append((stop + 1, high, chosen[stop], last))
        squares = nearest
        choices.append(chosen)
    return choices


def stage_of_layer(bounds: Sequence[int]) -> tuple[int, ...]:
    """The stage of each layer."""
    return tuple(
        stage for stage, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)
    )


def _matches(partition: str, layers: Sequence[LayerSize]) -> list[int]:
    """1 for each layer whose class name contains a match of the pattern after "type:", else 0."""
    pattern = partition.split(":", 1)[1]
    kinds = sorted({layer.class_name for layer in layers})
    try:
        check_expression(pattern)
        hits = dict(
            zip(kinds, matching(pattern, kinds, anywhere=True, flags=IGNORECASE), strict=True)
        )
    except ValueError as error:
        raise UsageError(
            f"pipeline.partition = {quoted(partition)}: what follows type: {error}"
        ) from None
    matches = [int(hits[layer.class_name]) for layer in layers]
    if not any(matches):
        names = ", ".join(kinds)
        raise UsageError(
            f'pipeline.partition = "{partition}" matches no layer; the layers\' classes are {names}'
        )
    return matches


def _checked(
    bounds: Sequence[int], num_layers: int, num_stages: int, may_be_alone: tuple[bool, bool]
) -> tuple[int, ...]:
    whole = tuple(items("pipeline.partition", bounds, "a method, or a list of bounds"))
    if any(type(bound) is not int for bound in whole):
        raise wrong("pipeline.partition", bounds, "a list of whole numbers")
    empty = {stage for stage, (a, b) in enumerate(pairwise(whole)) if a == b}
    allowed = {
        end for end, is_alone in zip((0, num_stages - 1), may_be_alone, strict=True) if is_alone
    }
    rises = empty <= allowed and all(a <= b for a, b in pairwise(whole))
    if len(whole) != num_stages + 1 or whole[0] != 0 or whole[-1] != num_layers or not rises:
        raise UsageError(
            f"pipeline.partition = {list(whole)}: needs {num_stages + 1} rising bounds from 0 to {num_layers} "
            f"(stages x chunks + 1 numbers, for {num_layers} layers)"
        )
    return whole


__all__ = [
    "METHODS",
    "Ends",
    "LayerSize",
    "partition_layers",
    "split",
    "stage_of_layer",
    "uniform",
]
