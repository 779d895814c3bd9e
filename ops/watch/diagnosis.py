"""Compares the reports of all ranks and writes one message about which ranks differ, and where.

    rank 0  waits in all_gather of unit 'b' ─┐
    rank 1  is in its data loader           ─┼─> explain ─> one message
    rank 2  does not report                 ─┘

Pure functions: reports in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...utils.quoting import escaped, ranks_text

OUTSIDE = "it is in the script's own code (a data loader, a collective of its own), or slower than the timeout"
GONE = "it closed its connection: its process ended, or failed in a collective of the script's own"
LEFT = "it has already destroyed this engine"
FOR_ALL_ALARMS = 2**31  # the alarm of the last report of a rank that has left


@dataclass(frozen=True)
class RankReport:
    """The state of a rank when a wait failed or another rank raised an alarm.

    engine: number of the engine in its group; counts and names are those of this engine.
    waits_in: the collective, e.g. "all_gather of unit 'blocks.5'", which it started `number` times; or "".
    raised: the error that it raised and where, instead.
    gone: a peer that closed the connection instead of answering.
    counts: how often it started each collective; recent: the last ones, oldest first.
    shape: its input, e.g. "float32[1024]"; serial: its number among all collectives of this engine.
    place: the line of the script that called the collective, or the current line of the main thread.
    call: the script's own collective that it is in, instead.
    own: the last of the script's own collectives, each [number, op, sizes]; needs torch's flight recorder.
    members: the ranks that take part in what it waits in; None: all.
    alarm: the number of the alarm that it answers; -1 for a report without an alarm.
    left: its process ends, or destroys this engine.
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
    own: Sequence[tuple[int, str, str]] = ()
    alarm: int = -1
    members: Sequence[int] | None = None
    left: bool = False

    @property
    def is_outside(self) -> bool:
        """Whether the rank answered and is in no collective."""
        return not (self.waits_in or self.raised or self.call or self.left)

    def has_started(self, collective: str) -> int:
        return (self.counts or {}).get(collective, 0)


# -- the comparison -------------------------------------------------------------------------------------


def explain(
    reports: Sequence[RankReport],
    world_size: int,
    silences: Mapping[int, float | None] | None = None,
    places: Mapping[int, str] | None = None,
) -> str:
    """One line about all ranks. It is the same on every rank that has the same reports.

    Args:
        reports: the reports of the ranks that answered, by rank.
        silences: seconds since the last heartbeat of each rank that does not answer; None where it has
            destroyed its engine. Ranks that never sent a heartbeat are not in it.
        places: what a rank has, e.g. "stage 1", said of ranks that are in no collective.
    """
    waiting = _waiting(reports)
    parts = [_wait_text(ranks, reports) for ranks in waiting]
    parts += [f"rank {r.rank} raised {r.raised}" for r in reports if r.raised]
    left = [r.rank for r in reports if r.left]
    if left:
        parts.append(
            f"{ranks_text(left)} {'has' if len(left) == 1 else 'have'} ended, or destroyed this engine"
        )
    parts += _place_texts(reports)
    silent = sorted(set(range(world_size)) - {r.rank for r in reports})
    parts += _silent_texts(silent, {r.gone for r in reports}, silences or {})
    strayed = {*silent, *(r.rank for r in reports if r.raised or r.left or r.is_outside)}
    named = sorted(strayed & (places or {}).keys())
    parts += [f"rank {rank} has {(places or {})[rank]}" for rank in named]
    parts += [text for text in (_difference_text(waiting), _own_difference_text(reports)) if text]
    return escaped(f"{'; '.join(parts)}. {_remedy(waiting, reports, silent)}")


def _place_texts(reports: Sequence[RankReport]) -> list[str]:
    """The current line of the script on each rank. Ranks at the same line are grouped."""
    texts: dict[str, list[int]] = {}
    for r in reports:
        if r.call:
            text = f"{{}} {{s}} in {r.call}, called at {r.place or 'an unknown line'}"
        elif r.is_outside:
            text = f"{{}} {{s}} in no collective: the script is at {r.place or 'an unknown line'}"
        elif r.place and r.waits_in:
            text = f"{{}} called it at {r.place}" + (f" with {r.shape}" if r.shape else "")
        else:
            continue
        texts.setdefault(text, []).append(r.rank)
    return [
        text.format(ranks_text(ranks), s="waits" if len(ranks) == 1 else "wait")
        for text, ranks in texts.items()
    ]


def _silent_texts(
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
            why = LEFT if seconds is None else no_heartbeat(seconds)
        reasons.setdefault(why, []).append(rank)
    order = sorted(reasons.items(), key=lambda item: item[0] != GONE)
    return [f"{ranks_text(ranks)} did not report: {why}" for why, ranks in order]


def no_heartbeat(seconds: float) -> str:
    """The text about a rank whose watcher thread does not answer."""
    return (
        f"no heartbeat for {seconds:.0f} s: its process is stopped or ended, its host is not reachable, or "
        "native code holds its interpreter"
    )


def first_difference(one: RankReport, two: RankReport, kind: str) -> tuple[int, str, str] | None:
    """The first of the collectives of `kind` that differs between two ranks: (number from 1, one's, two's).

    Returns None where all collectives that both remember are the same. "" means that a rank has not started it.
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


def _of_kind(report: RankReport, kind: str) -> tuple[int, list[str]]:
    """The total number of collectives of `kind` that the rank started, and the last ones."""
    total = sum(n for name, n in (report.counts or {}).items() if name.startswith(kind))
    return total, [name for name in report.recent if name.startswith(kind)]


def _waiting(reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """The reports of the ranks that wait in a collective, grouped by collective."""
    groups: dict[tuple[int, str, int], list[RankReport]] = {}
    for report in reports:
        if report.waits_in:
            groups.setdefault((report.engine, report.waits_in, report.number), []).append(report)
    return list(groups.values())


def _behind(group: Sequence[RankReport], reports: Sequence[RankReport]) -> list[RankReport]:
    """The ranks that did not start the collective that `group` waits in."""
    first = group[0]
    return [
        r
        for r in reports
        if r.engine == first.engine
        and (first.members is None or r.rank in first.members)
        and r.counts is not None
        and r.has_started(first.waits_in) < first.number
    ]


def _wait_text(group: Sequence[RankReport], reports: Sequence[RankReport]) -> str:
    first = group[0]
    engine = f" of engine {first.engine}" if len({r.engine for r in reports}) > 1 else ""
    verb = "waits" if len(group) == 1 else "wait"
    text = f"{ranks_text([r.rank for r in group])} {verb} in {first.waits_in}{engine}"
    counts: dict[int, list[int]] = {}
    for report in _behind(group, reports):
        counts.setdefault(report.has_started(first.waits_in), []).append(report.rank)
    if not counts:
        return f"{text}, for the {_ordinal(first.number)} time"
    missing = [
        f"{ranks_text(ranks)} {f'started only {_times(count)}' if count else 'never started'}"
        for count, ranks in sorted(counts.items())
    ]
    return f"{text}, for the {_ordinal(first.number)} time, which {' and '.join(missing)}"


def _difference_text(waiting: Sequence[Sequence[RankReport]]) -> str:
    """The first all_gather that differs between two ranks."""
    for group in waiting[1:]:
        one, two = waiting[0][0], group[0]
        found = first_difference(one, two, "all_gather") if one.engine == two.engine else None
        if found is not None:
            number, *names = found
            mine, other = (name.partition(" of ")[2] or "not started" for name in names)
            return (
                f"the {_ordinal(number)} all_gather is the first that differs: {mine} on rank {one.rank}, "
                f"{other} on rank {two.rank}"
            )
    return ""


def _own_difference_text(reports: Sequence[RankReport]) -> str:
    """The first of the script's own collectives that differs between two ranks."""
    calls = [{number: (op, sizes) for number, op, sizes in r.own} for r in reports]
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
    waiting: Sequence[Sequence[RankReport]], reports: Sequence[RankReport], silent: Sequence[int]
) -> str:
    raised = [r.rank for r in reports if r.raised]
    if raised:
        return f"Look at the traceback of {ranks_text(raised)}"
    outside = [r.rank for r in reports if r.is_outside]
    if outside:
        lines = "this line" if len(outside) == 1 else "these lines"
        return (
            f"Look at {lines} of {ranks_text(outside)}: every rank must run the same number of steps, and "
            "reach each one within the timeout (XDS_TIMEOUT_SECONDS)"
        )
    if any(r.call for r in reports):
        return (
            "Every rank must make the same calls in the same order: calls of forward, backward and step, and "
            "the script's own collectives"
        )
    left = [r.rank for r in reports if r.left]
    if left:
        return (
            f"Look for fewer batches, or a branch that leaves a call out, on {ranks_text(left)}: every rank "
            "must make the same calls of the engine, equally often"
        )
    blocked = [g[0].waits_in for g in waiting if _behind(g, reports)]
    if any(name.startswith("access") for name in blocked):
        return "Access to parameters is collective: make the same call on every rank"
    units = [name.partition(" of ")[2] for name in blocked if name.startswith("all_gather of ")]
    if units:
        return (
            f"At stage 3 every rank must use {' and '.join(dict.fromkeys(units))} equally often, in forward "
            "and in the loss: set zero_optimization.divergent_graphs to true, or call it on every rank (0 * "
            "its output is enough), put it into one unit with a module that every rank calls "
            "(zero_optimization.units), or train at stage 2; torch.utils.checkpoint needs use_reentrant=False "
            "where ranks leave parameters unused"
        )
    if blocked or len(waiting) > 1:
        return "Every rank must make the same calls of forward, backward and step, equally often"
    if silent:
        return (
            f"Look at the log of {ranks_text(silent)}: every rank must run the same number of steps, and reach "
            "each one within the timeout (XDS_TIMEOUT_SECONDS)"
        )
    return (
        "All ranks started the same collectives: one started later than another's timeout, or the network "
        "failed; raise XDS_TIMEOUT_SECONDS if a step may take so long"
    )


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
