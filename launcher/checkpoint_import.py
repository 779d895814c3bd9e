"""`xds checkpoint import`: makes a checkpoint of what another program wrote, and executes nothing of it."""

from __future__ import annotations

import argparse
from typing import Any

SOURCES = ("auto", "deepspeed", "huggingface", "torch")


def add_import(commands: Any) -> None:
    """The sub-command's parser."""
    text = "Make a checkpoint of one of DeepSpeed, of a Hugging Face folder or of a file of weights"
    parser = commands.add_parser(
        "import", help=text, description=f"{text}. Nothing in it is executed."
    )
    add = parser.add_argument
    add(
        "source",
        help="DeepSpeed's save_dir or one tag of it, a Hugging Face folder, or a file of weights",
    )
    add(
        "save_dir",
        help="where the checkpoint is made: engine.load_checkpoint(save_dir) goes on from it",
    )
    add(
        "--tag",
        help="which of DeepSpeed's tags (default: what `latest` names); for weights the tag to make (imported)",
    )
    add("--from", dest="kind", choices=SOURCES, default="auto", help="what it is (default: look)")
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
