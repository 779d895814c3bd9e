"""`xds checkpoint import`: converts a checkpoint of another program. Never executes code from the files."""

from __future__ import annotations

import argparse
from typing import Any

SOURCES = ("auto", "deepspeed", "huggingface", "torch")


def add_import(commands: Any) -> None:
    """Add the parser of the sub-command."""
    text = "Convert a DeepSpeed checkpoint, a Hugging Face folder or a file of weights to a checkpoint of xds"
    parser = commands.add_parser(
        "import", help=text, description=f"{text}. No code from the files is executed."
    )
    add = parser.add_argument
    add(
        "source",
        help="a DeepSpeed save_dir or one tag in it, a Hugging Face folder, or a file of weights",
    )
    add(
        "save_dir",
        help="where the checkpoint is written; engine.load_checkpoint(save_dir) loads it",
    )
    add(
        "--tag",
        help="the DeepSpeed tag to read (default: that in `latest`); for weights: the tag to write (imported)",
    )
    add(
        "--from",
        dest="kind",
        choices=SOURCES,
        default="auto",
        help="the format of the source (default: detect)",
    )
    parser.set_defaults(run=_import)


def _import(args: argparse.Namespace) -> int:
    from ..engine.checkpoint.imports.importing import import_checkpoint

    report = import_checkpoint(args.source, args.save_dir, args.tag, args.kind)
    print(
        f"{args.source} ({report.origin}) -> {report.folder}: {report.num_tensors} parameters and buffers, "
        f"{report.numel:,} elements"
    )
    for note in report.notes:
        print(f"note: {note}")
    return 0
