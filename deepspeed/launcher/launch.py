"""`python -m deepspeed.launcher.launch`: starts the ranks of one host, with the `xds` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ...utils.errors import UsageError
from ..accelerator import get_accelerator
from ..constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from ..errors import raises_theirs
from ..missing import placeholder
from .command import run_command
from .resources import decode_world_info

_FLAGS = ("--module", "--no_python", "--no_local_rank", "--bind_cores_to_rank")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; None is that of this process."""
    parser = argparse.ArgumentParser(description="Start the ranks of one host.")
    parser.add_argument("--node_rank", type=int, default=0, help="the number of this host")
    parser.add_argument("--master_addr", default="127.0.0.1", help="the address of the first host")
    parser.add_argument("--master_port", type=int, default=TORCH_DISTRIBUTED_DEFAULT_PORT)
    parser.add_argument("--world_info", default="None", help="what encode_world_info returned")
    for name in _FLAGS:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--save_pid", type=int, default=0, help="no effect")
    parser.add_argument("--enable_each_rank_log", default="None", help="a folder")
    parser.add_argument("--bind_core_list", default=None, help="the cores to use, such as 0-3,8")
    parser.add_argument("--log_level", default="info")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


@raises_theirs
def main(args: Sequence[str] | None = None) -> None:
    """Start this host's ranks, and return when they have ended.

    Raises:
        UsageError: --world_info is missing, or --node_rank is not in it.
        SystemExit: the code of a run that failed.
    """
    options = parse_args(args)
    if options.world_info == "None":
        raise UsageError(
            "--world_info is missing: pass what deepspeed.launcher.runner.encode_world_info returns"
        )
    hosts = decode_world_info(options.world_info)
    if not 0 <= options.node_rank < len(hosts):
        raise UsageError(
            f"--node_rank {options.node_rank}: --world_info names {len(hosts)} hosts, from 0 on"
        )
    slots = list(hosts.values())[options.node_rank]
    if get_accelerator().device_name() == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    words = ["--nproc-per-node", str(len(slots)), "--master-port", str(options.master_port)]
    if len(hosts) > 1:
        words += ["--nnodes", str(len(hosts)), "--node-rank", str(options.node_rank)]
        words += ["--master-addr", options.master_addr]
    words += [flag for flag in _FLAGS if getattr(options, flag.removeprefix("--"))]
    if options.enable_each_rank_log != "None":
        words += ["--log-dir", options.enable_each_rank_log]
    if options.bind_core_list is not None:
        words += ["--bind-core-list", options.bind_core_list]
    if options.quiet:
        words.append("--quiet")
    code = run_command([*words, options.training_script, *options.training_script_args])
    if code:
        sys.exit(code)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


if __name__ == "__main__":
    main()
