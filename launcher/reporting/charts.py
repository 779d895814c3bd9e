"""Charts as SVG text: curves and a timeline. Colours are CSS classes of the page. All text is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from ...utils.quoting import plain_lines
from .records import RankTimeline, Timeline

POINTS = 300  # of a curve
MOST_RECTANGLES = 1500  # of a timeline
MOST_CHARS = 12_000  # of a text
WIDTH, HEIGHT = 480, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 8, 22
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
KINDS = {  # the classes of colours in a timeline
    "forward": "a",
    "backward": "b",
    "step": "c",
    "reduce": "d",
    "evaluation": "e",
    "gradients of weights": "f",
}


def shown(text: object, most_chars: int = MOST_CHARS) -> str:
    """A text for HTML: characters with a meaning there, and those that do not print, are escaped."""
    line = text if isinstance(text, str) else json.dumps(text)
    cut = plain_lines(line[: most_chars + 1])
    return escape(cut if len(cut) <= most_chars else f"{cut[:most_chars]}...")


def number_text(value: float) -> str:
    """ "1.24M" of 1240000, "0.00312" of 0.003123; three digits."""
    if not math.isfinite(value):
        return str(value)
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


@final
@dataclass
class Curve:
    """At most `POINTS` points: mean, least and largest of neighbouring values. not_finite: values left out."""

    xs: list[float]
    means: list[float]
    least: list[float]
    most: list[float]
    not_finite: int = 0


def curve(xs: Sequence[float], ys: Sequence[float]) -> Curve:
    """The curve of any number of points."""
    found = Curve([], [], [], [])
    count = len(ys)
    buckets = min(POINTS, count)
    for number in range(buckets):
        start, stop = number * count // buckets, (number + 1) * count // buckets
        part = ys[start:stop]
        total = sum(part)
        if not math.isfinite(total):
            part = [y for y in part if math.isfinite(y)]
            found.not_finite += stop - start - len(part)
            total = math.fsum(part) if part else math.nan
        if part and math.isfinite(total / len(part)):
            found.xs.append(xs[stop - 1])
            found.means.append(total / len(part))
            found.least.append(min(part))
            found.most.append(max(part))
    return found


def chart(
    title: str, curves: Sequence[tuple[str, Curve]], *, starts_at_0: bool = False, note: str = ""
) -> str:
    """A figure with curves over the steps, the first one with the range of its values. "" without points."""
    drawn = [(name, each) for name, each in curves if each.xs]
    if not drawn:
        return ""
    first = drawn[0][1]
    # extremes of few points leave the band where they are no part of the means
    rare = len(first.xs) // 20
    inside = [sorted(first.least)[rare], sorted(first.most)[-1 - rare]]
    inside += [y for _, each in drawn for y in each.means]
    low, high = _range(inside, starts_at_0=starts_at_0)
    end = max(each.xs[-1] for _, each in drawn)
    begin = min(each.xs[0] for _, each in drawn)
    across = (end - begin) or 1.0

    def x_of(x: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (x - begin) / across

    def y_of(y: float) -> float:
        part = min(max((y - low) / (high - low), 0.0), 1.0)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * part

    parts = [_axes(begin, end, low, high)]
    if len(first.xs) > 1 and first.least != first.most:
        edge = [*zip(first.xs, first.most, strict=True)]
        edge += reversed([*zip(first.xs, first.least, strict=True)])
        outline = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in edge)
        parts.append(f'<polygon class="band" points="{outline}"/>')
    for number, (_, each) in enumerate(drawn):
        kind = "abcde"[number % 5]
        points = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(each.xs, each.means, strict=True)]
        parts.append(f'<polyline class="line {kind}" points="{" ".join(points)}"/>')
        if len(points) <= 40:
            parts += [
                '<circle class="{}" cx="{}" cy="{}" r="2.5"/>'.format(f"fill {kind}", *p.split(","))
                for p in points
            ]
    names = [
        f'<span class="key {"abcde"[number % 5]}">{shown(name, 60)} '
        f"<b>{number_text(each.means[-1])}</b></span>"
        for number, (name, each) in enumerate(drawn)
    ]
    lost = sum(each.not_finite for _, each in drawn)
    names += [f'<span class="bad">not finite: {lost}</span>'] if lost else []
    names += [f"<span>{shown(note)}</span>"] if note else []
    label = shown(f"{title[:80]}, over the steps")
    return (
        f"<figure><figcaption>{shown(title, 80)} {''.join(names)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg></figure>'
    )


def _range(values: Sequence[float], *, starts_at_0: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if starts_at_0:
        low = min(low, 0.0)
    room = (high - low) / 20 or abs(high) / 20 or 1.0
    if not math.isfinite(room):  # hostile values: their distance is no number
        return -1.0, 1.0
    return low if starts_at_0 else low - room, high + room


def _axes(begin: float, end: float, low: float, high: float) -> str:
    parts = []
    for value in _ticks(low, high, 4):
        y = HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{number_text(value)}</text>'
        )
    across = (end - begin) or 1.0
    for value in _ticks(begin, end, 5):
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - begin) / across
        if value == int(value):
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{number_text(value)}</text>'
            )
    return "".join(parts)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two others, about `count`."""
    step = (high - low) / count
    if not (step > 0 and math.isfinite(step)):
        return [low]
    power = 10.0 ** math.floor(math.log10(step))
    width = next((m * power for m in (1, 2, 5) if m * power >= step), 10 * power)
    first = math.ceil(low / width)
    return [(first + n) * width for n in range(count + 2) if (first + n) * width <= high]


def timeline(found: Timeline) -> str:
    """A row for each rank, with its forwards, backwards and update in time."""
    total = max(each.milliseconds for each in found.ranks)
    spans = sum(len(each.spans) for each in found.ranks)
    if not (0 < total < math.inf) or not spans:
        return ""
    ranks = found.ranks[: max(1, MOST_RECTANGLES * len(found.ranks) // max(spans, MOST_RECTANGLES))]
    width, row, left = 2 * WIDTH, 22, 130
    scale = (width - left - 30) / total
    parts, left_over = [], MOST_RECTANGLES
    for number, each in enumerate(ranks):
        y = number * row
        parts.append(f'<text x="0" y="{y + 15}">{place_text(number, ranks)}</text>')
        for span in sorted(each.spans, key=lambda span: span.start)[:left_over]:
            start, end = (min(max(at, 0.0), total) for at in (span.start, span.end))
            name = "gradients of weights" if "W" in span.label else span.name
            kind = KINDS.get(name, "e")
            text = shown(f"{name[:40]} {span.label[:20]}: {start:.2f} to {end:.2f} ms", 100)
            parts.append(
                f'<rect class="fill {kind}" x="{left + scale * start:.1f}" y="{y + 3}" rx="1.5" '
                f'width="{max(scale * (end - start), 0.5):.1f}" height="{row - 6}">'
                f"<title>{text}</title></rect>"
            )
        left_over -= min(left_over, len(each.spans))
    height = row * len(ranks)
    for value in _ticks(0.0, total, 8):
        x = left + scale * value
        parts.append(
            f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle">{number_text(value)} ms</text>'
        )
    return f'<svg viewBox="0 0 {width} {height + 22}" role="img" aria-label="timeline">{"".join(parts)}</svg>'


def place_text(rank: int, ranks: Sequence[RankTimeline]) -> str:
    """ "rank 3: stage 1, data 0", with the axes on which ranks differ."""
    columns = zip(*(each.place for each in ranks), strict=False)
    names = zip(("stage", "data", "sequence", "tensor"), columns, strict=False)
    axes = [f"{name} {numbers[rank]}" for name, numbers in names if len({*numbers}) > 1]
    return shown(": ".join(filter(None, (f"rank {rank}", ", ".join(axes)))), 60)


__all__ = ["KINDS", "Curve", "chart", "curve", "number_text", "place_text", "shown", "timeline"]
