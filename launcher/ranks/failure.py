"""Which rank failed first, and the one report about it.

When a rank dies, its peers usually die too: of a broken connection, or because the launcher stops
them. Each of these deaths looks like a failure. So failures are ordered by kind before time: one of
a rank's own comes before the loss of a peer, and that before being stopped.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

SAVED_AND_LEFT = 128 + signal.SIGTERM  # the exit code of xds.Preempted
_TAIL_LINES = 20
_TAIL_BYTES = 16_384

# What gloo, NCCL and the rendezvous store say on the ranks that outlive another one.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|likely closed)|broken pipe|socket closed|pair closure"
    r"|remote process (exited|has)|ncclRemoteError|NCCL communicator was aborted"
    r"|failed to recv, got 0 bytes|remote server shutdown"
    r"|timed out waiting \d+ms for (recv|send)",
    re.IGNORECASE,
)

_SIGNAL_HINTS = {
    int(signal.SIGKILL): "if nobody sent it, the kernel was out of memory (`dmesg` says so)",
    int(signal.SIGBUS): "most often /dev/shm is full (`xds env` shows its size)",
    int(signal.SIGSEGV): "native code crashed, called from the Python frames above",
}


class Kind(IntEnum):
    """Why a rank ended, the likeliest cause of the others' end first."""

    OWN = 0  #: it failed by itself
    LOST_PEER = 1  #: another rank was gone
    STOPPED = 2  #: the launcher stopped it


@dataclass(frozen=True)
class Failure:
    """One rank's end.

    exit_code: the shell's: 1-255, 128 + signum after a signal.
    signum: 0 for a rank that ended by itself.
    text: the traceback, or for a crash the frames it happened in; may be empty.
    host: where it ran; log: its output file there; tail: the last lines of it where there is no text.
    """

    rank: int
    pid: int
    exit_code: int
    time_seconds: float
    signum: int = 0
    text: str = ""
    was_killed_by_us: bool = False
    host: str = ""
    log: str = ""
    tail: tuple[str, ...] = ()

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Failure:
        """What `vars` of a failure became in JSON."""
        return Failure(**dict(record, tail=tuple(record["tail"])))

    @property
    def kind(self) -> Kind:
        if self.was_killed_by_us or self.exit_code == 128 + signal.SIGTERM:
            return Kind.STOPPED
        return Kind.LOST_PEER if _LOST_PEER.search(self.text) else Kind.OWN


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others.

    Of several that say the same (a mistake in the script hits every rank) it is the lowest rank's.
    """
    first = min(failures, key=lambda failure: (failure.kind, failure.time_seconds, failure.rank))
    if first.kind is not Kind.OWN or first.signum:
        return first
    record = (Kind.OWN, first.exit_code, first.text)
    alike = [each for each in failures if (each.kind, each.exit_code, each.text) == record]
    return min(alike, key=lambda failure: failure.rank)


def was_preempted(failures: Sequence[Failure]) -> bool:
    """Whether the ranks left by themselves after they were asked to, having saved (see xds.Preempted).

    The first to leave may have the others stopped in their last moments: all have saved by then.
    """
    left = [f for f in failures if f.exit_code == SAVED_AND_LEFT]
    return len(left) == len(failures) and any(not f.signum for f in left)


def report(failures: Sequence[Failure], finished: Sequence[int]) -> str:
    """Tell the first failure once, the others by rank only.

    Args:
        failures: every rank that did not end well.
        finished: the ranks that ended with exit code 0.
    """
    first = first_failure(failures)
    how = f"exit code {first.exit_code}"
    if first.signum:
        how = f"killed by {_signal_name(first.signum)}, {how}"
    lines = [f"xds: rank {first.rank} failed on {first.host}: {how} (pid {first.pid})"]
    if first.text:
        lines.append(first.text.rstrip("\n"))
    elif first.tail:
        lines += ["  its last lines:", *(f"  | {line}" for line in first.tail)]
    if first.signum in _SIGNAL_HINTS:
        lines.append(f"xds: {_signal_name(first.signum)}: {_SIGNAL_HINTS[first.signum]}")
    if first.kind is Kind.LOST_PEER and finished:
        lines.append(
            f"xds: {ranks_text(finished)} had finished; every rank must join each collective"
        )
    lines += _others(failures, first)
    if first.log:
        lines.append(f"xds: everything rank {first.rank} printed: {first.log}")
    return "\n".join(lines) + "\n"


def _others(failures: Sequence[Failure], first: Failure) -> list[str]:
    own = sorted(f.rank for f in failures if f is not first and f.kind is Kind.OWN)
    return [f"xds: {ranks_text(own)} failed as well"] if own else []


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Say `rank 3`, or `ranks 0, 1, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def last_lines(log: Path) -> tuple[str, ...]:
    """The last lines of a log; nothing when it is empty or not there."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    # a progress bar redraws its line: keep what it showed last
    last = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")[-_TAIL_LINES:]]
    return tuple(last) if any(last) else ()
