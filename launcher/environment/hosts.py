"""`xds env --hostfile`: asks all hosts at once over ssh, shows what they share, marks what differs."""

from __future__ import annotations

import argparse
import json
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
Every other option is the launcher's, and means what it means for a run: --hostfile asks all hosts of it at
once, --include, --exclude, --num-nodes leave some, --ssh-port, --launcher-args, --venv-script and --python say
how they are reached (`xds --help`). The exit code is 1 where a host does not answer, or the versions of xds,
Python, torch or NCCL are not the same everywhere."""


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"xds env: {message}; see `xds env --help`")


def main(argv: Sequence[str]) -> int:
    """0; 1 where a host did not answer, or versions differ; 130 after Ctrl-C."""
    args, launcher_args = _parser().parse_known_args(list(argv))
    if args.timeout <= 0:
        raise UsageError(f"--timeout = {args.timeout:g}: must be a number of seconds above 0")
    hosts = _hosts(launcher_args)
    if hosts is None:
        return this_machine.show(as_one_line=args.json)
    commands = _commands(hosts)
    try:
        reports, unreached = _read(fan_out(commands, args.timeout))
    except KeyboardInterrupt:  # everything that was begun has been ended
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
        help=f"for one host to answer, default {_TIMEOUT_SECONDS:g}",
    )
    return parser


def _hosts(launcher_args: Sequence[str]) -> Hosts | None:
    """The hosts on which a run with these words would be; None: on this machine.

    Raises:
        UsageError: options that are wrong, or a launcher that does not reach one host alone.
    """
    from ..command_line.options import check_options, read
    from ..command_line.where import Hosts, where_to_run

    args = read([*launcher_args, "--module", _MODULE, *_ARGUMENTS])
    if args.command != (_MODULE, *_ARGUMENTS):
        raise UsageError(f"xds env: {args.command[0]}: is no option; see `xds env --help`")
    check_options(args)
    where = where_to_run(args, os.environ)
    return where if isinstance(where, Hosts) else None


def _commands(hosts: Hosts) -> dict[str, list[str]]:
    from ..remote.backends import PerHost, backend_named

    backend = backend_named(hosts.launcher)
    if not isinstance(backend, PerHost):
        raise UsageError(
            f"--launcher = {hosts.launcher}: xds env asks each host by itself, over ssh; leave it out,"
            " or let that launcher run `xds env --json` on each"
        )
    launcher_args = [hosts.remote.python, "-u", "-m", _MODULE, *_ARGUMENTS]
    return {host.name: backend.command(host, hosts.remote, launcher_args) for host in hosts.hosts}


def _check_slots(hosts: Hosts, reports: Mapping[str, tuple[list[Line], float]]) -> None:
    """Add a line to hosts that have GPUs, but not the ones that the hostfile names."""
    for host in hosts.hosts:
        lines = reports.get(host.name, ([], 0.0))[0]
        num_gpus = next((line.value for line in lines if line.key == "gpus"), "")
        if num_gpus.isdigit() and 0 < int(num_gpus) <= max(host.slots):
            value = f"slot {max(host.slots)} is asked for, but it has {num_gpus} GPUs"
            remedy = "correct slots= in the hostfile, or --include"
            lines.append(Line("hostfile", value, remedy, varies=True))


def _read(
    answers: Mapping[str, Answer],
) -> tuple[dict[str, tuple[list[Line], float]], dict[str, str]]:
    """(lines and time of the answer of those that answered, the reason of those that did not)."""
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
    """The lines a host told; what its login scripts print may stand before them. None: there are none."""
    for text in reversed(output.splitlines()):
        try:
            return [Line(**_fields(record)) for record in json.loads(text)]
        except (ValueError, TypeError, RecursionError):  # no JSON, or not ours
            continue
    return None


def _fields(record: Any) -> dict[str, Any]:
    """One line's fields; what a newer xds tells besides is left out."""
    if not isinstance(record, dict):
        raise TypeError("no object")
    texts = {name: record[name] for name in ("key", "value", "remedy") if name in record}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("no text")
    return {**texts, "varies": bool(record.get("varies"))}


def reason(answer: Answer) -> str:
    """Why a host did not answer, in ssh's own words where it has any."""
    launcher_args = [line.strip() for line in answer.errors.splitlines() if line.strip()]
    reports = " | ".join(map(printable, launcher_args[-_MAX_ERROR_LINES:]))
    ending = answer.trouble or f"exit code {answer.code}, and no answer"
    return f"{reports} ({ending})" if reports else ending


def as_json(
    reports: Mapping[str, tuple[Sequence[Line], float]],
    unreached: Mapping[str, str],
    compared: Comparison,
) -> str:
    """One line of JSON with everything that every host told."""
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
