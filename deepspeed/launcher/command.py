"""Runs the `xds` command, as it is installed, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from ...utils.errors import UsageError

COMMAND = "xds"


def run_command(arguments: Sequence[str]) -> int:
    """Run `xds arguments...`. Returns its exit code.

    Raises:
        UsageError: xds is on the path, but not installed.
    """
    # the layer and the command are on one floor and do not import each other, so it is found by its name
    found = [one for one in entry_points(group="console_scripts", name=COMMAND)]
    if not found:
        raise UsageError(
            f"the command {COMMAND} is not installed: run `pip install -e .` in its checkout"
        )
    code: int = found[0].load()(list(arguments))
    return code


__all__ = ["run_command"]
