"""Which layers each virtual stage of a pipeline gets. Pure arithmetic.

A partition is a list of bounds: stage s has the layers bounds[s] to bounds[s + 1] - 1. Every stage has at
least one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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


NOTHING = LayerSize()


def partition_layers(
    partition: str | Sequence[int],
    layers: Sequence[LayerSize],
    num_stages: int,
    first: LayerSize = NOTHING,
    last: LayerSize = NOTHING,
) -> tuple[int, ...]:
    """The bounds of `num_stages` stages, num_stages + 1 numbers.

    Args:
        partition: "uniform", "parameters", "best", "type:REGEX", or the bounds themselves.
        first: what the first stage has in addition to its layers (an embedding).
        last: what the last stage has in addition to its layers (a head).

    Raises:
        UsageError: there are more stages than layers, or `partition` is none of the above.
    """
    if num_stages > len(layers):
        raise UsageError(
            f"pipeline.stages: {num_stages} stages (with chunks) for {len(layers)} layers; each stage needs at "
            "least one layer; use fewer stages or fewer chunks"
        )
    if not isinstance(partition, str):
        return _checked(partition, len(layers), num_stages)
    method = partition.lower()
    if method == "uniform":
        return uniform(len(layers), num_stages)
    if method == "parameters":
        return split([layer.numel for layer in layers], num_stages, first.numel, last.numel)
    if method == "best":
        costs = [layer.operations for layer in layers]
        return split(costs, num_stages, first.operations, last.operations)
    if method.startswith("type:"):
        return split(_matches(partition, layers), num_stages)
    raise UsageError(
        f'pipeline.partition = "{partition}": must be one of {", ".join(METHODS)}, or a list of bounds'
    )


def uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers; the first stages get one more where the number does not divide."""
    each, more = divmod(num_layers, num_stages)
    return tuple(stage * each + min(stage, more) for stage in range(num_stages + 1))


def split(
    costs: Sequence[float], num_stages: int, first_extra: float = 0, last_extra: float = 0
) -> tuple[int, ...]:
    """The bounds with the least cost of the most expensive stage.

    Of several such bounds, those with the least sum of squared costs; then those with fewer layers on early
    stages, which keep more activations.

    Args:
        costs: the cost of each layer, at least `num_stages` of them.
        first_extra: added to the first stage.
        last_extra: added to the last stage.
    """
    sums = [0.0, *accumulate(float(cost) for cost in costs)]

    def cost(start: int, stop: int, stage: int) -> float:
        extra = (first_extra if stage == 0 else 0) + (last_extra if stage == num_stages - 1 else 0)
        return sums[stop] - sums[start] + extra

    num_layers = len(costs)
    least = [0.0] + [inf] * num_layers  # by number of layers in the stages so far
    for stage in range(num_stages):
        nearest = [inf] * (num_layers + 1)
        for stop in range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            nearest[stop] = min(
                max(least[start], cost(start, stop, stage)) for start in range(stage, stop)
            )
        least = nearest
    limit = least[num_layers]

    squares = [0.0] + [inf] * num_layers
    choices: list[list[int]] = []
    for stage in range(num_stages):
        nearest, chosen = [inf] * (num_layers + 1), [0] * (num_layers + 1)
        for stop in range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            for start in range(stop - 1, stage - 1, -1):
                own = cost(start, stop, stage)
                if own > limit:
                    break
                if squares[start] + own * own <= nearest[stop]:
                    nearest[stop], chosen[stop] = squares[start] + own * own, start
        squares = nearest
        choices.append(chosen)
    bounds = [num_layers]
    for chosen in reversed(choices):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))


def stage_of_layer(bounds: Sequence[int]) -> tuple[int, ...]:
    """The stage of each layer."""
    return tuple(
        stage
        for stage, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        for _ in range(start, stop)
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
    found = [int(hits[layer.class_name]) for layer in layers]
    if not any(found):
        names = ", ".join(kinds)
        raise UsageError(
            f'pipeline.partition = "{partition}" matches no layer; the layers\' classes are {names}'
        )
    return found


def _checked(bounds: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    whole = tuple(items("pipeline.partition", bounds, "a method, or a list of bounds"))
    if any(type(one) is not int for one in whole):
        raise wrong("pipeline.partition", bounds, "a list of whole numbers")
    rises = all(a < b for a, b in zip(whole[:-1], whole[1:], strict=True))
    if len(whole) != num_stages + 1 or whole[0] != 0 or whole[-1] != num_layers or not rises:
        raise UsageError(
            f"pipeline.partition = {list(whole)}: needs {num_stages + 1} rising bounds from 0 to {num_layers} "
            f"(stages x chunks + 1 numbers, for {num_layers} layers)"
        )
    return whole


__all__ = [
    "METHODS",
    "NOTHING",
    "LayerSize",
    "partition_layers",
    "split",
    "stage_of_layer",
    "uniform",
]
