"""`xds report`: makes a page of what a run has written, also while it goes on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..utils.errors import UsageError
from ..utils.quoting import printable
from ..utils.sizes import size_text
from ..utils.small_files import replace_small_file
from .command_line.options import Parser

PAGE, TRACE = "report.html", "trace.json"


def main(argv: Sequence[str]) -> int:
    """Write the page. Returns 0, or 2 after printing what is wrong to stderr."""
    options = _parser().parse_args(list(argv))
    try:
        _write(options)
    except UsageError as error:
        print(f"xds report: {error}", file=sys.stderr)
        return 2
    return 0


def _write(options: argparse.Namespace) -> None:
    from .reporting.page import page_of
    from .reporting.records import read_run

    run = read_run(options.folder)
    name = Path(options.folder).absolute().name or options.folder
    text = page_of(run, name, time.time())
    _put(Path(options.output or Path(options.folder, PAGE)), text)
    if options.trace:
        from .reporting.trace import trace_of

        _put(
            Path(options.folder if not options.output else Path(options.output).parent, TRACE),
            trace_of(run),
        )


def _put(path: Path, text: str) -> None:
    """Write a file at once: a browser that reads the former one sees either whole."""
    data = text.encode(errors="replace")
    try:
        replace_small_file(path, data)
    except OSError as error:
        raise UsageError(
            f"{printable(path)} cannot be written: {error.strerror}; name another file with --output"
        ) from None
    print(f"{printable(path)}: {size_text(len(data))}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds report",
        description="Make a page of a run: curves, timeline, bytes, restarts, config. Opens in any browser.",
    )
    parser.add_argument("folder", help="the folder that report_folder of the config names")
    parser.add_argument("--output", metavar="FILE", help=f"default: {PAGE} in the folder")
    parser.add_argument(
        "--trace",
        action="store_true",
        help=f"also write {TRACE} beside the page, for ui.perfetto.dev",
    )
    return parser
