"""The argument parser of the subcommands. It escapes the parts of the command line that it prints."""

from __future__ import annotations

import argparse
from typing import NoReturn, final

from ...utils.quoting import printable

_MOST_CHARS = 400


@final
class Parser(argparse.ArgumentParser):
    """argparse's parser, with escaped error messages."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, _MOST_CHARS))
