"""`xds checkpoint`: inspects, verifies, exports, imports and compares checkpoints. Uses no ranks or devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.errors import DamagedError, UsageError
from ..utils.progress import progress
from ..utils.quoting import escaped, plain_lines, printable
from ..utils.sizes import parse_bytes, size_text
from .command_line.options import Parser

# torch is imported when a command runs, so `--help` and errors in the command line are fast
if TYPE_CHECKING:
    from ..engine.checkpoint.io.reader import CheckpointReader

EQUAL, DIFFERENT, SOUND, DAMAGED, USAGE = 0, 1, 0, 1, 2
_SOURCES = ("auto", "deepspeed", "huggingface", "torch")
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns 0, 1 (damaged, or different for `diff`), or 2 for other errors (see stderr)."""
    args = _parser().parse_args(list(argv))
    try:
        with _one_thread():
            code: int = args.run(args)
        return code
    except BrokenPipeError:
        raise
    except (UsageError, OSError) as error:
        print(f"xds checkpoint {args.command}: {error}", file=sys.stderr)
        is_damaged = isinstance(error, DamagedError) and args.command != "diff"
        return DAMAGED if is_damaged else USAGE


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one torch thread: the pieces are small and checksums have their own thread, so more would wait."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds checkpoint",
        description="Inspect, verify, export, import and compare checkpoints of xds. One process, no devices.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_info, _add_verify, _add_export, _add_import, _add_diff):
        add(commands)
    return parser


def _add_command(commands: Any, name: str, run: Run, help: str) -> argparse.ArgumentParser:
    """Add a sub-command. `run` receives its arguments and returns the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help}.")
    parser.set_defaults(run=run)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", help="the save_dir of save_checkpoint, or the folder of one checkpoint"
    )
    parser.add_argument("--tag", help="which checkpoint (default: the one in `latest`)")


def _open(args: argparse.Namespace) -> CheckpointReader:
    from ..engine.checkpoint.io.reader import CheckpointReader

    return CheckpointReader(args.dir, args.tag)


# -- info ---------------------------------------------------------------------------------------------------


def _add_info(commands: Any) -> None:
    parser = _add_command(
        commands,
        "info",
        _info,
        "Print the contents of a checkpoint, and the other tags in the folder",
    )
    _add_source(parser)
    parser.add_argument("--tensors", action="store_true", help="also list parameters and buffers")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _info(args: argparse.Namespace) -> int:
    with _open(args) as reader:
        facts = _facts(reader)
        tensors = [_tensor_facts(reader, name) for name in reader.values] if args.tensors else None
    if args.json:
        print(json.dumps(facts if tensors is None else {**facts, "tensors": tensors}, indent=2))
        return SOUND
    labels = {name: _label(name) for name in facts}
    width = max(map(len, labels.values()))
    for name, value in facts.items():
        print(f"{labels[name]:{width}}  {escaped(_text(name, value))}")
    for one in tensors or ():
        states = f"  states {', '.join(one['states'])}" if one["states"] else ""
        kind = one["kind"] if one["kind"] != "param" or one["trains"] else "frozen"
        print(f"{kind:7} {printable(one['name'])} {one['shape']} {one['dtype']}{states}")
    return SOUND


def _facts(reader: CheckpointReader) -> dict[str, Any]:
    from ..engine.checkpoint.io.folders import committed

    manifest = reader.manifest
    values = list(reader.values.values())
    # imported weights do not record their kind
    params = [one for one in values if one.kind != "buffer"]
    counters = manifest.state["counters"]
    optimizer = manifest.state["optimizer"]
    return {
        "folder": str(reader.folder),
        "tag": reader.tag,
        "written_by": f"xds {manifest.xds}",
        "saved_seconds": manifest.saved_seconds,
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "is_accumulating": counters["is_accumulating"],
        "world_size": manifest.world_size,
        "pipeline_stages": manifest.grid.pipe,
        **({} if manifest.experts == 1 else {"ranks_that_share_experts": manifest.experts}),
        "stage": manifest.stage,
        "size_bytes": sum(record.size_bytes for record in manifest.files),
        "num_files": len(manifest.files),
        "num_params": len(params),
        "num_buffers": len(values) - len(params),
        "params_numel": sum(one.numel for one in params),
        "trained_numel": sum(one.numel for one in params if one.trains),
        "dtypes": sorted({str(one.compute_dtype).removeprefix("torch.") for one in params}),
        "value_dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in params}),
        **({} if manifest.score is None else {"metric": manifest.score.metric}),
        "left_out": len(reader.left_out),
        "tied": reader.tied,
        "optimizer": None if optimizer is None else optimizer["type"],
        "other_tags": [one.tag for one in committed(reader.save_dir) if one.tag != reader.tag],
    }


def _tensor_facts(reader: CheckpointReader, name: str) -> dict[str, Any]:
    one = reader.values[name]
    return {
        "name": name,
        "kind": one.kind,
        "shape": list(one.shape),
        "dtype": str(one.dtype).removeprefix("torch."),
        "compute_dtype": str(one.compute_dtype).removeprefix("torch."),
        "trains": one.trains,
        "states": list(reader.states(name)),
    }


def _label(name: str) -> str:
    """The name of a fact without its unit, which its text has: "size" for "size_bytes"."""
    plain = name.removeprefix("num_").removesuffix("_bytes").removesuffix("_seconds")
    return plain.replace("params_numel", "elements").removesuffix("_numel").replace("_", " ")


def _text(name: str, value: Any) -> str:
    if name == "saved_seconds":
        return datetime.fromtimestamp(value).isoformat(" ", "seconds") if value else "unknown"
    if name.endswith("_bytes"):
        return size_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{other} = {one}" for other, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if name == "optimizer" and value == "Adam":  # the states are the same, so the kind is not saved
        return "Adam or AdamW"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# -- verify -------------------------------------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    text = (
        "Read every byte of a checkpoint and compare the checksums; exits with 1 if it is damaged"
    )
    _add_source(_add_command(commands, "verify", _verify, text))


def _verify(args: argparse.Namespace) -> int:
    from ..engine.checkpoint.tools.verify import damage, size_bytes

    with _open(args) as reader:
        total = size_bytes(reader)
        found = []
        with progress("verify", total) as on_read:
            for sentence in damage(reader, on_read):
                found.append(sentence)
                print(plain_lines(sentence), file=sys.stderr)
        files = len(reader.manifest.files)
        name = printable(reader.folder)
        if found:
            print(
                f"{name} is damaged: {_count(len(found), 'problem')} in {_count(files, 'file')}",
                file=sys.stderr,
            )
            return DAMAGED
        print(f"{name} is complete: {_count(files, 'file')}, {size_text(total)} read and compared")
        return SOUND


# -- export -------------------------------------------------------------------------------------------------


def _add_export(commands: Any) -> None:
    parser = _add_command(commands, "export", _export, "Write the model for other programs")
    _add_source(parser)
    add = parser.add_argument
    add("out", help="a folder; or a file, for torch and for a name that ends in .safetensors")
    add("--to", choices=("safetensors", "torch", "dcp"), required=True, help="the format")
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of every floating-point tensor (default: the fp32 master, or unchanged without one)",
    )
    add(
        "--max-shard-size",
        metavar="5GB",
        help="largest size of one safetensors file (default: 5GB)",
    )
    add("--exclude-frozen", action="store_true", help="export only trained parameters, and buffers")
    add(
        "--with-optimizer",
        action="store_true",
        help='torch, dcp: {"model": ..., "optimizer": ...} with states by parameter',
    )
    bits = parser.add_mutually_exclusive_group()
    bits.add_argument(
        "--int8",
        dest="bits",
        action="store_const",
        const=8,
        help="safetensors: matrices in 8 bits, with a scale for each row, through torchao",
    )
    bits.add_argument(
        "--int4",
        dest="bits",
        action="store_const",
        const=4,
        help="safetensors: matrices in 4 bits, with a range for each 32 inputs; they run on GPUs",
    )
    add("--config", help="--int8, --int4: the model's config.json, written for from_pretrained")
    add(
        "--keep",
        metavar="REGEX",
        help="--int8, --int4: names of weights that stay whole (default: embed|wte|wpe|lm_head|norm)",
    )
    add("--overwrite", action="store_true", help="replace OUT; other files in the folder are kept")


def _export(args: argparse.Namespace) -> int:
    import torch

    from ..engine.checkpoint.exports.export import (
        ExportOptions,
        export_bytes,
        export_safetensors,
        export_torch,
    )

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    if args.to == "safetensors" and args.with_optimizer:
        raise UsageError(
            "--with-optimizer: safetensors files hold a model; use --to torch or --to dcp"
        )
    if args.to != "safetensors" and args.max_shard_size is not None:
        raise UsageError(
            f"--max-shard-size: --to {args.to} does not split files; use --to safetensors"
        )
    if args.bits is not None:
        return _export_quantized(args)
    if args.config is not None or args.keep is not None:
        raise UsageError("--config, --keep: they belong to --int8 and --int4; remove them")
    options = ExportOptions(
        dtype=dtypes[args.dtype],
        exclude_frozen=args.exclude_frozen,
        max_shard_bytes=parse_bytes("--max-shard-size", args.max_shard_size or "5GB"),
        with_optimizer=args.with_optimizer,
        overwrite=args.overwrite,
    )
    if args.to == "dcp":
        from ..engine.checkpoint.exports.dcp import export_dcp as write
    else:
        write = export_torch if args.to == "torch" else export_safetensors
    with _open(args) as reader:
        total = export_bytes(reader, options)
        with progress("export", total) as on_written:
            names = write(reader, Path(args.out), options.reporting_to(on_written))
    print(
        f"{printable(reader.folder)} -> {printable(args.out)}: "
        f"{size_text(total)} of tensors, {_count(len(names), 'file')}"
    )
    if args.to == "safetensors" and Path(args.out).is_dir():
        print(
            "to use from_pretrained, put the model's config.json and the tokenizer's files into the same folder"
        )
    return SOUND


def _export_quantized(args: argparse.Namespace) -> int:
    from ..engine.checkpoint.exports.quantized import KEPT, export_quantized

    others = ("dtype", "max_shard_size", "exclude_frozen", "with_optimizer")
    given = [name for name in others if getattr(args, name)]
    if args.to != "safetensors" or given or Path(args.out).suffix:
        raise UsageError(
            f"--int{args.bits}: it writes a folder; use --to safetensors and the name of a folder, without "
            "--dtype, --max-shard-size, --exclude-frozen and --with-optimizer"
        )
    with _open(args) as reader:
        text = export_quantized(
            reader,
            Path(args.out),
            args.bits,
            config=None if args.config is None else Path(args.config),
            keep=KEPT if args.keep is None else args.keep,
            overwrite=args.overwrite,
        )
    print(f"{printable(reader.folder)} -> {printable(args.out)}: {text}")
    return SOUND


# -- import -----------------------------------------------------------------------------------------------


def _add_import(commands: Any) -> None:
    text = "Convert a DeepSpeed checkpoint, a Hugging Face folder or a file of weights to a checkpoint of xds"
    parser = _add_command(commands, "import", _import, text)
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
        choices=_SOURCES,
        default="auto",
        help="the format of the source (default: detect)",
    )


def _import(args: argparse.Namespace) -> int:
    from ..engine.checkpoint.imports.importing import import_checkpoint

    report = import_checkpoint(args.source, args.save_dir, args.tag, args.kind)
    print(
        f"{printable(args.source)} ({printable(report.origin)}) -> {printable(report.folder)}: "
        f"{report.num_tensors} parameters and buffers, {report.numel:,} elements"
    )
    for note in report.notes:
        print(f"note: {escaped(note)}")
    return SOUND


# -- diff ---------------------------------------------------------------------------------------------------


def _add_diff(commands: Any) -> None:
    text = (
        "Compare two checkpoints, which may have different layouts; exits with 0 if they are equal"
    )
    parser = _add_command(commands, "diff", _diff, text)
    for name, which in (("a", "first"), ("b", "second")):
        parser.add_argument(name, help=f"the {which}: a save_dir, or the folder of one checkpoint")
    parser.add_argument("--tag-a", help="tag of the first (default: the one in `latest`)")
    parser.add_argument("--tag-b", help="tag of the second (default: the one in `latest`)")


def _diff(args: argparse.Namespace) -> int:
    from ..engine.checkpoint.io.reader import CheckpointReader
    from ..engine.checkpoint.tools.compare import compare_bytes, differences

    with CheckpointReader(args.a, args.tag_a) as a, CheckpointReader(args.b, args.tag_b) as b:
        count, largest = 0, 0.0
        with progress("diff", compare_bytes(a, b)) as on_read:
            for one in differences(a, b, on_read):
                print(f"{printable(one.name)}: {printable(one.text)}")
                count, largest = count + 1, max(largest, one.largest)
        equal = f"{printable(a.folder)} and {printable(b.folder)} are equal"
        most = f"; elements differ by at most {largest:.3g}" if largest else ""
        print(f"{_count(count, 'difference')}{most}" if count else equal)
        return DIFFERENT if count else EQUAL


def _count(number: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
