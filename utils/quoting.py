"""Text of others in our messages: keys, names, paths, excerpts. None of it may steer the reader's terminal.

A character that is no letter, digit, sign or plain space is written as Python would escape it: ESC as \\x1b, a
new line as \\n, half of a surrogate pair as \\udc80. So are the marks that turn the direction of writing.
What is long is cut, so that the sentence around it is still seen.
"""

from __future__ import annotations

MOST_CHARS = 200


def printable(text: object, most_chars: int = MOST_CHARS) -> str:
    """The text in one line of at most so many characters, each of them shown."""
    found = str(text)
    told = escaped(found[: most_chars + 1])
    return told if len(told) <= most_chars else f"{told[: most_chars - 3]}..."


def quoted(text: object, most_chars: int = MOST_CHARS) -> str:
    """The same in quotes, as Python writes it."""
    found = repr(str(text)[: most_chars + 1])
    return found if len(found) <= most_chars else f"{found[: most_chars - 3]}..."


def plain_lines(text: str) -> str:
    """The text with all its lines, of any length, and nothing in them but what is shown."""
    return text if text.isprintable() else "\n".join(map(escaped, text.split("\n")))


def escaped(text: str) -> str:
    """The text in one line of any length, each character shown."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
