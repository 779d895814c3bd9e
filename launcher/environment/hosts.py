"""`xds env --hostfile`: runs `xds env` on all hosts in parallel over ssh and compares the results."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, final

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ..remote.fan_out import Answer, fan_out
from . import this_machine
from .compare import Comparison, compare, report
from .probes.line import Line

if TYPE_CHECKING:
    from ..command_line.where import Hosts

DONE, DIFFERENT, INTERRUPTED = 0, 1, 130
_MODULE = "xds.launcher.cli"
_ARGUMENTS = ("env", "--json")
_TIMEOUT_SECONDS = 120.0
_MAX_ERROR_LINES = 5

_EPILOG = """\
All other options are those of the launcher, with the same meaning as for a run (`xds --help`): --hostfile
queries all of its hosts in parallel, --include, --exclude and --num-nodes select some of them, and
--ssh-port, --launcher-args, --venv-script and --python define how they are reached. The exit code is 1 if a
host does not answer, or if the versions of xds, Python, torch or NCCL differ between hosts."""


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"xds env: {message}; see `xds env --help`")


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 if a host did not answer or versions differ, or 130 after Ctrl-C."""
    args, launcher_args = _parser().parse_known_args(list(argv))
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout = {args.timeout:g}: must be a number of seconds above 0")
    hosts = _hosts(launcher_args)
    if hosts is None:
        return this_machine.show(as_one_line=args.json)
    commands = _commands(hosts)
    try:
        reports, unreached = _read(fan_out(commands, args.timeout))
    except KeyboardInterrupt:  # all started commands have been killed
        return INTERRUPTED
    _check_slots(hosts, reports)
    compared = compare(reports)
    if args.json:
        print(as_json(reports, unreached, compared))
    else:
        for line in report(compared, unreached, list(commands)):
            print(line)
    return DIFFERENT if unreached or not compared.is_one_version() else DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="xds env",
        description="Print versions, devices and limits of this machine, or of all hosts of a hostfile.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"time limit for the answer of one host (default: {_TIMEOUT_SECONDS:g})",
    )
    return parser


def _hosts(launcher_args: Sequence[str]) -> Hosts | None:
    """The hosts of a run with these options; None means this machine.

    Raises:
        UsageError: an option is wrong, or the launcher cannot reach a single host.
    """
    from ..command_line.options import check_options, read
    from ..command_line.where import Hosts, where_to_run

    args = read([*launcher_args, "--module", _MODULE, *_ARGUMENTS])
    if args.command != (_MODULE, *_ARGUMENTS):
        raise UsageError(f"xds env: {args.command[0]}: is not an option; see `xds env --help`")
    check_options(args)
    where = where_to_run(args, os.environ)
    return where if isinstance(where, Hosts) else None


def _commands(hosts: Hosts) -> dict[str, list[str]]:
    from ..remote.backends import PerHost, backend_named

    backend = backend_named(hosts.launcher)
    if not isinstance(backend, PerHost):
        raise UsageError(
            f"--launcher = {hosts.launcher}: xds env connects to each host separately, over ssh; leave the"
            " option out, or run `xds env --json` on each host with that launcher"
        )
    launcher_args = [hosts.remote.python, "-u", "-m", _MODULE, *_ARGUMENTS]
    return {host.name: backend.command(host, hosts.remote, launcher_args) for host in hosts.hosts}


def _check_slots(hosts: Hosts, reports: Mapping[str, tuple[list[Line], float]]) -> None:
    """Add a line to hosts that have GPUs, but fewer than the hostfile names."""
    for host in hosts.hosts:
        lines = reports.get(host.name, ([], 0.0))[0]
        num_gpus = next((line.value for line in lines if line.key == "gpus"), "")
        if num_gpus.isdigit() and 0 < int(num_gpus) <= max(host.slots):
            value = f"names slot {max(host.slots)}, but the host has {num_gpus} GPUs"
            remedy = "correct slots= in the hostfile, or --include"
            lines.append(Line("hostfile", value, remedy, varies=True))


def _read(
    answers: Mapping[str, Answer],
) -> tuple[dict[str, tuple[list[Line], float]], dict[str, str]]:
    """(lines and time of the hosts that answered, error text of the hosts that did not)."""
    reports: dict[str, tuple[list[Line], float]] = {}
    unreached: dict[str, str] = {}
    for host, answer in answers.items():
        lines = parsed(answer.output)
        if not lines:
            unreached[host] = reason(answer)
        else:
            reports[host] = (lines, answer.answered_at)
    return reports, unreached


def parsed(output: str) -> list[Line] | None:
    """The lines in a host's output, which may begin with output of login scripts; None if there are none."""
    for text in reversed(output.splitlines()):
        try:
            return [Line(**_fields(record)) for record in json.loads(text)]
        except (ValueError, TypeError, RecursionError):  # no JSON, or not ours
            continue
    return None


def _fields(record: Any) -> dict[str, Any]:
    """The fields of one line; additional fields of a newer xds are dropped."""
    if not isinstance(record, dict):
        raise TypeError("not an object")
    texts = {name: record[name] for name in ("key", "value", "remedy") if name in record}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("not text")
    return {**texts, "varies": bool(record.get("varies"))}


def reason(answer: Answer) -> str:
    """Why a host did not answer: the last lines of ssh's standard error, and the exit code."""
    launcher_args = [line.strip() for line in answer.errors.splitlines() if line.strip()]
    reports = " | ".join(map(printable, launcher_args[-_MAX_ERROR_LINES:]))
    ending = answer.trouble or f"exit code {answer.code}, and no answer"
    return f"{reports} ({ending})" if reports else ending


def as_json(
    reports: Mapping[str, tuple[Sequence[Line], float]],
    unreached: Mapping[str, str],
    compared: Comparison,
) -> str:
    """One line of JSON with the complete output of every host."""
    differences = {
        difference.key: [
            {"value": line.value, "hosts": list(hosts)} for line, hosts in difference.groups
        ]
        for difference in compared.differences
    }
    return json.dumps(
        {
            "hosts": {
                host: [asdict(line) for line in lines] for host, (lines, _) in reports.items()
            },
            "not_reached": dict(unreached),
            "differences": differences,
            "clock_skew_seconds": {host: round(skew, 3) for host, skew in compared.skews.items()},
        }
    )
