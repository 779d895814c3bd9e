"""`deepspeed.launcher.runner`: what the `deepspeed` command does. `main` starts ranks with `xds`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from ...utils.errors import UsageError
from .accelerate import put_command_on_path
from .stand_in import is_active

DLTS_HOSTFILE = "/job/hostfile"
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


# `accelerate launch` writes a file of this name, which `xds` reads
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_FORWARDED = ("MLFLOW", "PYTHON", "MV2", "UCX")
EXPORT_ENVS = list(_FORWARDED)  # scripts append to it


def main(args: Sequence[str] | None = None) -> None:
    """Run `xds` with a command line of `deepspeed`; None is that of this process. Returns when all have ended.

    Without --launcher other hosts are reached by xds's own ssh, not by pdsh.

    Raises:
        SystemExit: the code of a run that failed, or of a wrong command line.
    """
    added = sorted(set(EXPORT_ENVS) - set(_FORWARDED))
    if added:
        logging.getLogger("xds").warning(
            "EXPORT_ENVS: variables beginning with %s are not forwarded to other machines by this list; write "
            "them as KEY=value into .deepspeed_env",
            ", ".join(added),
        )
    code = run_command(sys.argv[1:] if args is None else args)
    if code:
        sys.exit(code)


if is_active():
    put_command_on_path()  # `accelerate launch` imports this module before it runs the command


if __name__ == "__main__":
    main()
