"""Finds the batch size that the most numbers of ranks can train: DeepSpeed's versions 0.1 and 0.2.

n ranks can train a batch of B samples in micro-batches of m samples if m x n divides B. Therefore:

    bases        every allowed micro-batch, and their least common multiple
    candidates   each base times the largest highly composite number that keeps it within the maximum:
                 a number with more divisors than any smaller one
    the batch    the candidate that the most numbers of ranks within the bounds can train

The batch size is then the same for every number of ranks: only the accumulation steps change. Version 0.1
counts ranks; 0.2 counts whole nodes. Nothing here imports torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from ...utils.schema.values import shown

LARGEST_FACTOR = 720_720  # DeepSpeed's list of highly composite numbers ends there
MOST_SAMPLES = 10**9  # these two bound the time of a plan
MOST_MICRO_BATCHES = 128
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)  # their product exceeds LARGEST_FACTOR


@final
@dataclass(frozen=True)
class Limits:
    """What the config's section `elasticity` allows.

    min_gpus, max_gpus: bounds of the number of all ranks.
    ranks_per_node, model_parallel_size: 1 in version 0.1.
    """

    max_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    min_gpus: int = 1
    max_gpus: int = 10_000
    prefers_larger: bool = True
    ranks_per_node: int = 1
    model_parallel_size: int = 1

    @property
    def replicas_per_node(self) -> int:
        """Data-parallel ranks per node."""
        return self.ranks_per_node // self.model_parallel_size


@final
@dataclass(frozen=True)
class ElasticPlan:
    """The batch size, and the numbers of ranks that can train it.

    replicas: every valid number of data-parallel ranks, ascending.
    """

    limits: Limits
    batch_size: int
    replicas: tuple[int, ...]

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Every valid number of ranks, including those of model parallelism."""
        return tuple(count * self.limits.model_parallel_size for count in self.replicas)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Every valid number of nodes."""
        return tuple(count // self.limits.replicas_per_node for count in self.replicas)

    def fits(self, world_size: int) -> bool:
        """Whether `world_size` ranks, including those of model parallelism, can train the batch."""
        at = bisect_left(self.world_sizes, world_size)
        return self.world_sizes[at : at + 1] == (world_size,)

    def split(self, replicas: int) -> tuple[int, int]:
        """(largest micro-batch that fits, accumulation steps) for a valid number of data-parallel ranks."""
        each = self.batch_size // replicas
        micro = max(size for size in self.limits.micro_batch_sizes if each % size == 0)
        return micro, each // micro


def plan(limits: Limits) -> ElasticPlan:
    """The batch size that the most numbers of ranks can train.

    Raises:
        ValueError: no batch size fits; the message names the key.
    """
    _check(limits)
    per_node = limits.replicas_per_node
    limit = limits.max_batch_size // per_node
    first = -(-limits.min_gpus // limits.ranks_per_node)
    last = limits.max_gpus // limits.ranks_per_node
    best: tuple[int, int, int] | None = None
    best_counts: list[int] = []
    for batch in candidates(limits.micro_batch_sizes, limit):
        counts = valid_counts(batch, limits.micro_batch_sizes, first, last)
        rank = (len(counts), batch if limits.prefers_larger else -batch, batch)
        if counts and (best is None or rank > best):
            best, best_counts = rank, counts
    if best is None:
        raise ValueError(
            f"elasticity.min_gpus = {limits.min_gpus}: no batch of at most {limits.max_batch_size} samples "
            f"(elasticity.max_train_batch_size) can be divided among {limits.min_gpus} to {limits.max_gpus} "
            f"ranks{_in_nodes(limits)} in these micro-batches; lower min_gpus or raise max_train_batch_size"
        )
    return ElasticPlan(limits, best[2] * per_node, tuple(count * per_node for count in best_counts))


def candidates(micro_batch_sizes: Sequence[int], limit: int) -> list[int]:
    """The candidate batch sizes up to `limit`, ascending. No micro-batch exceeds `limit`."""
    bases = {*micro_batch_sizes, math.lcm(*micro_batch_sizes)}
    factors = highly_composite()
    return sorted(
        {
            base * factors[bisect_right(factors, limit // base) - 1]
            for base in bases
            if base <= limit
        }
    )


def valid_counts(batch: int, micro_batch_sizes: Sequence[int], first: int, last: int) -> list[int]:
    """The numbers from `first` to `last` whose product with some micro-batch divides `batch`, ascending."""
    found: set[int] = set()
    for micro in micro_batch_sizes:
        if batch % micro == 0:
            found.update(_divisors(batch // micro))
    return sorted(count for count in found if first <= count <= last)


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    """All divisors, unordered."""
    found = [1]
    rest, prime = number, 2
    while rest > 1:
        if prime * prime > rest:
            prime = rest
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        found = [one * power for one in found for power in powers]
        prime += 1
    return tuple(found)


@lru_cache(maxsize=1)
def highly_composite() -> tuple[int, ...]:
    """Every number up to LARGEST_FACTOR that has more divisors than each smaller one: 1, 2, 4, 6, 12, ..."""
    # such a number is a product of the first primes, with exponents that never increase
    numbers: list[tuple[int, int]] = []

    def grow(number: int, num_divisors: int, at: int, most: int) -> None:
        numbers.append((number, num_divisors))
        for times in range(1, most + 1):
            number *= _PRIMES[at]
            if number > LARGEST_FACTOR:
                return
            grow(number, num_divisors * (times + 1), at + 1, times)

    grow(1, 1, 0, LARGEST_FACTOR.bit_length())
    found, most_divisors = [], 0
    for number, num_divisors in sorted(numbers):
        if num_divisors > most_divisors:
            found.append(number)
            most_divisors = num_divisors
    return tuple(found)


def _check(limits: Limits) -> None:
    if limits.max_batch_size > MOST_SAMPLES:
        raise ValueError(
            f"elasticity.max_train_batch_size = {shown(limits.max_batch_size)}: must be at most {MOST_SAMPLES}"
        )
    if len(limits.micro_batch_sizes) > MOST_MICRO_BATCHES:
        raise ValueError(
            f"elasticity.micro_batch_sizes = {shown(list(limits.micro_batch_sizes))}: must be at most "
            f"{MOST_MICRO_BATCHES} numbers; remove those that are rarely used"
        )
    if limits.max_gpus < limits.min_gpus:
        raise ValueError(
            f"elasticity.max_gpus = {limits.max_gpus}: must be at least elasticity.min_gpus ({limits.min_gpus})"
        )
    if limits.ranks_per_node % limits.model_parallel_size:
        raise ValueError(
            f"elasticity.num_gpus_per_node = {limits.ranks_per_node}: must be a multiple of "
            f"elasticity.model_parallel_size ({limits.model_parallel_size})"
        )
    per_node = limits.replicas_per_node
    largest = max(limits.micro_batch_sizes)
    if largest * per_node > limits.max_batch_size:
        share = f" / {per_node} replicas per node" if per_node > 1 else ""
        raise ValueError(
            f"elasticity.micro_batch_sizes = {shown(list(limits.micro_batch_sizes))}: each must be at most "
            f"elasticity.max_train_batch_size ({limits.max_batch_size}){share}; remove {largest} or raise it"
        )


def _in_nodes(limits: Limits) -> str:
    return f", in whole nodes of {limits.ranks_per_node}," if limits.ranks_per_node > 1 else ""


__all__ = ["ElasticPlan", "Limits", "candidates", "highly_composite", "plan", "valid_counts"]
