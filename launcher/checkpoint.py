"""`xds checkpoint`: looks at checkpoints, proves them, takes models out of them; no ranks, no devices."""

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
from ..utils.quoting import escaped, plain_lines, printable
from ..utils.sizes import parse_bytes, size_text
from .checkpoint_import import add_import
from .command_line.parser import Parser

# what needs torch is imported when a command runs: `--help` and a typing mistake answer at once
if TYPE_CHECKING:
    from ..engine.checkpoint.io.reader import CheckpointReader

EQUAL, DIFFERENT, SOUND, DAMAGED, USAGE = 0, 1, 0, 1, 2
BAR_BYTES = 256 << 20  # from here on a progress bar is shown
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str]) -> int:
    """Run one command. 0; 1: damaged, or different (diff); 2: it cannot be done, and stderr says why."""
    asked = _parser().parse_args(list(argv))
    try:
        with _one_thread():
            code: int = asked.run(asked)
        return code
    except (UsageError, OSError) as error:
        print(f"xds checkpoint {asked.command}: {error}", file=sys.stderr)
        is_damaged = isinstance(error, DamagedError) and asked.command != "diff"
        return DAMAGED if is_damaged else USAGE


@contextmanager
def _one_thread() -> Iterator[None]:
    """Pieces are small, and sums have a thread of their own: more of torch would wait for one another."""
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
        description="Look at checkpoints of xds, prove them, take models out of them. One process, no devices.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_info, _add_verify, _add_export, add_import, _add_diff):
        add(commands)
    return parser


def add_command(commands: Any, name: str, run: Run, help: str) -> argparse.ArgumentParser:
    """A sub-command; `run` gets its arguments and returns the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help}.")
    parser.set_defaults(run=run)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", help="the save_dir of save_checkpoint, or the folder of one checkpoint"
    )
    parser.add_argument("--tag", help="which checkpoint (default: what `latest` names)")


def _open(asked: argparse.Namespace) -> CheckpointReader:
    from ..engine.checkpoint.io.reader import CheckpointReader

    return CheckpointReader(asked.dir, asked.tag)


@contextmanager
def progress(doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where there is much to do; told the bytes of each piece."""
    from tqdm import tqdm

    is_small = total_bytes < BAR_BYTES
    with tqdm(
        total=total_bytes, desc=doing, unit="B", unit_scale=True, disable=is_small or None
    ) as bar:
        yield lambda count: bar.update(count) and None


# -- info ---------------------------------------------------------------------------------------------------


def _add_info(commands: Any) -> None:
    parser = add_command(
        commands, "info", _info, "What is in a checkpoint, and which others there are"
    )
    _add_source(parser)
    parser.add_argument("--tensors", action="store_true", help="list parameters and buffers, too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _info(asked: argparse.Namespace) -> int:
    with _open(asked) as reader:
        facts = _facts(reader)
        tensors = [_tensor_facts(reader, name) for name in reader.values] if asked.tensors else None
    if asked.json:
        print(json.dumps(facts if tensors is None else {**facts, "tensors": tensors}, indent=2))
        return SOUND
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):{width}}  {escaped(_text(name, value))}")
    for one in tensors or ():
        states = f"  states {', '.join(one['states'])}" if one["states"] else ""
        kind = one["kind"] if one["kind"] != "param" or one["trains"] else "frozen"
        print(f"{kind:7} {printable(one['name'])} {one['shape']} {one['dtype']}{states}")
    return SOUND


def _facts(reader: CheckpointReader) -> dict[str, Any]:
    from ..engine.checkpoint.io.folders import committed

    manifest = reader.manifest
    values = list(reader.values.values())
    params = [one for one in values if one.kind != "buffer"]  # imported weights do not say
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
        "stage": manifest.stage,
        "size_bytes": sum(record.size_bytes for record in manifest.files),
        "num_files": len(manifest.files),
        "num_params": len(params),
        "num_buffers": len(values) - len(params),
        "params_numel": sum(one.numel for one in params),
        "trained_numel": sum(one.numel for one in params if one.trains),
        "dtypes": sorted({str(one.compute_dtype).removeprefix("torch.") for one in params}),
        "value_dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in params}),
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


def _text(name: str, value: Any) -> str:
    if name == "saved_seconds":
        return datetime.fromtimestamp(value).isoformat(" ", "seconds") if value else "not said"
    if name.endswith("_bytes"):
        return size_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{other} = {one}" for other, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# -- verify -------------------------------------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    text = "Read every byte of a checkpoint and compare it with its checksum; 1 if it is damaged"
    _add_source(add_command(commands, "verify", _verify, text))


def _verify(asked: argparse.Namespace) -> int:
    from ..engine.checkpoint.tools.verify import damage, size_bytes

    with _open(asked) as reader:
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
        print(f"{name} is whole: {_count(files, 'file')}, {size_text(total)} read and compared")
        return SOUND


# -- export -------------------------------------------------------------------------------------------------


def _add_export(commands: Any) -> None:
    parser = add_command(commands, "export", _export, "Write the model for other programs")
    _add_source(parser)
    add = parser.add_argument
    add("out", help="a folder; for torch, and with the ending .safetensors, a file")
    add("--to", choices=("safetensors", "torch", "dcp"), required=True, help="the format")
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of every floating tensor (default: the fp32 masters; what has none as it is)",
    )
    add("--max-shard-size", metavar="5GB", help="of one safetensors file (default: 5GB)")
    add("--exclude-frozen", action="store_true", help="only what trained, and buffers")
    add(
        "--with-optimizer",
        action="store_true",
        help='torch, dcp: {"model": ..., "optimizer": ...} with states by parameter',
    )
    add("--overwrite", action="store_true", help="replace OUT; other files in a folder stay")


def _export(asked: argparse.Namespace) -> int:
    import torch

    from ..engine.checkpoint.exports.export import (
        ExportOptions,
        export_bytes,
        export_safetensors,
        export_torch,
    )

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    if asked.to == "safetensors" and asked.with_optimizer:
        raise UsageError(
            "--with-optimizer: safetensors files hold a model; use --to torch or --to dcp"
        )
    if asked.to != "safetensors" and asked.max_shard_size is not None:
        raise UsageError(f"--max-shard-size: --to {asked.to} does not cut; use --to safetensors")
    options = ExportOptions(
        dtype=dtypes[asked.dtype],
        exclude_frozen=asked.exclude_frozen,
        max_shard_bytes=parse_bytes("--max-shard-size", asked.max_shard_size or "5GB"),
        with_optimizer=asked.with_optimizer,
        overwrite=asked.overwrite,
    )
    if asked.to == "dcp":
        from ..engine.checkpoint.exports.dcp import export_dcp as write
    else:
        write = export_torch if asked.to == "torch" else export_safetensors
    with _open(asked) as reader:
        total = export_bytes(reader, options)
        with progress("export", total) as on_written:
            names = write(reader, Path(asked.out), options.reporting_to(on_written))
    print(
        f"{printable(reader.folder)} -> {printable(asked.out)}: "
        f"{size_text(total)} of tensors, {_count(len(names), 'file')}"
    )
    if asked.to == "safetensors" and Path(asked.out).is_dir():
        print(
            "for from_pretrained put the model's config.json, and the tokenizer's files, beside them"
        )
    return SOUND


# -- diff ---------------------------------------------------------------------------------------------------


def _add_diff(commands: Any) -> None:
    text = "How two checkpoints differ, whatever their layouts; 0 if they do not"
    parser = add_command(commands, "diff", _diff, text)
    for name, which in (("a", "first"), ("b", "second")):
        parser.add_argument(name, help=f"the {which}: a save_dir, or the folder of one checkpoint")
    parser.add_argument("--tag-a", help="which of the first (default: what `latest` names)")
    parser.add_argument("--tag-b", help="which of the second (default: what `latest` names)")


def _diff(asked: argparse.Namespace) -> int:
    from ..engine.checkpoint.io.reader import CheckpointReader
    from ..engine.checkpoint.tools.compare import compare_bytes, differences

    with CheckpointReader(asked.a, asked.tag_a) as a, CheckpointReader(asked.b, asked.tag_b) as b:
        count = 0
        with progress("diff", compare_bytes(a, b)) as on_read:
            for one in differences(a, b, on_read):
                print(f"{printable(one.name)}: {printable(one.text)}")
                count += 1
        print(f"{count} differences" if count else f"{a.folder} and {b.folder} hold the same")
        return DIFFERENT if count else EQUAL


def _count(number: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
