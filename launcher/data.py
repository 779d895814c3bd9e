"""`xds data`: describes indexed files of tokens, and computes metrics of their rows for curricula."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..utils.errors import DamagedError, UsageError
from ..utils.quoting import printable
from ..utils.sizes import size_text
from .command_line.options import Parser, whole_number

# numpy is imported when a command runs, so `--help` and errors in the command line are fast
if TYPE_CHECKING:
    from ..engine.data.indexed import IndexedDataset

DONE, DAMAGED, USAGE = 0, 1, 2
METRICS = ("seqlen", "vocab_rarity")


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns 0, 1 for damaged files, or 2 for other errors (see stderr)."""
    args = _parser().parse_args(list(argv))
    try:
        code: int = args.run(args)
        return code
    except BrokenPipeError:
        raise
    except (UsageError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{printable(error.filename)}: {error.strerror}"
        print(f"xds data {args.command}: {text}", file=sys.stderr)
        return DAMAGED if isinstance(error, DamagedError) else USAGE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds data",
        description="Describe and analyze indexed files of Megatron and DeepSpeed. Uses no ranks or devices.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser("info", help="print what is in indexed files")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_info)
    analyze = commands.add_parser(
        "analyze", help="compute metrics of the rows, and sort the rows by them"
    )
    add = analyze.add_argument
    add("--out", required=True, help="the folder of the results; each metric gets a folder in it")
    add(
        "--metrics",
        nargs="+",
        choices=METRICS,
        default=["seqlen"],
        help="seqlen: tokens of a row; vocab_rarity: the sum of -log p(token), rounded (default: seqlen)",
    )
    add("--pad-id", type=whole_number(0), metavar="ID", help="this token is padding, not counted")
    add(
        "--num-workers", type=whole_number(1), default=1, metavar="N", help="processes (default: 1)"
    )
    analyze.set_defaults(run=_analyze)
    for one in (info, analyze):
        one.add_argument("path", help="the files' path, without .bin and .idx")
        one.add_argument(
            "--table",
            choices=("deepspeed", "megatron"),
            help="whose dtype codes the index has (default: found from the lengths of the files)",
        )
    return parser


def _info(args: argparse.Namespace) -> int:
    from ..engine.data.indexed import IndexedDataset

    facts = _facts(IndexedDataset(args.path, table=args.table))
    if args.json:
        print(json.dumps(facts, indent=2))
        return DONE
    texts = {
        "rows": f"{facts['num_rows']:,}",
        "values": f"{facts['numel']:,} of {facts['dtype']}, {size_text(facts['size_bytes'])}",
        "documents": f"{facts['num_documents']:,}",
        "values a row": f"{facts['shortest_numel']:,} to {facts['longest_numel']:,}, "
        f"{facts['mean_numel']:,.1f} on average",
        "dtype codes": {
            "both": "the same in DeepSpeed's and Megatron's table",
            "deepspeed": "DeepSpeed's table",
            "megatron": "Megatron's table",
        }[facts["table"]],
    }
    width = max(map(len, texts))
    for name, text in texts.items():
        print(f"{name:{width}}  {text}")
    return DONE


def _facts(dataset: IndexedDataset) -> dict[str, Any]:
    lengths = dataset.lengths
    numel, is_empty = int(lengths.sum(dtype="int64")), not len(lengths)
    return {
        "path": str(dataset.path),
        "num_rows": len(dataset),
        "num_documents": max(0, len(dataset.documents) - 1),
        "numel": numel,
        "dtype": dataset.dtype.name,
        "size_bytes": numel * dataset.dtype.itemsize,
        "shortest_numel": 0 if is_empty else int(lengths.min()),
        "longest_numel": 0 if is_empty else int(lengths.max()),
        "mean_numel": 0.0 if is_empty else numel / len(lengths),
        "table": dataset.table,
    }


def _analyze(args: argparse.Namespace) -> int:
    from ..engine.data.analyzer import (
        Metric,
        SequenceLength,
        VocabularyRarity,
        analyze,
        token_counts,
    )
    from ..engine.data.indexed import IndexedDataset

    dataset = IndexedDataset(args.path, table=args.table)
    metrics = []
    for name in dict.fromkeys(args.metrics):
        if name == "seqlen":
            metrics.append(Metric(name, SequenceLength(args.pad_id)))
        else:
            metrics.append(Metric(name, VocabularyRarity(token_counts(dataset, args.pad_id))))
    found = analyze(dataset, metrics, args.out, num_workers=args.num_workers)
    for name, one in found.items():
        print(
            f"{name}: {one.least:,} to {one.most:,}, {one.num_values:,} different values of "
            f"{len(dataset):,} rows -> {printable(one.folder)}"
        )
    return DONE
