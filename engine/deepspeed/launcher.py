"""`deepspeed.launcher.runner`: what the `deepspeed` command does. `main` starts ranks with `xds`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from ...utils.errors import UsageError
from ...utils.small_files import read_small_text
from ...utils.trust import is_found
from .accelerate import put_command_on_path
from .constants import PDSH_LAUNCHER, TORCH_DISTRIBUTED_DEFAULT_PORT
from .errors import raises_theirs
from .library.accelerator import get_accelerator
from .library.log import logger
from .stand_in import is_active

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


Slots = dict[str, list[int]]


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """The slots of each host of a hostfile, in its order; None where there is no such file.

    Raises:
        UsageError: a line is wrong.
    """
    if not os.path.isfile(hostfile_path):
        logger.warning("hostfile = %s: no such file; ranks run on this machine only", hostfile_path)
        return None
    return parse_hostfile(read_small_text(hostfile_path).splitlines())


@raises_theirs
def parse_hostfile(lines: Iterable[str]) -> dict[str, int]:
    """The same of lines such as "worker-1 slots=8". Text after # is a comment."""
    found: dict[str, int] = OrderedDict()
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=(\d+)", text)
        if match is None:
            raise UsageError(f"hostfile: {text!r}: needs a line such as `worker-1 slots=8`")
        if match[1] in found:
            raise UsageError(
                f"hostfile: {match[1]} is in two lines; name each host once, with all of its slots"
            )
        found[match[1]] = int(match[2])
    if not found:
        raise UsageError(
            "hostfile: no host in it; write a line such as `worker-1 slots=8` for each"
        )
    return found


@raises_theirs
def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """(host, slots) of "host:0,2"; no slots for "host"."""
    parts = node_config.split(":")
    numbers = parts[1].split(",") if len(parts) == 2 else []
    if len(parts) > 2 or not all(one.strip().isdecimal() for one in numbers):
        raise UsageError(
            f"include or exclude: {node_config!r}: needs host, or host:slot,slot with numbers"
        )
    return parts[0], [int(number) for number in numbers]


def parse_node_config_list(node_config_list: str) -> Slots:
    """The slots of each host in "host@host:0,2", ascending. One that is named twice has the slots of both."""
    found: dict[str, set[int]] = {}
    for one in node_config_list.split("@"):
        host, slots = parse_node_config(one)
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


@raises_theirs
def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Slots:
    """The hosts and slots that `include_str` names, or all but those of `exclude_str`, in the order given.

    Args:
        host_info: all slots of each host.
        include_str, exclude_str: "worker-0@worker-1:0,2"; a host without slots means all of its slots.
    Raises:
        UsageError: both are given, or one names an unknown host or slot.
    """
    if include_str and exclude_str:
        raise UsageError("include and exclude are mutually exclusive: leave one of them out")
    if not include_str and not exclude_str:
        return {host: list(slots) for host, slots in host_info.items()}
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        _check_known(host, slots, host_info)
    found: Slots = OrderedDict()
    for host, every in host_info.items():
        chosen = (named[host] or list(every)) if host in named else []
        kept = chosen if include_str else [slot for slot in every if slot not in chosen]
        if kept:
            found[host] = kept
    return found


def _check_known(host: str, slots: Sequence[int], host_info: Mapping[str, Sequence[int]]) -> None:
    if host not in host_info:
        raise UsageError(
            f"Hostname '{host}' not found in hostfile; it has {', '.join(host_info) or 'no host'}"
        )
    for slot in slots:
        if slot not in host_info[host]:
            raise UsageError(
                f"No slot '{slot}' specified on host '{host}'; it has {list(host_info[host])}"
            )


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Slots:
    """`parse_resource_filter` for numbers of slots."""
    every = {host: list(range(number)) for host, number in resource_pool.items()}
    return parse_resource_filter(every, inclusion, exclusion)


DLTS_HOSTFILE = HOSTFILE

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
    name = "CUDA_VISIBLE_DEVICES"
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


if is_active():
    put_command_on_path()  # `accelerate launch` imports this module before it runs the command


if __name__ == "__main__":
    main()
