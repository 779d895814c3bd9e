"""One line of the output of `xds env`, and functions that run other programs for their output."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import final

from ....utils.quoting import escaped

GIB = 2**30
_PROGRAM_SECONDS = 10.0


@final
@dataclass(frozen=True)
class Line:
    """A value of this machine; `remedy` describes what to do if it is bad.

    varies: the value differs even between equal machines (a name, an address, free memory).
    """

    key: str
    value: str
    remedy: str = ""
    varies: bool = False

    def __str__(self) -> str:
        text = f"{self.key}: {self.value}" + (f"  -> {self.remedy}" if self.remedy else "")
        return escaped(text)


def output(*command: str) -> str:
    """The standard output of a program; empty if the program is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROGRAM_SECONDS,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def first_output(*command: str) -> str:
    """The first line of a program's standard output."""
    return output(*command).partition("\n")[0].strip()


def gib(num_bytes: int) -> str:
    """ "1.5 GiB"."""
    return f"{num_bytes / GIB:.1f} GiB"
