"""Which batch size serves the most numbers of ranks: DeepSpeed's rules 0.1 and 0.2, on whole numbers.

A batch of B samples can be trained by n ranks in micro-batches of m samples where m x n divides B. So

    bases        every allowed micro-batch, and their least common multiple
    candidates   each base times the largest highly composite number that keeps it within the maximum:
                 a number with more divisors than any smaller one
    the batch    the candidate that the most numbers of ranks within the bounds can train

and then it stays, whatever the number of ranks: only the accumulation steps change. Rule 0.1 counts ranks;
0.2 does the same in whole nodes. Nothing here imports torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from ...utils.schema.rules import shown

LARGEST_FACTOR = 720_720  # DeepSpeed's list of highly composite numbers ends there
MOST_SAMPLES = 10**9  # these two bound the time of a plan
MOST_MICRO_BATCHES = 128
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)  # the product of all is above it


@final
@dataclass(frozen=True)
class Wish:
    """What a config allows: the section `elasticity`, read.

    min_gpus, max_gpus: bounds of all ranks. ranks_per_node, model_parallel_size: 1 under rule 0.1.
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
        """Data-parallel ranks of a node."""
        return self.ranks_per_node // self.model_parallel_size


@final
@dataclass(frozen=True)
class Plan:
    """The batch size, and who can train it.

    replicas: every valid number of data-parallel ranks, ascending.
    """

    wish: Wish
    batch_size: int
    replicas: tuple[int, ...]

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Every valid number of ranks, those of model parallelism too."""
        return tuple(count * self.wish.model_parallel_size for count in self.replicas)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Every valid number of nodes."""
        return tuple(count // self.wish.replicas_per_node for count in self.replicas)

    def fits(self, world_size: int) -> bool:
        """So many ranks, those of model parallelism too, can train the batch."""
        at = bisect_left(self.world_sizes, world_size)
        return self.world_sizes[at : at + 1] == (world_size,)

    def split(self, replicas: int) -> tuple[int, int]:
        """(micro-batch, the largest that fits, accumulation steps) of a valid number of data-parallel ranks."""
        each = self.batch_size // replicas
        micro = max(size for size in self.wish.micro_batch_sizes if each % size == 0)
        return micro, each // micro


def plan(wish: Wish) -> Plan:
    """The batch size that the most numbers of ranks can train.

    Raises:
        ValueError: nothing fits; a sentence that names the key.
    """
    _check(wish)
    per_node = wish.replicas_per_node
    limit = wish.max_batch_size // per_node
    first = -(-wish.min_gpus // wish.ranks_per_node)
    last = wish.max_gpus // wish.ranks_per_node
    best: tuple[int, int, int] | None = None
    best_counts: list[int] = []
    for batch in candidates(wish.micro_batch_sizes, limit):
        counts = valid_counts(batch, wish.micro_batch_sizes, first, last)
        rank = (len(counts), batch if wish.prefers_larger else -batch, batch)
        if counts and (best is None or rank > best):
            best, best_counts = rank, counts
    if best is None:
        raise ValueError(
            f"elasticity.min_gpus = {wish.min_gpus}: no batch of at most {wish.max_batch_size} samples "
            f"(elasticity.max_train_batch_size) can be divided among {wish.min_gpus} to {wish.max_gpus} "
            f"ranks{_in_nodes(wish)} in these micro-batches; lower min_gpus or raise max_train_batch_size"
        )
    return Plan(wish, best[2] * per_node, tuple(count * per_node for count in best_counts))


def candidates(micro_batch_sizes: Sequence[int], limit: int) -> list[int]:
    """The batch sizes to choose from, ascending, none above `limit`; no micro-batch is."""
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
    """The numbers from `first` to `last` whose product with a micro-batch divides `batch`, ascending."""
    found: set[int] = set()
    for micro in micro_batch_sizes:
        if batch % micro == 0:
            found.update(_divisors(batch // micro))
    return sorted(count for count in found if first <= count <= last)


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    """All divisors, in no order."""
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
    # such a number has the first primes, the smaller ones at least as often as the larger
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


def _check(wish: Wish) -> None:
    if wish.max_batch_size > MOST_SAMPLES:
        raise ValueError(
            f"elasticity.max_train_batch_size = {shown(wish.max_batch_size)}: must be at most {MOST_SAMPLES}"
        )
    if len(wish.micro_batch_sizes) > MOST_MICRO_BATCHES:
        raise ValueError(
            f"elasticity.micro_batch_sizes = {shown(list(wish.micro_batch_sizes))}: must be at most "
            f"{MOST_MICRO_BATCHES} numbers; leave out those that are hardly used"
        )
    if wish.max_gpus < wish.min_gpus:
        raise ValueError(
            f"elasticity.max_gpus = {wish.max_gpus}: must be at least elasticity.min_gpus ({wish.min_gpus})"
        )
    if wish.ranks_per_node % wish.model_parallel_size:
        raise ValueError(
            f"elasticity.num_gpus_per_node = {wish.ranks_per_node}: must be a multiple of "
            f"elasticity.model_parallel_size ({wish.model_parallel_size})"
        )
    per_node = wish.replicas_per_node
    largest = max(wish.micro_batch_sizes)
    if largest * per_node > wish.max_batch_size:
        share = f" / {per_node} replicas a node" if per_node > 1 else ""
        raise ValueError(
            f"elasticity.micro_batch_sizes = {shown(list(wish.micro_batch_sizes))}: each must be at most "
            f"elasticity.max_train_batch_size ({wish.max_batch_size}){share}; remove {largest} or raise it"
        )


def _in_nodes(wish: Wish) -> str:
    return f", in whole nodes of {wish.ranks_per_node}," if wish.ranks_per_node > 1 else ""


__all__ = ["Plan", "Wish", "candidates", "highly_composite", "plan", "valid_counts"]
