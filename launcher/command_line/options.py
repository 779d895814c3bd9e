"""Parses the options of `xds`: those of deepspeed and torchrun, and a few of its own.

The table in option_table.py defines for each option its names, its value, and its effect: it works, it is
accepted because xds always does this, or it is refused with a remedy. Every long option may be written with
dashes or underscores. The arguments after the script are passed to the script.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, final

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.schema.section import nearest
from .option_table import GROUPS, OPTIONS, Option

USAGE = """\
usage: xds [options] script.py [arguments of the script]
       xds check config.json [--world-size N]   say what a config does; --json: all values
       xds elastic config.json                  print the valid numbers of ranks of its elasticity section
       xds plan config.json --model MODEL --world-size N   who has and sends what, the schedule, its seconds
       xds tune config.json --model MODEL --world-size N --machine M   find the layout that fits and is fast
       xds report FOLDER                        make a page of a run that has written a record
       xds checkpoint info|verify|export|import|diff   inspect, verify, convert and compare checkpoints
       xds data info|analyze                    describe indexed files of tokens, and sort their rows by metrics
       xds ops build|list|clean                 compile the native ops ahead of time, list and remove them
       xds env                                  print versions, devices, and settings that cost speed
       xds bench comm|machine                   time the collectives; measure a machine for plans
       xds completion bash|zsh|fish             print a script with which the shell completes xds

Train PyTorch models on every device of this machine, or of many.
"""

_EPILOG = """
Options of deepspeed and torchrun that are not listed are accepted if xds always does the same, and refused with
a reason otherwise. Each may be written with - or _. Rank 0 writes to the terminal, and every rank to its own
file. The first rank that fails is reported once, and xds exits with its exit code (128 + signal if it was
killed). All arguments after the script are passed to the script. If a script is named like a subcommand, write
./check.

  xds examples/gpt/train.py --config examples/gpt/zero3.json
  xds --nproc-per-node 4 --module project.train --lr 1e-3
  xds --hostfile hosts --include a@b:0-3 --max-restarts 10 train.py
  xds --nnodes 2 --node-rank 0 --master-addr a train.py      (and the same with --node-rank 1 on the other)
"""

SHORTEST_BEGINNING = 3  # letters of an option that tell which one is meant
_HELP_COLUMN = 28
_NUMBERS = {  # the least and the largest value, checked also where a run does not use the option
    "max_restarts": (0, 2**31),
    "master_port": (1, 65535),
    "max_elastic_nodes": (1, 2**31),
    "min_elastic_nodes": (1, 2**31),
    "node_rank": (0, 2**31),
    "num_nodes": (1, 2**31),
    "ssh_port": (1, 65535),
}
_UNSET_BY_MINUS_ONE = ("num_nodes", "node_rank", "min_elastic_nodes", "max_elastic_nodes")


# -- parsers of the subcommands ---------------------------------------------------------------------------


@final
class Parser(argparse.ArgumentParser):
    """argparse's parser, with escaped error messages."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, 400))


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option whose value is a whole number from `least` on."""

    def read(text: str) -> int:
        number = int(text) if text.strip().isdecimal() and len(text) <= 10 else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number from {least}")
        return number

    return read


# -- the options of a run ---------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class ParsedArgs:
    """A parsed command line: the value of each given option, by its name in the table without dashes.

    spelled: the option as the user wrote it, for error messages. A switch has the value "1".
    """

    given: Mapping[str, str] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Whether one of these was given with a non-empty value."""
        return any(self.given.get(name, "") for name in names)

    def text(self, name: str, default: str = "") -> str:
        return self.given.get(name) or default

    def number(self, name: str, default: int, least: int = 0, most: int = 2**31) -> int:
        """The value as a number in [least, most]. Where -1 is deepspeed's default, it means "not given".

        Raises:
            UsageError: the value is not such a number.
        """
        text = self.text(name)
        if not text or (text == "-1" and name in _UNSET_BY_MINUS_ONE):
            return default
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            bound = f"from {least}" + (f" to {most}" if most < 2**31 else "")
            raise UsageError(f"{self.spelled[name]} = {printable(text)}: must be a number {bound}")
        return int(text)

    def first(self, *names: str) -> str:
        """The first of these that was given, as the user wrote it; "" for none."""
        return next((self.spelled[name] for name in names if self.has(name)), "")

    def with_defaults(self, environ: Mapping[str, str]) -> ParsedArgs:
        """The options, with torchrun's variables (PET_NNODES, ...) for those that were not given."""
        given, spelled = dict(self.given), dict(self.spelled)
        for option in OPTIONS:
            text = environ.get(f"PET_{option.key.upper()}", "")
            if option.is_torchrun and text and option.key not in given:
                is_off = not option.value and text in ("0", "false", "False")
                given[option.key] = "" if is_off else text
                spelled[option.key] = f"PET_{option.key.upper()} (environment)"
        return replace(self, given=given, spelled=spelled)


def read(argv: Sequence[str]) -> ParsedArgs:
    """Parse a command line.

    Raises:
        UsageError: an option is unknown, or its value is missing.
    """
    given: dict[str, str] = {}
    spelled: dict[str, str] = {}
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "-":
        argument = argv[position]
        position += 1
        if argument == "--":
            break
        name, equals, value = _cut(argument)
        option = _BY_NAME.get(name)
        if option is None:
            raise UsageError(f"unknown option {printable(name)}{_meant(name)}")
        if not option.value and equals:
            raise UsageError(f"{name} = {printable(value)}: takes no value; write {name} alone")
        if option.value and not equals:
            value = _value(name, option, argv[position : position + 1])
            position += 1
        given[option.key], spelled[option.key] = value if option.value else "1", name
    return ParsedArgs(given, spelled, tuple(argv[position:]))


def check_options(args: ParsedArgs) -> list[str]:
    """Check the given options. Returns the notes to log about options without effect.

    Raises:
        UsageError: an option is refused, or its value is not one of its choices or not in its range.
    """
    for name, (least, most) in _NUMBERS.items():
        args.number(name, 0, least, most)
    notes = []
    for option in OPTIONS:
        text, name = args.given.get(option.key, ""), args.spelled.get(option.key, "")
        if text in ("", *option.harmless):
            continue
        if option.refusal:
            shown = name if not option.value else f"{name} = {printable(text)}"
            raise UsageError(f"{shown}: {option.refusal}")
        if option.choices and text not in option.choices:
            raise UsageError(
                f"{name} = {printable(text)}: must be one of {', '.join(option.choices)}"
            )
        if option.note:
            notes.append(f"{name} has no effect: {option.note}")
    return notes


def help_text() -> str:
    """The text of `xds --help`."""
    width = min(112, max(72, shutil.get_terminal_size((100, 24)).columns))
    parts = [USAGE]
    for group in GROUPS:
        parts.append(f"\n{group}:\n")
        shown = [option for option in OPTIONS if option.group == group and option.help]
        parts += [_help_line(option, width) for option in shown]
    return "".join([*parts, _EPILOG])


def _help_line(option: Option, width: int) -> str:
    short = [alias for alias in option.aliases if not alias.startswith("--")]
    names = ", ".join([*short, option.name]) + (f" {option.value}" if option.value else "")
    head = f"  {names}".ljust(_HELP_COLUMN)
    is_long = len(head) > _HELP_COLUMN
    indent = " " * _HELP_COLUMN
    long = [alias for alias in option.aliases if alias.startswith("--")]
    also = f". Also {', '.join(long)}" if long else ""
    text = textwrap.fill(
        option.help + also,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return f"{head}\n{text}\n" if is_long else f"{head}{text[_HELP_COLUMN:]}\n"


def _spellings(option: Option) -> set[str]:
    names = {option.name, *option.aliases}
    return names | {f"--{name[2:].replace('-', '_')}" for name in names if name.startswith("--")}


_BY_NAME = {name: option for option in OPTIONS for name in _spellings(option)}


def _cut(argument: str) -> tuple[str, str, str]:
    """Split --name=value, or -n3, into name, "=" and value."""
    if argument.startswith("--"):
        return argument.partition("=")
    option = _BY_NAME.get(argument[:2])
    if option is not None and option.value and len(argument) > 2:
        return argument[:2], "=", argument[2:].removeprefix("=")
    return argument, "", ""


def _value(name: str, option: Option, following: Sequence[str]) -> str:
    """The argument after an option. If that is another option, the value is missing."""
    is_option = bool(following) and _cut(following[0])[0] in _BY_NAME
    if not following or (is_option and not option.is_free):
        raise UsageError(f"{name}: needs a value, {option.value}")
    return following[0]


def _meant(name: str) -> str:
    """What an unknown option may mean: the name in another launcher, a name's first letters, or a near one."""
    word = name[:64].strip("-").replace("_", "-")
    names = {each.strip("-"): each for option in OPTIONS for each in (option.name, *option.aliases)}
    found = [option.name for option in OPTIONS if word in option.elsewhere.split()]
    if len(word) >= SHORTEST_BEGINNING:
        works = [option.name for option in OPTIONS if option.help]
        found = found or [each for each in works if each.startswith(f"--{word}")]
    found = found or [names[each] for each in nearest(word, names)]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return "; options of the script come after its name, and those of xds are in `xds --help`"
