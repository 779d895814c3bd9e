"""The bytes that a rank sends, for the report: by kind, to other hosts, and against exact messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import final

from ...ops.comm.collectives import Collectives
from ...utils.sizes import size_text
from ...zero.model.sharded_model import ShardedModel


@final
class SentBytes:
    """Counts the bytes of all groups of an engine."""

    def __init__(
        self, opened: Sequence[Collectives], sharded: ShardedModel, hosts: Sequence[int]
    ) -> None:
        """opened: the groups; the list may grow. hosts: for each rank of the job, the number of its host."""
        self._opened = opened
        self._sharded = sharded
        self._hosts = hosts
        self._of_text = self._of_events = self._counts()  # at the last call

    def _counts(self) -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {
            "sent": Counter(),
            "across": Counter(),
            "exact": Counter(),
        }
        for group in self._opened:
            group.set_hosts(self._hosts)
            found["sent"].update(group.sent_bytes)
            found["across"].update(group.sent_across_bytes)
            found["exact"].update(group.exact_bytes)
        return found

    def text(self) -> str:
        """What was sent since the last call, in one line."""
        now = self._counts()
        found, self._of_text = _difference(now, self._of_text), now
        kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in found["sent"].most_common())
        parts = [f"sent {kinds or 'nothing'}"]
        if any(found["across"].values()):
            parts.append(f"{size_text(found['across'].total())} of it to other hosts")
        if found["exact"]:
            parts.append(f"{_ratio(found):.1f}x fewer than exact")
            if self._has_pending_error:
                parts.append(f"not sent yet {self._pending_norm():.3e}")
        return ", ".join(parts)

    def events(self) -> list[tuple[str, float]]:
        """What was sent since the last call, as names and numbers."""
        now = self._counts()
        found, self._of_events = _difference(now, self._of_events), now
        events = [(f"sent_bytes_{kind}", float(size)) for kind, size in found["sent"].items()]
        events.append(("sent_bytes_to_other_hosts", float(found["across"].total())))
        if found["exact"]:
            events.append(("compression_ratio", _ratio(found)))
            if self._has_pending_error:
                events.append(("not_sent_norm", self._pending_norm()))
        return events

    @property
    def _has_pending_error(self) -> bool:
        return any(grads.reducer.has_pending_error for grads in self._sharded.reduction.order)

    def _pending_norm(self) -> float:
        """The norm of this rank's pending error, as a mean gradient."""
        total = 0.0
        for grads in self._sharded.reduction.order:
            pending = grads.reducer.pending_error
            if pending is not None:
                total += float(pending.error.square().sum()) * pending.unit**2
        return math.sqrt(total)


def _difference(
    now: dict[str, Counter[str]], before: dict[str, Counter[str]]
) -> dict[str, Counter[str]]:
    return {name: now[name] - before[name] for name in now}


def _ratio(found: dict[str, Counter[str]]) -> float:
    """The bytes of exact messages over those of the messages that took their place."""
    taken = sum(found["sent"][kind] for kind in found["exact"])
    return found["exact"].total() / max(taken, 1)


__all__ = ["SentBytes"]
