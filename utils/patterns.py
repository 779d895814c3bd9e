"""Matches names against regular expressions that a config gives, in bounded time.

A regular expression can need more steps than the machine makes in a year: each repeat that a name may end in
several ways multiplies them. Python's matching cannot be interrupted in a thread, so an expression that could
be slow runs in a process of its own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

MOST_CHARS = 1000
MOST_SECONDS = 10.0  # the process starts within 0.05 s; a machine may be busy
_CHOICES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[*+?{|]", re.DOTALL)
_GROUP_REPEATS = re.compile(r"\)[*+?{]")
_MATCH = (  # how = "match" or "search"
    "import json, re, sys; how, text, flags, names = json.load(sys.stdin); "
    "find = getattr(re.compile(text, flags), how); print(json.dumps([find(n) is not None for n in names]))"
)


def check_expression(text: str) -> None:
    """Raises ValueError, which completes "TEXT ...", if this is no regular expression, or too long."""
    if len(text) > MOST_CHARS:
        raise ValueError(f"has {len(text)} characters; write at most {MOST_CHARS}")
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"must be a regular expression: {error}") from None


def matching(
    text: str, names: Sequence[str], *, anywhere: bool = False, flags: int = 0
) -> list[bool]:
    """Whether the expression, which `check_expression` accepts, matches the beginning of each name.

    anywhere: or any other part of the name.

    Raises:
        ValueError: it takes longer than `MOST_SECONDS`. The message completes "TEXT ...".
    """
    how = "search" if anywhere else "match"
    if not _may_be_slow(text):
        find = getattr(re.compile(text, flags), how)
        return [find(name) is not None for name in names]
    import subprocess  # late: `xds check` reads expressions and matches none

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([how, text, int(flags), list(names)]),
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"needs more than {MOST_SECONDS:.0f} s for {len(names)} names; write one with fewer repeats"
        ) from None
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"could not be matched in a process of its own: {error}") from None
    found: list[bool] = json.loads(done.stdout)
    return found


def _may_be_slow(text: str) -> bool:
    """Not with up to two repeats or alternatives, no group of which repeats: the cube of a name's length."""
    choices = sum(found[0] in "*+?{|" for found in _CHOICES.finditer(text))
    return choices > 2 or _GROUP_REPEATS.search(text) is not None


__all__ = ["check_expression", "matching"]
