"""`xds --launcher slurm --num-nodes 4` outside of an allocation: one srun requests machines and runs xds there.

Only the started processes know which machines these are, so no orders can be made here. srun starts the same
command on each machine, without the options about hosts. The variables of the Slurm step define the rendezvous.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from ...utils.sealing import RUN_KEY, new_key
from ..remote.backends import Slurm
from .option_table import OPTIONS
from .options import ParsedArgs
from .where import DEFAULT_HOSTFILE, found_hostfile, remote

# options that are handled here, and not repeated on each machine
_HANDLED_HERE = frozenset(
    {
        *("launcher", "launcher_args", "num_nodes", "venv_script"),
        *("quiet", "save_pid", "ssh_port", "master_addr", "master_port"),
    }
)
_RENDEZVOUS_OPTIONS = ("master_addr", "master_port")


def is_asked_for(
    args: ParsedArgs, environ: Mapping[str, str], hostfile: str = DEFAULT_HOSTFILE
) -> bool:
    """Whether Slurm chooses the machines: it is the launcher, without named hosts or an allocation."""
    names_hosts = args.has("hostfile", "include", "exclude", "force_multi", "no_ssh")
    is_slurm = args.text("launcher").lower() == "slurm"
    is_inside = "SLURM_JOB_ID" in environ
    return is_slurm and not (names_hosts or is_inside or found_hostfile(hostfile))


def run(args: ParsedArgs, environ: Mapping[str, str]) -> int:
    """Replace this process by srun, so that it gets the signals and sets the exit code.

    Raises:
        UsageError: srun or the number of machines is missing.
    """
    slurm, remote_settings = Slurm(), remote(args, environ)
    # given as options here, passed as variables to xds in the step
    rendezvous = {name.upper(): args.text(name) for name in _RENDEZVOUS_OPTIONS if args.has(name)}
    remote_settings = replace(
        remote_settings, environment={**remote_settings.environment, **rendezvous}
    )
    command = slurm.own_allocation(
        args.number("num_nodes", 0, least=1),
        remote_settings,
        _step_argv(args, remote_settings.python),
    )
    more = slurm.environment(remote_settings)
    slurm.check()
    sys.stdout.flush()
    key = {RUN_KEY: environ.get(RUN_KEY) or new_key()}
    os.execvpe(command[0], command, {**environ, **more, **key})


def _step_argv(args: ParsedArgs, python: str) -> list[str]:
    # only for the interpreter of xds, not for the ranks: the folder must not hide standard modules
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    argv = ["env", "-u", "PYTHONSAFEPATH", python, *safe, "-m", "xds.launcher.cli"]
    for option in OPTIONS:
        if option.key in args.given and option.key not in _HANDLED_HERE:
            value = args.given[option.key]
            argv.append(f"{option.name}={value}" if option.value else option.name)
    return [*argv, "--", *args.command]
