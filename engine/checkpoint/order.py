"""Orders checkpoints by training progress, not by the clock, which may go backwards."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .manifest import Manifest


def newest_first(found: Iterable[Manifest]) -> list[Manifest]:
    """Sort by steps, then by micro-batches, then by the numbers in tags of the same kind.

    The clock decides only between tags of different kinds ("best", "global_step7") of the same step and
    micro-batch.
    """
    manifests = list(found)
    times: dict[tuple[int, int, str], float] = {}  # by (steps, micro-batches, kind)
    for one in manifests:
        times[_place(one)] = max(times.get(_place(one), 0.0), one.saved_seconds)

    def age(one: Manifest) -> tuple[int, int, float, str, list[int], str]:
        steps, micro_steps, kind = _place(one)
        return steps, micro_steps, times[_place(one)], kind, _numbers(one.tag), one.tag

    return sorted(manifests, key=age, reverse=True)


def kind_of(tag: str) -> str:
    """The tag without its numbers: "global_step300" and "global_step310" are of one kind."""
    return re.sub(r"[0-9]+", "0", tag)


def _place(one: Manifest) -> tuple[int, int, str]:
    return one.global_steps, one.micro_steps, kind_of(one.tag)


def _numbers(tag: str) -> list[int]:
    return [int(digits[:4000]) for digits in re.findall(r"[0-9]+", tag)]
