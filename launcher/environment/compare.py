"""Compares the `xds env` output of several hosts: the common values, and those that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from ...utils.quoting import escaped
from .probes.line import Line

NOT_REPORTED = "(not reported)"
VERSIONS = ("xds", "python", "torch", "nccl")  # must be equal on all hosts
MAX_SKEW_SECONDS = 1.0
_MAX_NAMED = 8


@final
@dataclass(frozen=True)
class Difference:
    """A key whose value is not the same on all hosts. groups: (line, its hosts), the largest first."""

    key: str
    groups: tuple[tuple[Line, tuple[str, ...]], ...]

    def __str__(self) -> str:
        total = sum(len(hosts) for _, hosts in self.groups)
        first = self.groups[0][1]
        has_majority = len(first) * 2 > total
        parts = []
        for index, (line, hosts) in enumerate(self.groups):
            is_odd = index > 0 or not has_majority
            who = host_names(hosts) if is_odd else f"{len(hosts)} of {total} hosts"
            remedy = f" ({line.remedy})" if line.remedy else ""
            parts.append(
                f"{who}: {self.key} {escaped(line.value)}{remedy}" + "  <- differs" * is_odd
            )
        return "; ".join(parts)


@final
@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    common: lines that are equal on all hosts.
    warnings: (host, line) of lines with a remedy whose values always vary between hosts.
    skews: seconds by which a host's clock is ahead of this machine's, for hosts above the limit.
    """

    common: tuple[Line, ...]
    differences: tuple[Difference, ...]
    warnings: tuple[tuple[str, Line], ...]
    skews: Mapping[str, float]

    def is_one_version(self) -> bool:
        """Whether every host has the same xds, Python, torch and NCCL."""
        return not [difference for difference in self.differences if difference.key in VERSIONS]


def compare(answers: Mapping[str, tuple[Sequence[Line], float]]) -> Comparison:
    """Compare hosts by key. `answers`: for each host its lines, and this machine's time when they arrived."""
    by_host = {host: {line.key: line for line in lines} for host, (lines, _) in answers.items()}
    common, differences, warnings = [], [], []
    for key in _keys(list(by_host.values())):
        of_key = {host: lines.get(key, Line(key, NOT_REPORTED)) for host, lines in by_host.items()}
        if any(line.varies for line in of_key.values()):
            warnings += [(host, line) for host, line in of_key.items() if line.remedy]
            continue
        groups = _groups(of_key)
        if len(groups) == 1:
            common.append(groups[0][0])
        else:
            differences.append(Difference(key, groups))
    return Comparison(tuple(common), tuple(differences), tuple(warnings), _skews(answers))


def _keys(by_host: Sequence[Mapping[str, Line]]) -> Iterator[str]:
    """Every key once, in the order of the host with the most lines."""
    seen: dict[str, None] = {}
    for lines in sorted(by_host, key=len, reverse=True):
        seen.update(dict.fromkeys(lines))
    yield from seen


def _groups(of_key: Mapping[str, Line]) -> tuple[tuple[Line, tuple[str, ...]], ...]:
    """The hosts grouped by value, the largest group first; equal sizes in the order of their first host."""
    hosts: dict[str, list[str]] = {}
    lines: dict[str, Line] = {}
    for host, line in of_key.items():
        hosts.setdefault(line.value, []).append(host)
        known = lines.setdefault(line.value, line)
        if not known.remedy:
            lines[line.value] = line
    by_size = sorted(hosts, key=lambda value: -len(hosts[value]))
    return tuple((lines[value], tuple(hosts[value])) for value in by_size)


def _skews(answers: Mapping[str, tuple[Sequence[Line], float]]) -> dict[str, float]:
    found = {}
    for host, (lines, answered_at) in answers.items():
        clocks = [line.value for line in lines if line.key == "clock"]
        try:
            skew = float(clocks[-1]) - answered_at
        except (IndexError, ValueError):  # the host reported no clock
            continue
        if not abs(skew) <= MAX_SKEW_SECONDS:
            found[host] = skew
    return found


def host_names(hosts: Sequence[str]) -> str:
    """ "h1, h2": the first names, and the number of the others."""
    more = len(hosts) - _MAX_NAMED
    return ", ".join(hosts[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def report(
    compared: Comparison, unreached: Mapping[str, str], hosts: Sequence[str]
) -> Iterator[str]:
    """The lines to print: the common values once, then the differences, then the hosts without an answer."""
    num_answered = len(hosts) - len(unreached)
    if num_answered:
        answered = f"{num_answered} of {len(hosts)} hosts" if unreached else f"{len(hosts)} hosts"
        yield f"-- the same on {answered}: {host_names([h for h in hosts if h not in unreached])}"
        yield from map(str, compared.common)
    if compared.differences:
        yield "-- different"
        yield from map(str, compared.differences)
    if compared.warnings or compared.skews:
        yield "-- on single hosts"
        yield from (f"{host}: {line}" for host, line in compared.warnings)
        yield from (skew_text(host, skew) for host, skew in compared.skews.items())
    if unreached:
        yield "-- not reached"
        yield from (f"{host}: {why}" for host, why in unreached.items())


def skew_text(host: str, skew: float) -> str:
    """The difference between two clocks, with its remedy."""
    way = "ahead of" if skew > 0 else "behind"
    return (
        f"{host}: clock {abs(skew):.1f} s {way} this machine's  <- differs  -> start chrony or ntpd"
    )
