"""Entry point of `xds env`: this machine, which needs no other part of the launcher, or several hosts."""

from __future__ import annotations

from collections.abc import Sequence

from ...utils.errors import UsageError
from . import this_machine


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or that of hosts.py."""
    if any(argument.startswith("-") and argument != "--json" for argument in argv):
        from .hosts import main as of_hosts

        return of_hosts(argv)
    if set(argv) - {"--json"}:
        raise UsageError(f"xds env = {' '.join(argv)}: takes options only; see `xds env --help`")
    return this_machine.show(as_one_line=bool(argv))
