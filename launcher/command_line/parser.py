"""The parser of the small commands: what it repeats of a command line is quoted."""

from __future__ import annotations

import argparse
from typing import NoReturn, final

from ...utils.quoting import printable

_MOST_CHARS = 400


@final
class Parser(argparse.ArgumentParser):
    """Python's, but for its errors."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, _MOST_CHARS))
