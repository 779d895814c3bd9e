"""`deepspeed.launcher.runner`: what the `deepspeed` command does. `main` starts ranks with `xds`."""

from __future__ import annotations

import argparse
import os
import subprocess as subprocess  # scripts and tests replace parts of it here
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...utils.errors import UsageError
from ...utils.trust import is_found
from ..accelerator import get_accelerator
from ..errors import raises_theirs
from ..missing import placeholder
from .arguments import HOSTFILE as DLTS_HOSTFILE
from .arguments import parse_args
from .command import run_command
from .constants import PDSH_MAX_FAN_OUT
from .on_path import put_command_on_path
from .resources import (
    apply_num_nodes_and_gpus,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_resource_filter,
)
from .resources import parse_hostfile as _parse_hostfile

# `accelerate launch` writes a file of this name, which `xds` reads
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]


@raises_theirs
def main(args: Sequence[str] | None = None) -> None:
    """Start the ranks of a command line of `deepspeed`; None is that of this process. Returns when all ended.

    Without --launcher other hosts are reached by xds's own ssh, not by pdsh.

    Raises:
        UsageError: the options contradict each other, or name an unknown host or slot.
        SystemExit: the code of a run that failed.
    """
    words = list(sys.argv[1:] if args is None else args)
    options = parse_args(words)
    pool: Mapping[str, int] | None = None
    if _may_read(options.hostfile, words):
        pool = fetch_hostfile(options.hostfile)
    if not pool:
        words = _with_visible_devices(options) + words
    _check(options, pool)
    if not pool:
        pool = {"localhost": get_accelerator().device_count()}
    code = run_command(words)
    if code:
        sys.exit(code)


def _may_read(hostfile: str, words: Sequence[str]) -> bool:
    """The hostfile is named, or is the default one and no other user may change it, or does not exist."""
    is_named = any(word.startswith("-H") or word.startswith("--hostfile") for word in words)
    return is_named or not os.path.exists(hostfile) or is_found(hostfile, f"--hostfile {hostfile}")


def _with_visible_devices(options: argparse.Namespace) -> list[str]:
    """Words that select the devices of CUDA_VISIBLE_DEVICES, which is removed: they are numbered once."""
    name = get_accelerator().visible_devices_envs()[0]
    visible = os.environ.pop(name, "")
    if not visible:
        return []
    if options.include or options.exclude or options.num_nodes > 1 or options.num_gpus > 0:
        print(
            f"{name} = {visible} has no effect beside --include, --exclude, --num_gpus and --num_nodes"
        )
        return []
    options.include = f"localhost:{visible}"
    print(f"{name} = {visible}: --include {options.include}")
    return ["--include", options.include]


def _check(options: argparse.Namespace, pool: Mapping[str, int] | None) -> None:
    if (options.num_nodes >= 0 or options.num_gpus >= 0) and (options.include or options.exclude):
        raise UsageError(
            "--num_nodes and --num_gpus cannot be combined with --include and --exclude; leave one kind out"
        )
    if not pool and options.num_nodes > 1:
        raise UsageError(
            f"--num_nodes {options.num_nodes}: needs a hostfile that names the hosts; pass --hostfile"
        )
    if options.autotuning:
        raise UsageError(
            f"--autotuning {options.autotuning}: xds does not search for a config; `xds plan` prints the "
            "memory that one needs"
        )


put_command_on_path()  # `accelerate launch` imports this module before it runs the command


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "PDSH_MAX_FAN_OUT",
    "_parse_hostfile",
    "apply_num_nodes_and_gpus",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
]

if __name__ == "__main__":
    main()
