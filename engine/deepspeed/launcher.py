"""`deepspeed.launcher.runner`: what the `deepspeed` command does. `main` starts ranks with `xds`."""

from __future__ import annotations

import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points

from ...utils.errors import UsageError
from ...utils.small_files import read_small_text
from .accelerate import put_command_on_path
from .errors import raises_theirs
from .library.log import logger
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


# `accelerate launch` writes a file of this name, which `xds` reads
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]


def main(args: Sequence[str] | None = None) -> None:
    """Run `xds` with a command line of `deepspeed`; None is that of this process. Returns when all have ended.

    Without --launcher other hosts are reached by xds's own ssh, not by pdsh.

    Raises:
        SystemExit: the code of a run that failed, or of a wrong command line.
    """
    code = run_command(sys.argv[1:] if args is None else args)
    if code:
        sys.exit(code)


if is_active():
    put_command_on_path()  # `accelerate launch` imports this module before it runs the command


if __name__ == "__main__":
    main()
