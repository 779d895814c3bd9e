"""Which fragment meets after which step, and when its meeting takes effect.

    steps 8, fragments 2, delay 3       fragment 1 starts after steps 4, 12, ..., fragment 0 after 8, 16, ...
    units 0 1 2 3 4 5                   fragment 0: units 0 2 4, fragment 1: units 1 3 5 (strided)

    step        4     7 8     11 12     15 16
    fragment 1  |--->|         |--->|            a meeting runs in the background for `delay` steps
    fragment 0        |--->|         ...|--->|

Source: Douillard et al., Streaming DiLoCo, 2025, sections 2.2 and 2.3, https://arxiv.org/abs/2501.18512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class MeetingSchedule:
    """steps: between two meetings of a fragment. delay: steps until a meeting takes effect, below `steps`."""

    steps: int
    fragments: int = 1
    delay: int = 0

    def starts(self, step: int) -> list[int]:
        """The fragments whose meeting starts after this step, from 1.

        >>> [MeetingSchedule(8, 2).starts(step) for step in (4, 7, 8)]
        [[1], [], [0]]
        """
        return [number for number in range(self.fragments) if self._is_start(number, step)]

    def due(self, step: int) -> list[int]:
        """The fragments whose meeting takes effect after this step."""
        return self.starts(step - self.delay) if step > self.delay else []

    def under_way(self, step: int) -> list[int]:
        """The fragments whose meeting has started after this step or before, and is due later."""
        first = max(1, step - self.delay + 1)
        return [number for each in range(first, step + 1) for number in self.starts(each)]

    def fragment(self, number: int) -> int:
        """The fragment of the meeting with this number, from 1."""
        return number % self.fragments

    def fragments_since(self, earlier: int, newest: int) -> list[int]:
        """The fragments of the meetings after `earlier`, until `newest`. earlier -1: all fragments.

        >>> MeetingSchedule(8, 3).fragments_since(4, 6)
        [0, 2]
        """
        if earlier < 0:
            return list(range(self.fragments))
        latest = range(max(earlier, newest - self.fragments) + 1, newest + 1)
        return sorted(self.fragment(number) for number in latest)

    def interval(self, number: int) -> int:
        """Steps between the starts of the meeting before and of this one.

        >>> [MeetingSchedule(8, 3).interval(number) for number in (1, 2, 3, 4)]
        [2, 3, 3, 2]
        """
        return self._start(number) - self._start(number - 1)

    def _start(self, number: int) -> int:
        turn, place = divmod(number, self.fragments)
        return turn * self.steps + place * self.steps // self.fragments

    def _is_start(self, fragment: int, step: int) -> bool:
        return (
            step > 0 and step % self.steps == fragment * self.steps // self.fragments % self.steps
        )

    def meetings(self, fragment: int, steps: int) -> int:
        """How many meetings of the fragment start in the first `steps` steps."""
        return sum(self._is_start(fragment, step) for step in range(1, steps + 1))


def fragment_of(unit: int, fragments: int) -> int:
    """The fragment of the unit with this number: neighbours are in different ones."""
    return unit % fragments


__all__ = ["MeetingSchedule", "fragment_of"]
