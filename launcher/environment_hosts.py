"""`xds env`: prints this machine (environment.py), or with --hostfile compares all hosts, over ssh."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

from ..utils.errors import UsageError
from ..utils.quoting import escaped, printable
from .environment import Line, show

if TYPE_CHECKING:
    from .command_line.where import Hosts

DONE, DIFFERENT, INTERRUPTED = 0, 1, 130
NOT_REPORTED = "(not reported)"
VERSIONS = ("xds", "python", "torch", "nccl")  # must be equal on all hosts
_MODULE = "xds.launcher.cli"
_ARGUMENTS = ("env", "--json")
_TIMEOUT_SECONDS = 120.0
_AT_ONCE = 64
_LAST_SECONDS = 2.0  # for the output of a command that was killed
_MAX_ERROR_LINES = 5
_MAX_NAMED = 8

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
    if not any(argument.startswith("-") and argument != "--json" for argument in argv):
        if set(argv) - {"--json"}:
            words = printable(" ".join(argv))
            raise UsageError(f"xds env = {words}: takes options only; see `xds env --help`")
        return show(as_one_line=bool(argv))
    args, launcher_args = _parser().parse_known_args(list(argv))
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout = {args.timeout:g}: must be a number of seconds above 0")
    hosts = _hosts(launcher_args)
    if hosts is None:
        return show(as_one_line=args.json)
    commands = _commands(hosts)
    try:
        answers = run_all(commands, args.timeout)
    except KeyboardInterrupt:  # all started commands have been killed
        return INTERRUPTED
    reports = {host: lines for host, answer in answers.items() if (lines := parsed(answer.output))}
    unreached = {host: reason(answer) for host, answer in answers.items() if host not in reports}
    check_slots(hosts, reports)
    compared = compare(reports)
    if args.json:
        print(_as_json(reports, unreached, compared))
    else:
        print("\n".join(report(compared, unreached, list(commands))))
    return DIFFERENT if unreached or not compared.is_one_version() else DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="xds env",
        description="Print versions, devices and slow settings of this machine, or of all hosts of a hostfile.",
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
    from .command_line.options import check_options, read
    from .command_line.where import Hosts, where_to_run

    args = read([*launcher_args, "--module", _MODULE, *_ARGUMENTS])
    if args.command != (_MODULE, *_ARGUMENTS):
        raise UsageError(f"xds env: {args.command[0]}: is not an option; see `xds env --help`")
    check_options(args)
    where = where_to_run(args, os.environ)
    return where if isinstance(where, Hosts) else None


def _commands(hosts: Hosts) -> dict[str, list[str]]:
    from .remote.backends import PerHost, backend_named

    backend = backend_named(hosts.launcher)
    if not isinstance(backend, PerHost):
        raise UsageError(
            f"--launcher = {hosts.launcher}: xds env connects to each host separately, over ssh; leave the"
            " option out, or run `xds env --json` on each host with that launcher"
        )
    words = [hosts.remote.python, "-u", "-m", _MODULE, *_ARGUMENTS]
    return {host.name: backend.command(host, hosts.remote, words) for host in hosts.hosts}


# -- many commands in parallel ----------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Answer:
    """What a command printed. code: its exit code; None if it was killed or not started, see `trouble`."""

    code: int | None
    output: str
    errors: str
    trouble: str = ""


@final
class _Running:
    """The processes that run, to kill them after an interrupt."""

    def __init__(self) -> None:
        self._lock, self._is_over = threading.Lock(), False
        self._processes: set[subprocess.Popen[str]] = set()

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._is_over:
                raise OSError("interrupted")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # so that exactly the command and its child processes can be killed
            )
            self._processes.add(process)
            return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._processes:
                self.kill(process)

    def ask(self, command: Sequence[str], timeout_seconds: float) -> Answer:
        """Run one command to its end, or until the time limit."""
        try:
            process = self.start(command)
        except OSError as error:
            return Answer(None, "", "", f"cannot start {command[0]}: {error.strerror}")
        trouble, output, errors = "", "", ""
        try:
            output, errors = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            trouble = f"did not end within {timeout_seconds:g} s"
            self.kill(process)
            # unless a process in another session holds its streams open
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=_LAST_SECONDS)
        return Answer(None if trouble else process.returncode, output, errors, trouble)


def run_all(
    commands: Mapping[str, Sequence[str]], timeout_seconds: float, at_once: int = _AT_ONCE
) -> dict[str, Answer]:
    """The answers by name. An interrupt kills all that run, with what they have started."""
    running = _Running()
    pool = ThreadPoolExecutor(at_once)
    try:
        answers = pool.map(lambda command: running.ask(command, timeout_seconds), commands.values())
        return dict(zip(commands, answers, strict=True))
    finally:
        running.kill_all()
        pool.shutdown(cancel_futures=True)


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
    lines = [line.strip() for line in answer.errors.splitlines() if line.strip()]
    shown = " | ".join(map(printable, lines[-_MAX_ERROR_LINES:]))
    ending = answer.trouble or f"exit code {answer.code}, and no answer"
    return f"{shown} ({ending})" if shown else ending


def check_slots(hosts: Hosts, reports: Mapping[str, list[Line]]) -> None:
    """Add a line to hosts that have GPUs, but fewer than the hostfile names."""
    for host in hosts.hosts:
        lines = reports.get(host.name, [])
        num_gpus = next((line.value for line in lines if line.key == "gpus"), "")
        if num_gpus.isdigit() and 0 < int(num_gpus) <= max(host.slots):
            value = f"names slot {max(host.slots)}, but the host has {num_gpus} GPUs"
            lines.append(
                Line("hostfile", value, "correct slots= in the hostfile, or --include", varies=True)
            )


# -- the comparison ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Difference:
    """A key whose value is not the same on all hosts. groups: (line, its hosts), the largest first."""

    key: str
    groups: tuple[tuple[Line, tuple[str, ...]], ...]

    def __str__(self) -> str:
        total = sum(len(hosts) for _, hosts in self.groups)
        first = self.groups[0][1]
        has_majority = len(first) * 2 > total
        parts = []
        for index, (line, hosts) in enumerate(self.groups):
            is_odd = index > 0 or not has_majority
            who = host_names(hosts) if is_odd else f"{len(hosts)} of {total} hosts"
            remedy = f" ({line.remedy})" if line.remedy else ""
            parts.append(
                f"{who}: {self.key} {escaped(line.value)}{remedy}" + "  <- differs" * is_odd
            )
        return "; ".join(parts)


@final
@dataclass(frozen=True)
class Comparison:
    """common: lines that are equal on all hosts. warnings: (host, line) with a remedy, of values that vary."""

    common: tuple[Line, ...]
    differences: tuple[Difference, ...]
    warnings: tuple[tuple[str, Line], ...]

    def is_one_version(self) -> bool:
        """Whether every host has the same xds, Python, torch and NCCL."""
        return not [difference for difference in self.differences if difference.key in VERSIONS]


def compare(answers: Mapping[str, Sequence[Line]]) -> Comparison:
    """Compare hosts by key. `answers`: the lines of each host."""
    by_host = {host: {line.key: line for line in lines} for host, lines in answers.items()}
    keys: dict[str, None] = {}  # in the order of the host with the most lines
    for lines in sorted(by_host.values(), key=len, reverse=True):
        keys.update(dict.fromkeys(lines))
    common, differences, warnings = [], [], []
    for key in keys:
        of_key = {host: lines.get(key, Line(key, NOT_REPORTED)) for host, lines in by_host.items()}
        if any(line.varies for line in of_key.values()):
            warnings += [(host, line) for host, line in of_key.items() if line.remedy]
            continue
        groups = _groups(of_key)
        if len(groups) == 1:
            common.append(groups[0][0])
        else:
            differences.append(Difference(key, groups))
    return Comparison(tuple(common), tuple(differences), tuple(warnings))


def _groups(of_key: Mapping[str, Line]) -> tuple[tuple[Line, tuple[str, ...]], ...]:
    """The hosts grouped by value, the largest group first; equal sizes in the order of their first host."""
    hosts: dict[str, list[str]] = {}
    lines: dict[str, Line] = {}
    for host, line in of_key.items():
        hosts.setdefault(line.value, []).append(host)
        known = lines.setdefault(line.value, line)
        if not known.remedy:
            lines[line.value] = line
    by_size = sorted(hosts, key=lambda value: -len(hosts[value]))
    return tuple((lines[value], tuple(hosts[value])) for value in by_size)


def host_names(hosts: Sequence[str]) -> str:
    """ "h1, h2": the first names, and the number of the others."""
    more = len(hosts) - _MAX_NAMED
    return ", ".join(hosts[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def report(
    compared: Comparison, unreached: Mapping[str, str], hosts: Sequence[str]
) -> Iterator[str]:
    """The lines to print: the common values once, then the differences, then the hosts without an answer."""
    num_answered = len(hosts) - len(unreached)
    if num_answered:
        answered = f"{num_answered} of {len(hosts)} hosts" if unreached else f"{len(hosts)} hosts"
        yield f"-- the same on {answered}: {host_names([h for h in hosts if h not in unreached])}"
        yield from map(str, compared.common)
    if compared.differences:
        yield "-- different"
        yield from map(str, compared.differences)
    if compared.warnings:
        yield "-- on single hosts"
        yield from (f"{host}: {line}" for host, line in compared.warnings)
    if unreached:
        yield "-- not reached"
        yield from (f"{host}: {why}" for host, why in unreached.items())


def _as_json(
    reports: Mapping[str, Sequence[Line]], unreached: Mapping[str, str], compared: Comparison
) -> str:
    """One line of JSON with the complete output of every host."""
    differences = {
        difference.key: [
            {"value": line.value, "hosts": list(hosts)} for line, hosts in difference.groups
        ]
        for difference in compared.differences
    }
    found = {host: [asdict(line) for line in lines] for host, lines in reports.items()}
    return json.dumps({"hosts": found, "not_reached": dict(unreached), "differences": differences})
