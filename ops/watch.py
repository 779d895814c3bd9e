"""Says which rank went another way when a collective is never joined: reports of all ranks, compared.

    wait fails -> this rank's report -> the group's store -> everybody's reports -> one sentence, one PeerError

Until then a collective costs one count and one entry in a short ring. Nothing is formatted and nothing is
sent before something fails.
"""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

from .errors import PeerError

RECENT = 128  # collectives a rank remembers the order of
PATIENCE_SECONDS = 3.0  # for ranks that fail a little later than this one
POLL_SECONDS = 0.05
OUTSIDE = "it is in the script's own code (a data loader, a collective of its own), or slower than the timeout"
GONE = "it closed its connection: its process ended, or failed in a collective of the script's own"


class Board(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class Mark(NamedTuple):
    """One collective: the `number`-th of its kind and buffer on this rank, from 1."""

    kind: str
    buffer: int
    what: str
    number: int


@dataclass(frozen=True)
class Report:
    """What a rank says of itself once it is in trouble.

    engine: number of the engine on its group; counts and names are those of this engine.
    waits_in: the collective, e.g. "all_gather of unit 'blocks.5'", its `number`-th; or "", and
    raised: what it raised and where, instead.
    gone: a peer that closed the connection instead of answering.
    counts: how often it started each collective; recent: the last ones, oldest first.
    """

    rank: int
    engine: int = 0
    waits_in: str = ""
    number: int = 0
    raised: str = ""
    gone: int | None = None
    counts: Mapping[str, int] | None = None
    recent: Sequence[str] = ()

    def has_started(self, collective: str) -> int:
        return (self.counts or {}).get(collective, 0)


# -- the comparison -------------------------------------------------------------------------------------


def explain(reports: Sequence[Report], world_size: int) -> str:
    """One sentence about all ranks, the same on each one that sees the same reports.

    Args:
        reports: of the ranks that said something, by rank.
    """
    waiting = _waiting(reports)
    said = [_told_wait(ranks, reports) for ranks in waiting]
    said += [f"rank {r.rank} raised {r.raised}" for r in reports if r.raised]
    silent = sorted(set(range(world_size)) - {r.rank for r in reports})
    gone = {r.gone for r in reports}
    for ranks, why in (
        ([rank for rank in silent if rank in gone], GONE),
        ([rank for rank in silent if rank not in gone], OUTSIDE),
    ):
        if ranks:
            said.append(f"{_ranks(ranks)} said nothing: {why}")
    difference = _told_difference(waiting)
    if difference:
        said.append(difference)
    return f"{'; '.join(said)}. {_remedy(waiting, reports, silent)}"


def first_difference(one: Report, two: Report, kind: str) -> tuple[int, str, str] | None:
    """Where the collectives of `kind` that two ranks started first differ: (number from 1, one's, two's).

    None: they are the same as far back as both remember. "" stands for: none so far.
    """
    total_one, last_one = _of_kind(one, kind)
    total_two, last_two = _of_kind(two, kind)
    begin = max(total_one - len(last_one), total_two - len(last_two), 0)
    for at in range(begin, max(total_one, total_two)):
        mine = last_one[at - total_one] if at < total_one else ""
        other = last_two[at - total_two] if at < total_two else ""
        if mine != other:
            return at + 1, mine, other
    return None


def _of_kind(report: Report, kind: str) -> tuple[int, list[str]]:
    """How many collectives of `kind` the rank started in all, and the last of them."""
    total = sum(n for name, n in (report.counts or {}).items() if name.startswith(kind))
    return total, [name for name in report.recent if name.startswith(kind)]


def _waiting(reports: Sequence[Report]) -> list[list[Report]]:
    """Ranks that wait in the same collective, together."""
    groups: dict[tuple[int, str, int], list[Report]] = {}
    for report in reports:
        if report.waits_in:
            groups.setdefault((report.engine, report.waits_in, report.number), []).append(report)
    return list(groups.values())


def _behind(group: Sequence[Report], reports: Sequence[Report]) -> list[Report]:
    """Ranks that did not start what `group` waits in."""
    first = group[0]
    return [
        r
        for r in reports
        if r.engine == first.engine
        and r.counts is not None
        and r.has_started(first.waits_in) < first.number
    ]


def _told_wait(group: Sequence[Report], reports: Sequence[Report]) -> str:
    first = group[0]
    engine = f" of engine {first.engine}" if len({r.engine for r in reports}) > 1 else ""
    verb = "waits" if len(group) == 1 else "wait"
    text = f"{_ranks([r.rank for r in group])} {verb} in {first.waits_in}{engine}"
    counts: dict[int, list[int]] = {}
    for report in _behind(group, reports):
        counts.setdefault(report.has_started(first.waits_in), []).append(report.rank)
    if not counts:
        return f"{text}, for the {_ordinal(first.number)} time"
    missing = [
        f"{_ranks(ranks)} {f'started only {_times(count)}' if count else 'never started'}"
        for count, ranks in sorted(counts.items())
    ]
    return f"{text}, for the {_ordinal(first.number)} time, which {' and '.join(missing)}"


def _told_difference(waiting: Sequence[Sequence[Report]]) -> str:
    """The first gather in which two ranks went different ways."""
    for group in waiting[1:]:
        one, two = waiting[0][0], group[0]
        found = first_difference(one, two, "all_gather") if one.engine == two.engine else None
        if found is not None:
            number, *names = found
            mine, other = (name.partition(" of ")[2] or "nothing yet" for name in names)
            return (
                f"the {_ordinal(number)} all_gather is the first that differs: {mine} on rank {one.rank}, "
                f"{other} on rank {two.rank}"
            )
    return ""


def _remedy(
    waiting: Sequence[Sequence[Report]], reports: Sequence[Report], silent: Sequence[int]
) -> str:
    raised = [r.rank for r in reports if r.raised]
    if raised:
        return f"Look at the traceback of {_ranks(raised)}"
    blocked = [g[0].waits_in for g in waiting if _behind(g, reports)]
    units = [name.partition(" of ")[2] for name in blocked if name.startswith("all_gather of ")]
    if units:
        return (
            f"At stage 3 every rank must use {' and '.join(dict.fromkeys(units))} equally often, in forward "
            "and in the loss: set zero_optimization.divergent_graphs to true, or call it on every rank (0 * "
            "its output will do), put it into one unit with what every rank calls (zero_optimization.units), "
            "or train at stage 2; torch.utils.checkpoint needs use_reentrant=False where ranks leave "
            "parameters unused"
        )
    if any(name.startswith("access") for name in blocked):
        return "Access to parameters is for all ranks together: make the same call on every rank"
    if blocked or len(waiting) > 1:
        return "Every rank must make the same calls of forward, backward and step, equally many"
    if silent:
        return (
            f"Look at the log of {_ranks(silent)}: every rank must run equally many steps, and come to each "
            "one within the timeout (XDS_TIMEOUT_SECONDS)"
        )
    return (
        "All ranks went the same way: one came later than another's timeout, or the network failed; raise "
        "XDS_TIMEOUT_SECONDS if a step may take so long"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# -- one rank's part ------------------------------------------------------------------------------------


@final
class Watch:
    """Remembers which collectives this rank started, and turns a failed wait into a `PeerError`."""

    def __init__(
        self, rank: int, world_size: int, engine: int, open_board: Callable[[], Board | None]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._engine = engine
        self._open_board = open_board
        self._names: dict[int, str] = {}
        self._counts: dict[tuple[str, int, str], int] = {}
        self._recent: deque[tuple[str, int, str]] = deque(maxlen=RECENT)
        self._has_spoken = False
        self._verdict = ""

    def name(self, buffer: int, name: str) -> None:
        """From now on `buffer` is called `name` in messages."""
        taken = name in self._names.values()
        self._names[buffer] = f"{name} (buffer {buffer})" if taken else name

    def start(self, kind: str, buffer: int, what: str = "") -> Mark:
        """This rank starts a collective of `buffer`; `what` says more where the buffer does not."""
        if self._has_spoken:
            self._take_back()
        key = (kind, buffer, what)
        number = self._counts[key] = self._counts.get(key, 0) + 1
        self._recent.append(key)
        return Mark(kind, buffer, what, number)

    def failed(self, mark: Mark, error: RuntimeError, peer: int | None) -> PeerError:
        """The error to raise for a wait in `mark` that failed; takes `PATIENCE_SECONDS` at most.

        Args:
            error: what the backend said; peer: the rank it said so about, if it is known.
        """
        if not self._verdict:
            called = self._call(mark[:3])
            said = str(error)
            if peer is None and self._world_size == 2:
                peer = 1 - self._rank
            # a peer that gave up before us closes the connection as well, but it has said why
            is_closed = "Timed out" not in said and "Application timeout" not in said
            report = self._report(
                waits_in=called, number=mark.number, gone=peer if is_closed else None
            )
            told = explain(self._exchange(report), self._world_size)
            reason = said.split("\n")[0].rpartition("] ")[2].partition(". This is")[0].rstrip(". ")
            self._verdict = (
                f"{called} failed on rank {self._rank} of {self._world_size} ({reason}). Another rank "
                f"stopped, or went another way through its code: {told}"
            )
        return PeerError(self._verdict)  # a group does not recover: later waits fail of the same

    @contextmanager
    def guard(self, kind: str, buffer: int, what: str = "") -> Iterator[Mark]:
        """Around a collective that is over when it returns."""
        mark = self.start(kind, buffer, what)
        try:
            yield mark
        except RuntimeError as error:
            raise self.failed(mark, error, None) from error

    @contextmanager
    def telling(self, where: str) -> Iterator[None]:
        """Around the user's code: what it raises on this rank is told to the ranks that will wait for it."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            said = "".join(traceback.format_exception_only(error)).partition("\n")[0]
            self._publish(self._report(raised=f"{said[:200]} in {where}"))
            raise

    def _report(self, **fields: Any) -> Report:
        counts: Counter[str] = Counter()
        for key, number in self._counts.items():
            counts[self._call(key)] += number
        recent = [self._call(key) for key in self._recent]
        return Report(self._rank, self._engine, counts=dict(counts), recent=recent, **fields)

    def _call(self, key: tuple[str, int, str]) -> str:
        kind, buffer, what = key
        return f"{kind} of {what or self._names.get(buffer, f'flat buffer {buffer}')}"

    # -- through the store ------------------------------------------------------------------------------

    def _publish(self, report: Report) -> Board | None:
        """None: there is no store, or nobody answers there any more."""
        board = self._open_board()
        if board is None:
            return None
        try:
            board.set(_key(self._rank), json.dumps(vars(report)))
        except RuntimeError:
            return None
        self._has_spoken = True
        return board

    def _take_back(self) -> None:
        """It went on after all: what it said must not explain a later failure."""
        self._has_spoken = False
        board = self._open_board()
        if board is not None and not self._verdict:
            try:
                board.delete_key(_key(self._rank))
            except RuntimeError:
                return

    def _exchange(self, mine: Report) -> list[Report]:
        """Everybody's reports, this rank's too, by rank."""
        reports = {self._rank: mine}
        board = self._publish(mine)
        if board is None:
            return [mine]
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            while self._read(board, reports) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            # the store may live in this process: stay until those who spoke have read
            board.set(_key(self._rank, "read"), "")
            others = [_key(rank, "read") for rank in reports if not reports[rank].raised]
            while not board.check(others) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            pass  # the store went with its rank: what was read so far is what there is
        return [reports[rank] for rank in sorted(reports)]

    def _read(self, board: Board, reports: dict[int, Report]) -> bool:
        """Add what others have said; True while somebody has not."""
        for rank in range(self._world_size):
            if rank not in reports and board.check([_key(rank)]):
                reports[rank] = Report(**json.loads(board.get(_key(rank))))
        return len(reports) < self._world_size


def _key(rank: int, what: str = "waits") -> str:
    return f"xds/{what}/{rank}"
