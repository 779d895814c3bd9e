"""The command line of `deepspeed`, with DeepSpeed's names and defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from .constants import PDSH_LAUNCHER

HOSTFILE = "/job/hostfile"
LEVELS = ("debug", "info", "warning", "error", "critical")

_FLAGS = {
    "--module": "the script is the name of a module, as for python -m",
    "--no_python": "the script is a program of any kind",
    "--no_local_rank": "no effect: ranks read LOCAL_RANK",
    "--no_ssh": "the command is started on every host, each with its --node_rank",
    "--no_ssh_check": "no effect: a host that cannot be reached is reported in any case",
    "--force_multi": "use the launcher even for one host",
    "--save_pid": "write the process id to a file in the temporary folder",
    "--bind_cores_to_rank": "give each rank cores of its own",
}
_VALUES: dict[str, tuple[type, Any, str]] = {
    "--num_nodes": (int, -1, "the first N hosts"),
    "--master_port": (int, TORCH_DISTRIBUTED_DEFAULT_PORT, "the port of the rendezvous"),
    "--master_addr": (str, "", "the address of the first host"),
    "--node_rank": (int, -1, "the number of this host, with --no_ssh"),
    "--launcher": (str, PDSH_LAUNCHER, "how other hosts are reached"),
    "--launcher_args": (str, "", "more arguments for the launcher, in one string"),
    "--enable_each_rank_log": (str, "None", "a folder for the output of each rank"),
    "--bind_core_list": (str, None, "the cores to use, such as 0-3,8"),
    "--ssh_port": (int, None, "the port of sshd on the hosts"),
    "--venv_script": (str, None, "a script to source first on each host"),
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line of `deepspeed`; None is that of this process. Exits on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="Start a script on every device."
    )
    parser.add_argument(
        "-H", "--hostfile", default=HOSTFILE, help="lines such as: worker-0 slots=4"
    )
    filters = (("-i", "--include", "only these"), ("-e", "--exclude", "all but these"))
    for short, long, what in filters:
        parser.add_argument(short, long, default="", help=f"{what}: host[:slot,slot][@host...]")
    gpus = ("--num_gpus", "--num_accelerators")
    parser.add_argument(*gpus, type=int, default=-1, help="ranks on each host")
    for name, (kind, default, text) in _VALUES.items():
        parser.add_argument(name, type=kind, default=default, help=text)
    for name, text in _FLAGS.items():
        parser.add_argument(name, action="store_true", help=text)
    parser.add_argument("--autotuning", default="", choices=("tune", "run"), help="not supported")
    parser.add_argument("--log_level", default="info", choices=LEVELS, help="what is logged")
    parser.add_argument("-q", "--quiet", action="store_true", help="log errors only")
    parser.add_argument("user_script", help="the script, followed by its arguments")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


__all__ = ["HOSTFILE", "parse_args"]
