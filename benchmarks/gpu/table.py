"""The table that main.py prints: at most 60 lines, whatever has happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_LINES, WIDTH = 60, 200
WRONG_LINES = 3  # of the wrong cases of one part

Results = Mapping[str, Mapping[str, Any]]


def table(header: list[str], results: Results) -> list[str]:
    """header; how many cases of each part are right; the figures; and the end of what failed."""
    failed = {name: part for name, part in results.items() if part["state"] == "wrong"}
    absent = [name for name, part in results.items() if part["state"] == "not run"]
    note = [f"# NOT RUN: {'; '.join(absent)}"] if absent else []
    top, figures = [*header, *note, *_cases(results)], _figures(results)
    room = MOST_LINES - len(top) - len(figures)
    bottom = _failures(failed, max(room, min(2 * len(failed) + 1, 12)))
    cut = len(top) + len(figures) + len(bottom) - MOST_LINES
    if cut > 0:  # figures give way to what failed; they are in the JSON
        figures = [*figures[: -cut - 1], f"... {cut + 1} lines more are in the JSON"]
    return [line[:WIDTH].rstrip() for line in [*top, *figures, *bottom]]


def _cases(results: Results) -> list[str]:
    """One line for each part that has cases."""
    lines = []
    for name, part in results.items():
        cases = [each for each in part["records"] if "case" in each]
        if not cases:
            continue
        right = sum(each["ok"] for each in cases)
        distances = [each["distance"] for each in cases if each.get("distance") is not None]
        line = f"{name:<18}{right:>4} of {len(cases):>3} right{part.get('seconds', 0):>7.0f} s"
        lines.append(line + (f"   largest distance {max(distances):.1e}" if distances else ""))
    return ["", f"{'cases':<18}{'':>17}{'time':>9}", *lines] if lines else []


def _figures(results: Results) -> list[str]:
    """Records of the same table and row are cells of one line."""
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for part in results.values():
        for each in part["records"]:
            if "table" in each:
                row = cells.setdefault(each["table"], {}).setdefault(each["row"], {})
                row[each["column"]] = each["text"]
    lines = []
    for title, rows in cells.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        grid = [["", *columns], *([name, *map(row.get, columns)] for name, row in rows.items())]
        widths = [max(len(line[n] or "-") for line in grid) for n in range(len(columns) + 1)]
        lines += ["", title]
        for line in grid:
            first, *rest = (
                (cell or "-" * bool(n)).rjust(width) if n else (cell or "").ljust(width)
                for n, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            lines.append("   ".join([first, *rest]))
    return lines


def _failures(failed: Results, room: int) -> list[str]:
    """For each part that failed: why, its wrong cases, and its last lines, as many as there is room for."""
    if not failed:
        return []
    each_room = max(0, (room - 1) // len(failed) - 1)
    lines = [""]
    for name, part in failed.items():
        lines.append(f"WRONG {name}: {part['reason']}")
        wrong = [
            f"{r['case']}: {r['text']}" for r in part["records"] if "case" in r and not r["ok"]
        ]
        log, left = part.get("lines", []), each_room - len(wrong[:WRONG_LINES])
        if part["reason"].startswith("wrong") or left <= 0:
            log = []  # the cases say it
        log = log[:left] if "Fatal" in "".join(log[:1]) else log[-left:]
        lines += [f"    {line}" for line in [*wrong[:WRONG_LINES], *log][:each_room]]
    return lines[:room]
