"""Parses and formats sizes in bytes such as 5GB, 500MB and 2GiB."""

from __future__ import annotations

import re

from .errors import UsageError

PREFIXES = ("", "K", "M", "G", "T")
SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)(i?)B?", re.ASCII)


def parse_bytes(name: str, text: str) -> int:
    """The number of bytes of "5GB" (units of 10^9), "5GiB" (units of 2^30) or a plain number.

    Raises:
        UsageError: `text` is not a size. The message names the setting, `name`.
    """
    match = SIZE.fullmatch(text.strip())
    size = 0
    if match is not None:
        power = PREFIXES.index(match[2])
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size < 1:
        raise UsageError(f"{name} = {text}: must be a size such as 5GB, 500MB or 2GiB")
    return size


def size_text(size_bytes: int) -> str:
    """ "1.50 GB" of 1500000000."""
    for power in (4, 3, 2, 1):
        if size_bytes >= 1000**power:
            return f"{size_bytes / 1000**power:.2f} {PREFIXES[power]}B"
    return f"{size_bytes} bytes"
