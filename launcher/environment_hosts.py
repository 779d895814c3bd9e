"""`xds env --hostfile`: asks all hosts at once over ssh, shows what they share, marks what differs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, final

from ..ops.errors import UsageError
from .environment_compare import Comparison, compare, report
from .fan_out import Answer, fan_out
from .job import Host, Remote
from .probes.line import Line

DONE, DIFFERENT = 0, 1
_WORDS = ("-u", "-m", "xds.launcher.cli", "env", "--json")
_TIMEOUT_SECONDS = 120.0
_MAX_ERROR_LINES = 5


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"xds env: {message}; see `xds env --help`")


def main(argv: Sequence[str]) -> int:
    """0; 1 where a host did not answer, or versions differ."""
    asked = _parser().parse_args(list(argv))
    if asked.timeout <= 0:
        raise UsageError(f"--timeout = {asked.timeout:g}: must be a number of seconds above 0")
    hosts = _hosts(asked)
    commands = _commands(asked, hosts)
    answers = fan_out(commands, asked.timeout)
    told, unreached = _read(answers)
    compared = compare(told)
    if asked.json:
        print(as_json(told, unreached, compared))
    else:
        for line in report(compared, unreached, list(commands)):
            print(line)
    return DIFFERENT if unreached or not compared.is_one_version() else DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="xds env",
        description="Print versions, devices and limits of this machine, or of all hosts of a hostfile.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="ask all hosts of it, over ssh")
    parser.add_argument("-i", "--include", default="", metavar="HOSTS", help="only these: h1@h2")
    parser.add_argument("-e", "--exclude", default="", metavar="HOSTS", help="all but these: h1@h2")
    parser.add_argument("--ssh-port", "--ssh_port", type=int, metavar="N")
    parser.add_argument(
        "--launcher-args", "--launcher_args", default="", metavar="WORDS", help="for ssh itself"
    )
    parser.add_argument(
        "--venv-script", "--venv_script", default="", metavar="FILE", help="sourced there first"
    )
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_SECONDS, metavar="SECONDS")
    return parser


def _hosts(asked: argparse.Namespace) -> list[Host]:
    if not asked.hostfile:
        raise UsageError("xds env asks other machines only where --hostfile is given; give one")
    from .hosts import filter_hosts, read_hostfile

    return filter_hosts(read_hostfile(asked.hostfile), asked.include, asked.exclude)


def _commands(asked: argparse.Namespace, hosts: Sequence[Host]) -> dict[str, list[str]]:
    from .backends.ssh import Ssh

    ssh = Ssh()
    ssh.check()
    try:
        launcher_args = tuple(shlex.split(asked.launcher_args))
    except ValueError as error:
        raise UsageError(
            f"--launcher-args = {asked.launcher_args}: {error}; close the quote"
        ) from None
    remote = Remote(
        folder=os.getcwd(),
        python=sys.executable,
        environment={},
        venv_script=asked.venv_script,
        ssh_port=asked.ssh_port,
        launcher_args=launcher_args,
    )
    words = [remote.python, *_WORDS]
    return {host.name: ssh.command(host, remote, words) for host in hosts}


def _read(
    answers: Mapping[str, Answer],
) -> tuple[dict[str, tuple[list[Line], float]], dict[str, str]]:
    """(lines and time of the answer of those that answered, the reason of those that did not)."""
    told: dict[str, tuple[list[Line], float]] = {}
    unreached: dict[str, str] = {}
    for host, answer in answers.items():
        lines = parsed(answer.output)
        if not lines:
            unreached[host] = reason(answer)
        else:
            told[host] = (lines, answer.answered_at)
    return told, unreached


def parsed(output: str) -> list[Line] | None:
    """The lines a host told; what its login scripts print may stand before them. None: there are none."""
    for text in reversed(output.splitlines()):
        try:
            return [Line(**_fields(said)) for said in json.loads(text)]
        except (ValueError, TypeError, RecursionError):  # no JSON, or not ours
            continue
    return None


def _fields(said: Any) -> dict[str, Any]:
    """One line's fields; what a newer xds tells besides is left out."""
    if not isinstance(said, dict):
        raise TypeError("no object")
    texts = {name: said[name] for name in ("key", "value", "remedy") if name in said}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("no text")
    return {**texts, "varies": bool(said.get("varies"))}


def reason(answer: Answer) -> str:
    """Why a host did not answer, in ssh's own words where it has any."""
    words = [line.strip() for line in answer.errors.splitlines() if line.strip()]
    told = " | ".join(words[-_MAX_ERROR_LINES:])
    ending = answer.trouble or f"exit code {answer.code}, and no answer"
    return f"{told} ({ending})" if told else ending


def as_json(
    told: Mapping[str, tuple[Sequence[Line], float]],
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
            "hosts": {host: [asdict(line) for line in lines] for host, (lines, _) in told.items()},
            "not_reached": dict(unreached),
            "differences": differences,
            "clock_skew_seconds": {host: round(skew, 3) for host, skew in compared.skews.items()},
        }
    )
