"""What the ranks say of themselves, compared: one sentence about who went another way, and where.

    rank 0  waits in all_gather of unit 'b' ─┐
    rank 1  stands in its data loader       ─┼─> explain ─> one sentence
    rank 2  says nothing                    ─┘

Pure: reports in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUTSIDE = "it is in the script's own code (a data loader, a collective of its own), or slower than the timeout"
GONE = "it closed its connection: its process ended, or failed in a collective of the script's own"
LEFT = "it has let go of this engine already"


@dataclass(frozen=True)
class Report:
    """What a rank says of itself once it is in trouble.

    engine: number of the engine on its group; counts and names are those of this engine.
    waits_in: the collective, e.g. "all_gather of unit 'blocks.5'", its `number`-th; or "", and
    raised: what it raised and where, instead.
    gone: a peer that closed the connection instead of answering.
    counts: how often it started each collective; recent: the last ones, oldest first.
    shape: what it gives there, e.g. "float32[1024]"; serial: its number among all collectives of this engine.
    place: the script's line that it came there from, or where its main thread stands.
    call: a collective of the script's own in which it is, instead.
    own: the last of these, each [number, op, sizes], where torch's flight recorder is on.
    alarm: the alarm that it answers; -1: nobody asked.
    """

    rank: int
    engine: int = 0
    waits_in: str = ""
    number: int = 0
    raised: str = ""
    gone: int | None = None
    counts: Mapping[str, int] | None = None
    recent: Sequence[str] = ()
    shape: str = ""
    serial: int = 0
    place: str = ""
    call: str = ""
    own: Sequence[Sequence[object]] = ()
    alarm: int = -1

    @property
    def stands(self) -> bool:
        """It answered, and is in no collective."""
        return not (self.waits_in or self.raised or self.call)

    def has_started(self, collective: str) -> int:
        return (self.counts or {}).get(collective, 0)


# -- the comparison -------------------------------------------------------------------------------------


def explain(
    reports: Sequence[Report], world_size: int, silences: Mapping[int, float | None] | None = None
) -> str:
    """One sentence about all ranks, the same on each one that sees the same reports.

    Args:
        reports: of the ranks that said something, by rank.
        silences: for how many seconds a rank that does not answer gave no sign of life; None where it has
            destroyed its engine. Ranks that never gave one are not in it.
    """
    waiting = _waiting(reports)
    said = [_told_wait(ranks, reports) for ranks in waiting]
    said += [f"rank {r.rank} raised {r.raised}" for r in reports if r.raised]
    said += _told_places(reports)
    silent = sorted(set(range(world_size)) - {r.rank for r in reports})
    said += _told_silent(silent, {r.gone for r in reports}, silences or {})
    said += [text for text in (_told_difference(waiting), _told_own_difference(reports)) if text]
    return f"{'; '.join(said)}. {_remedy(waiting, reports, silent)}"


def _told_places(reports: Sequence[Report]) -> list[str]:
    """Where the script is on each rank, ranks of one place together."""
    texts: dict[str, list[int]] = {}
    for r in reports:
        if r.call:
            text = f"{{}} {{s}} in {r.call}, called at {r.place or 'an unknown line'}"
        elif r.stands:
            text = f"{{}} {{s}} in no collective: the script is at {r.place or 'an unknown line'}"
        elif r.place and r.waits_in:
            text = f"{{}} came there from {r.place}" + (f" with {r.shape}" if r.shape else "")
        else:
            continue
        texts.setdefault(text, []).append(r.rank)
    return [
        text.format(_ranks(ranks), s="waits" if len(ranks) == 1 else "wait")
        for text, ranks in texts.items()
    ]


def _told_silent(
    silent: Sequence[int], gone: set[int | None], silences: Mapping[int, float | None]
) -> list[str]:
    reasons: dict[str, list[int]] = {}
    for rank in silent:
        if rank in gone:
            why = GONE
        elif rank not in silences:
            why = OUTSIDE
        else:
            seconds = silences[rank]
            why = LEFT if seconds is None else no_sign(seconds)
        reasons.setdefault(why, []).append(rank)
    order = sorted(reasons.items(), key=lambda item: item[0] != GONE)
    return [f"{_ranks(ranks)} said nothing: {why}" for why, ranks in order]


def no_sign(seconds: float) -> str:
    """What is said of a rank whose thread does not answer."""
    return (
        f"no sign of life for {seconds:.0f} s: its process is stopped or ended, its host is gone, or native "
        "code holds its interpreter"
    )


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


def _told_own_difference(reports: Sequence[Report]) -> str:
    """The first collective of the script's own that is another one on another rank."""
    calls = [{int(str(n)): (op, sizes) for n, op, sizes in r.own} for r in reports]
    for number in sorted(set().union(*calls)) if calls else ():
        for r, mine in zip(reports, calls, strict=True):
            first = calls[0].get(number)
            if first is not None and number in mine and mine[number] != first:
                return (
                    f"the script's own collective number {number} is the first that differs: {first[0]} of "
                    f"{first[1]} on rank {reports[0].rank}, {mine[number][0]} of {mine[number][1]} on rank "
                    f"{r.rank}"
                )
    return ""


def _remedy(
    waiting: Sequence[Sequence[Report]], reports: Sequence[Report], silent: Sequence[int]
) -> str:
    raised = [r.rank for r in reports if r.raised]
    if raised:
        return f"Look at the traceback of {_ranks(raised)}"
    standing = [r.rank for r in reports if r.stands]
    if standing:
        whose = "this line" if len(standing) == 1 else "these lines"
        return (
            f"Look at {whose} of {_ranks(standing)}: every rank must run equally many steps, and come to each "
            "one within the timeout (XDS_TIMEOUT_SECONDS)"
        )
    if any(r.call for r in reports):
        return (
            "Every rank must make the same calls, in the same order: of forward, backward and step, and of "
            "the script's own collectives"
        )
    blocked = [g[0].waits_in for g in waiting if _behind(g, reports)]
    if any(name.startswith("access") for name in blocked):
        return "Access to parameters is for all ranks together: make the same call on every rank"
    units = [name.partition(" of ")[2] for name in blocked if name.startswith("all_gather of ")]
    if units:
        return (
            f"At stage 3 every rank must use {' and '.join(dict.fromkeys(units))} equally often, in forward "
            "and in the loss: set zero_optimization.divergent_graphs to true, or call it on every rank (0 * "
            "its output will do), put it into one unit with what every rank calls (zero_optimization.units), "
            "or train at stage 2; torch.utils.checkpoint needs use_reentrant=False where ranks leave "
            "parameters unused"
        )
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
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"ranks {', '.join(parts)}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
