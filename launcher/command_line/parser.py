"""The argument parser of the subcommands. It escapes the parts of the command line that it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, final

from ...utils.quoting import printable

_MOST_CHARS = 400
_MOST_DIGITS = 10


@final
class Parser(argparse.ArgumentParser):
    """argparse's parser, with escaped error messages."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, _MOST_CHARS))


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option whose value is a whole number from `least` on."""

    def read(text: str) -> int:
        number = int(text) if text.strip().isdecimal() and len(text) <= _MOST_DIGITS else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number from {least}")
        return number

    return read
