"""The page of a search: bytes against tokens/s of all layouts, the chosen one, and the parts of its step."""

from __future__ import annotations

import json

from ...engine.planning.machine import Machine
from ...engine.planning.search import Found, Row
from ...engine.planning.seconds import PARTS
from ...utils.sizes import size_text
from ..reporting.charts import number_text, shown
from ..reporting.page import STYLE
from .text import HEAD, gives_up, row_cells

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 360, 64, 34


def page_of(found: Found, best: Row, machine: Machine) -> str:
    """The HTML."""
    title = shown(f"{best.plan.name} on {best.plan.mesh.size:,} ranks", 120)
    rows = "".join(
        "<tr>" + "".join(f"<td>{shown(cell, 200)}" for cell in row_cells(row))
        for row in found.fastest
    )
    head = "".join(f"<th>{name}" for name in HEAD)
    price = ", ".join(gives_up(best)) or "nothing"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none';style-src 'unsafe-inline'\">",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>",
        f"<p>{shown(machine.name, 120)}. {found.num_points:,} layouts, {len(found.tried):,} planned.",
        f"<h2>Bytes and speed</h2><figure>{_scatter(found, best)}<figcaption><span class='key a'>fits</span>"
        "<span class='key e'>does not fit</span><span class='key b'>chosen</span></figcaption></figure>",
        f"<h2>A step of the chosen layout: {best.seconds.total:.4g} s</h2>{_parts(best)}",
        f"<p>{shown(best.seconds.bound, 300)}<p>It gives up: {shown(price, 300)}",
        f"<h2>The best layouts</h2><table><tr>{head}</tr>{rows}</table>",
        f"<h2>Config</h2><pre>{shown(json.dumps(best.source, indent=2))}</pre>",
    ]
    return "\n".join([*parts, "</html>", ""])


def _scatter(found: Found, best: Row) -> str:
    """A mark for each planned layout: bytes of a device to the right, tokens/s upwards."""
    most_bytes = max([found.limit_bytes * 1.25, best.device_bytes])
    most_speed = 1.1 * max(speed for _, speed, _ in found.tried)

    def place(size: float, speed: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 10) * min(size / most_bytes, 1.0)
        return round(x, 1), round((HEIGHT - BOTTOM) * (1 - speed / most_speed), 1)

    marks = []
    for size, speed, name in found.tried:
        x, y = place(size, speed)
        kind = "a" if speed and size <= found.limit_bytes else "e"
        text = shown(f"{name}: {size_text(size)}, {number_text(speed)} tokens/s", 120)
        marks.append(
            f'<g class={kind}><circle class=fill cx="{x}" cy="{y}" r="3.5"><title>{text}</title></circle></g>'
        )
    x, y = place(best.device_bytes, best.seconds.tokens_per_second)
    marks.append(f'<g class=b><circle class=fill cx="{x}" cy="{y}" r="7"/></g>')
    edge, base = place(found.limit_bytes, 0.0)
    axes = (
        f'<line class=grid x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}"/>'
        f'<line class=grid x1="{edge}" y1="0" x2="{edge}" y2="{base}"/>'
        f'<text x="{edge - 4}" y="12" text-anchor="end">a device: {size_text(found.limit_bytes)}</text>'
        f'<text x="4" y="12">{number_text(most_speed)} tokens/s</text>'
        f'<text x="{LEFT}" y="{base + 16}">0</text>'
        f'<text x="{WIDTH - 10}" y="{base + 16}" text-anchor="end">{size_text(int(most_bytes))}, or more</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{axes}{"".join(marks)}</svg>'


def _parts(best: Row) -> str:
    """The parts of the step, as bars."""
    rows = [
        f'<tr><th>{part}<td class=wide><meter max="1" value="{seconds / best.seconds.total:.4f}"></meter>'
        f"<td>{seconds:.4g} s<td>{seconds / best.seconds.total:.1%}"
        for part in PARTS
        if (seconds := best.seconds.parts.get(part, 0.0)) > 0
    ]
    return f"<table>{''.join(rows)}</table>"


__all__ = ["page_of"]
