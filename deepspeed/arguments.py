"""`add_config_arguments`: the command-line options of a DeepSpeed script."""

from __future__ import annotations

import argparse
import os


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to `parser`, and set this process's local rank.

    DeepSpeed's launcher appends `--local_rank=N` to the command line; `xds` and torchrun set LOCAL_RANK in
    the environment. So `args.local_rank` is LOCAL_RANK, whether the script declared the option before this
    call (then its default is replaced) or not at all. Without a launcher it is not changed.
    """
    group = parser.add_argument_group("DeepSpeed", "read by xds.deepspeed.initialize(args=...)")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script itself; the engine ignores it"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON config")
    for old in ("--deepscale", "--deepscale_config"):
        group.add_argument(old, nargs="?", const=True, default=None, help=argparse.SUPPRESS)
    if "LOCAL_RANK" in os.environ:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser


__all__ = ["add_config_arguments"]
