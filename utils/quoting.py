"""Makes text from other sources (keys, names, paths, excerpts) safe to print in messages.

Characters that are not printable are escaped as Python does: ESC as \\x1b, a new line as \\n, half of a
surrogate pair as \\udc80. The marks that change the writing direction are escaped as well. So no such text can
control the reader's terminal. Long text is cut, so that the sentence around it stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_CHARS = 200


def printable(text: object, most_chars: int = MOST_CHARS) -> str:
    """The text escaped, in one line of at most `most_chars` characters."""
    line = escaped(str(text)[: most_chars + 1])
    return line if len(line) <= most_chars else f"{line[: most_chars - 3]}..."


def quoted(text: object, most_chars: int = MOST_CHARS) -> str:
    """The same in quotes, as `repr` writes it."""
    found = repr(str(text)[: most_chars + 1])
    return found if len(found) <= most_chars else f"{found[: most_chars - 3]}..."


def plain_lines(text: str) -> str:
    """The text of any length with each of its lines escaped."""
    return text if text.isprintable() else "\n".join(map(escaped, text.split("\n")))


def escaped(text: str) -> str:
    """The text in one line of any length, with characters that are not printable escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """For example "rank 3", "ranks 0, 2, 8-15": in ascending order, whatever the order of `ranks`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"ranks {', '.join(parts)}"
