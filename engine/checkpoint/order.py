"""Which of several checkpoints is the newest: the one whose training is further. Clocks may go back."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .manifest import Manifest


def newest_first(found: Iterable[Manifest]) -> list[Manifest]:
    """By steps, then micro-batches. Of one point of the training: by the numbers in tags of one kind.

    Only where tags of different kinds ("best", "global_step7") name the same point does the clock say which of
    these kinds comes first.
    """
    manifests = list(found)
    times: dict[tuple[int, int, str], float] = {}  # of the points and kinds
    for one in manifests:
        times[_place(one)] = max(times.get(_place(one), 0.0), one.saved_seconds)

    def age(one: Manifest) -> tuple[int, int, float, str, list[int], str]:
        steps, micro_steps, kind = _place(one)
        return steps, micro_steps, times[_place(one)], kind, _numbers(one.tag), one.tag

    return sorted(manifests, key=age, reverse=True)


def kind_of(tag: str) -> str:
    """The tag but for the numbers in it: "global_step300" and "global_step310" are of one kind."""
    return re.sub(r"[0-9]+", "0", tag)


def _place(one: Manifest) -> tuple[int, int, str]:
    return one.global_steps, one.micro_steps, kind_of(one.tag)


def _numbers(tag: str) -> list[int]:
    return [int(digits[:4000]) for digits in re.findall(r"[0-9]+", tag)]
