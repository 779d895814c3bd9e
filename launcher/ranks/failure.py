"""Determines which rank failed first, and formats the failure report.

When a rank fails, its peers usually fail too: by a broken connection, or because the launcher stops
them. So failures are ordered by kind before time: a rank's own failure first, then the loss of a peer,
then being stopped by the launcher.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ...utils.quoting import ranks_text

_ROOT = Path(__file__).parents[2]
SAVED_AND_LEFT = 128 + signal.SIGTERM  # the exit code of xds.Preempted
_TAIL_LINES = 20
_TAIL_BYTES = 16_384

# Error messages of gloo, NCCL and the rendezvous store on ranks that lost a peer.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|likely closed)|broken pipe|socket closed|pair closure"
    r"|remote process (exited|has)|ncclRemoteError|NCCL communicator was aborted"
    r"|failed to recv, got 0 bytes|remote server shutdown"
    r"|timed out waiting \d+ms for (recv|send)",
    re.IGNORECASE,
)

# transformers and accelerate say "install deepspeed" in several ways, each in an exception of these classes
_NO_DEEPSPEED = re.compile(
    r"^[\w.]*(ImportError|ModuleNotFoundError|PackageNotFoundError): (?!cannot import).*deepspeed",
    re.IGNORECASE | re.MULTILINE,
)

# torch's ways to say that a layer in 16 bits got an input in fp32
_NOT_CAST = re.compile(
    r"^RuntimeError: (?=.*(BFloat16|Half)).*(same dtype|should be the same|expected scalar type)",
    re.MULTILINE,
)

_SIGNAL_HINTS = {
    int(signal.SIGKILL): "if nobody sent it, the kernel was out of memory (see `dmesg`)",
    int(signal.SIGBUS): "the usual cause is a full /dev/shm (`xds env` prints its size)",
    int(signal.SIGSEGV): "native code crashed, called from the Python frames above",
}


class Kind(IntEnum):
    """Why a rank ended. Lower values are more likely to be the cause of the others."""

    OWN = 0  #: the rank itself failed
    LOST_PEER = 1  #: the rank lost the connection to another rank
    STOPPED = 2  #: the launcher stopped the rank


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    exit_code: as in a shell: 1-255, 128 + signum after a signal.
    signum: the signal that ended the rank, or 0.
    text: the traceback, or the Python frames of a crash; may be empty.
    host: the rank's host; log: its output file there; tail: the last lines of the log if there is no text.
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
        """The failure from `vars(failure)` after a round trip through JSON."""
        return Failure(**dict(record, tail=tuple(record["tail"])))

    @property
    def kind(self) -> Kind:
        if self.was_killed_by_us or self.exit_code == 128 + signal.SIGTERM:
            return Kind.STOPPED
        return Kind.LOST_PEER if _LOST_PEER.search(self.text) else Kind.OWN


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The failure that most likely caused the others.

    Of several with the same text (an error in the script affects every rank), that of the lowest rank.
    """
    first = min(failures, key=lambda failure: (failure.kind, failure.time_seconds, failure.rank))
    if first.kind is not Kind.OWN or first.signum:
        return first
    record = (Kind.OWN, first.exit_code, first.text)
    alike = [each for each in failures if (each.kind, each.exit_code, each.text) == record]
    return min(alike, key=lambda failure: failure.rank)


def was_preempted(failures: Sequence[Failure]) -> bool:
    """Whether the ranks saved a checkpoint on request and then exited (see xds.Preempted).

    When the first rank exits, the launcher may stop the others while they exit. All have saved by then.
    """
    left = [f for f in failures if f.exit_code == SAVED_AND_LEFT]
    return len(left) == len(failures) and any(not f.signum for f in left)


def report(failures: Sequence[Failure], finished: Sequence[int]) -> str:
    """The report: the first failure in full, the others by rank only.

    Args:
        failures: those of all ranks that failed.
        finished: the ranks that ended with exit code 0.
    """
    first = first_failure(failures)
    how = f"exit code {first.exit_code}"
    if first.signum:
        how = f"killed by {_signal_name(first.signum)}, {how}"
    lines = [f"xds: rank {first.rank} failed on {first.host}: {how} (pid {first.pid})"]
    if first.text:
        text = first.text.rstrip("\n")
        lines.append(_sentence_first(text) or folded(text))
    elif first.tail:
        lines += ["  last lines of its output:", *(f"  | {line}" for line in first.tail)]
    if first.signum in _SIGNAL_HINTS:
        lines.append(f"xds: {_signal_name(first.signum)}: {_SIGNAL_HINTS[first.signum]}")
    if first.kind is Kind.LOST_PEER and finished:
        lines.append(
            f"xds: {ranks_text(finished)} had finished; every rank must join each collective"
        )
    if _NO_DEEPSPEED.search(first.text):
        lines.append(
            "xds: to train with xds in place of DeepSpeed, start it with `xds --as-deepspeed`; "
            "nothing has to be installed"
        )
    if _NOT_CAST.search(first.text):
        lines.append(
            "xds: with bf16 or fp16 enabled cast floating-point inputs too, as in x.to(torch.bfloat16); "
            "with torch_autocast in its place no cast is needed"
        )
    lines += _others(failures, first)
    if first.log:
        lines.append(f"xds: full output of rank {first.rank}: {first.log}")
    return "\n".join(lines) + "\n"


_FRAME = re.compile(r'  File "(.*)", line \d+, in ')
_PACKAGE = [path.parent.name for path in _ROOT.glob("*/__init__.py")]  # the root may hold examples
_OWN_FOLDERS = tuple({f"{root}/{name}/" for root in (_ROOT, _ROOT.resolve()) for name in _PACKAGE})
_PASSES_ON = "/torch/nn/modules/module.py"  # calls a module's forward, and nothing else
_CHAINED = re.compile(r"\n\n(?:The above exception was|During handling of the above).*\n\n")
_OWN_ERROR = re.compile(r"^xds\.utils\.errors\.(?=\w+: )", re.MULTILINE)


def _sentence_first(traceback: str) -> str:
    """For an error of xds: its sentence, and the frames that are not of xds; "" for others.

    Its sentence says what is wrong; what raised it inside xds is in the log.
    """
    blocks = _CHAINED.split(traceback)
    if not all(map(_OWN_ERROR.search, blocks)):
        return ""
    frames, sentence = _OWN_ERROR.split(blocks[-1], maxsplit=1)
    lines, is_shown = [sentence], False
    for line in frames.rstrip("\n").split("\n"):
        found = _FRAME.match(line)
        if found is not None:
            is_shown = not (found[1].startswith(_OWN_FOLDERS) or found[1].endswith(_PASSES_ON))
        if is_shown and line.strip(" ^~"):
            lines.append(line)
    return "\n".join(lines)


def folded(traceback: str) -> str:
    """The traceback with one line in place of successive frames of xds. The last frame always stays."""
    frames: list[tuple[bool, list[str]]] = []  # (it is a frame of xds or between two, its lines)
    for line in traceback.split("\n"):
        found = _FRAME.match(line)
        if found is not None:
            frames.append(
                (found[1].startswith(_OWN_FOLDERS) or found[1].endswith(_PASSES_ON), [line])
            )
        elif frames and line.startswith("    "):
            frames[-1][1].append(line)
        else:
            frames.append((False, [line]))
    lines: list[str] = []
    hidden: list[list[str]] = []
    for number, (is_hidden, text) in enumerate(frames):
        follows = number + 1 < len(frames) and _FRAME.match(frames[number + 1][1][0])
        if is_hidden and follows:
            hidden.append(text)
            continue
        if any(frame[0].split('"')[1].startswith(_OWN_FOLDERS) for frame in hidden):
            lines.append(f"  ... {len(hidden)} frames inside xds, in the log")
        else:
            lines += [line for frame in hidden for line in frame]
        hidden = []
        lines += text
    return "\n".join(lines)


def _others(failures: Sequence[Failure], first: Failure) -> list[str]:
    own = sorted(f.rank for f in failures if f is not first and f.kind is Kind.OWN)
    return [f"xds: {ranks_text(own)} failed as well"] if own else []


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def last_lines(log: Path, begin: int = 0) -> tuple[str, ...]:
    """The last lines of a log from byte `begin` on; () if there are none, or no log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(begin, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    # a progress bar redraws its line: keep the last state
    last = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")[-_TAIL_LINES:]]
    return tuple(last) if any(last) else ()
