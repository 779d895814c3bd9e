"""`xds bench`: benchmarks of the machine or the cluster, independent of any model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..utils.errors import UsageError

_USAGE = """\
usage: xds bench comm [options]   time every collective, against the speed of the link itself
"""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return its exit code."""
    name = argv[0] if argv else ""
    if name == "comm":
        from .comm_bench.start import main as comm

        return comm(argv[1:])
    if name in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if not name:
        print(_USAGE, end="", file=sys.stderr)
        return 2
    raise UsageError(f"xds bench {name}: no such benchmark; the only one is comm")
