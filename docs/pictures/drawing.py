"""A small SVG writer: boxes, text, lines and arrows in a fixed palette, for light and dark pages.

An SVG file cannot know the page around it, so each picture brings its own background. Its style follows the
reader's setting `prefers-color-scheme`. Numbers are rounded, so a picture has the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final
from xml.sax.saxutils import escape

SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
# Colours that carry meaning are the same on both backgrounds, and white text on them is legible.
FILLS = {"blue": "#2f6fde", "orange": "#c2571a", "green": "#18805a", "purple": "#8250df"}
# name: on a light page, on a dark one
PAPER = {
    "page": ("#ffffff", "#0d1117"),
    "empty": ("#e9edf1", "#232a33"),
    "grey": ("#aab4be", "#525c68"),
}
INK = {"text": ("#1f2328", "#e6edf3"), "muted": ("#57606a", "#a0aab4")}
FRAME = ("#d0d7de", "#30363d")
SMALLEST_TEXT = 12.5  # units of the viewBox, which is shown 700 pixels wide

Point = tuple[float, float]


@final
class Picture:
    """One picture. Lengths are in units of the viewBox; y grows downwards."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, "page", radius=8, framed=True)

    def box(  # noqa: PLR0913 (a rectangle has four numbers)
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        radius: float = 3,
        framed: bool = False,
        faint: bool = False,
    ) -> None:
        """A rectangle with its left upper corner at (x, y). fill: of `FILLS` or `PAPER`, or "none"."""
        names = fill + " framed" * framed + " faint" * faint
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect class="{names}" {place} rx="{_n(radius)}"/>')

    def text(  # noqa: PLR0913 (a text has a place and a style)
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        ink: str = "text",
        anchor: str = "start",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """One line of text. y: its base line. anchor: start, middle or end. ink: of `INK`, or "white"."""
        if size < SMALLEST_TEXT:
            raise ValueError(f"text of size {size} is not legible: {words}")
        names = f"{ink}-ink" + " bold" * bold + " code" * code
        at = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{names}" {at}>{escape(words)}</text>')

    def line(self, *points: Point, dashed: bool = False, arrow: bool = False) -> None:
        """A line through `points`."""
        names = "line" + " dashed" * dashed
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        end = ' marker-end="url(#head)"' if arrow else ""
        self._parts.append(f'<polyline class="{names}" points="{path}"{end}/>')

    def shape(self, points: Sequence[Point], fill: str) -> None:
        """A filled polygon with a frame."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polygon class="{fill} framed" points="{path}"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Squares with names in one row. entries: fill and name."""
        for fill, name in entries:
            self.box(x, y - 10, 12, 12, fill, radius=2)
            self.text(x + 18, y, name, size=13, ink="muted")
            x += 18 + 7.0 * len(name) + 22

    def svg(self) -> str:
        """The file."""
        width, height = map(_n, self._size)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<title>{escape(self._title)}</title>\n'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>\n'
        )
        return head + _style() + marker + "\n".join(self._parts) + "\n</svg>\n"


def _n(number: float) -> str:
    return f"{round(number, 2):g}"


def _style() -> str:
    def themed(side: int) -> list[str]:
        rules = [f".{name}{{fill:{pair[side]}}}" for name, pair in PAPER.items()]
        rules += [f".{name}-ink{{fill:{pair[side]}}}" for name, pair in INK.items()]
        muted = INK["muted"][side]
        rules += [f".framed{{stroke:{FRAME[side]}}}", f".line{{stroke:{muted}}}"]
        return [*rules, f".head{{fill:{muted}}}"]

    fixed = [
        f"text{{font-family:{SANS}}}",
        ".bold{font-weight:600}",
        f".code{{font-family:{MONO}}}",
        ".white-ink{fill:#fff}",
        ".none,.line{fill:none}",
        ".line{stroke-width:1.5}",
        ".dashed{stroke-dasharray:4 4}",
        ".faint{fill-opacity:.45}",
        *(f".{name}{{fill:{color}}}" for name, color in FILLS.items()),
    ]
    dark = "\n".join(themed(1))
    rules = "\n".join([*fixed, *themed(0)])
    return f"<style>\n{rules}\n@media (prefers-color-scheme:dark){{\n{dark}\n}}\n</style>\n"
