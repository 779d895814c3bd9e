"""`deepspeed.checkpoint.ds_to_universal`: a checkpoint that loads at any stage and number of ranks.

A checkpoint of xds does so as it is, and is copied. One of DeepSpeed is imported.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from ....utils.errors import UsageError
from ....utils.small_files import replace_small_file
from ...checkpoint.exports.publish import published
from ...checkpoint.imports.deepspeed import is_deepspeed
from ...checkpoint.imports.importing import DEEPSPEED, import_checkpoint
from ...checkpoint.io.folders import MANIFEST
from ..errors import raises_theirs
from ..training.checkpoints import LATEST_UNIVERSAL


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments of DeepSpeed's script. The numbers of workers have no effect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_folder", required=True, help="the folder of one tag")
    parser.add_argument("--output_folder", required=True, help="the folder to write")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="without effect")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="without effect")
    parser.add_argument("--keep_temp_folder", action="store_true", help="without effect")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="without effect")
    parser.add_argument("--inject_missing_state", action="store_true", help="without effect")
    return parser.parse_args(argv)


@raises_theirs
def main(args: Any = None) -> None:
    """Write `args.output_folder`, and name it in `latest_universal` beside it. One process does it.

    Args:
        args: has `input_folder` (of one tag) and `output_folder`; None: those of the command line.
    Raises:
        UsageError: there is no checkpoint in input_folder, or output_folder exists and has files.
    """
    args = parse_arguments() if args is None else args
    source, out = Path(args.input_folder), Path(args.output_folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"output_folder = {out} exists already: remove it, or give another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    if (source / MANIFEST).is_file():
        _copy(source, out)
    elif is_deepspeed(source):
        _import(source, out)
    else:
        raise UsageError(
            f"input_folder = {source} is not a checkpoint: give the folder of one tag, which has "
            f"{MANIFEST} (xds) or *_model_states.pt (DeepSpeed)"
        )
    replace_small_file(out.parent / LATEST_UNIVERSAL, out.name)


def _copy(source: Path, out: Path) -> None:
    """Link the files, or copy them where the file system has no links; the folder appears whole."""
    with published(out, is_folder=True, overwrite=False) as part:
        shutil.copytree(source, part, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, out: str) -> None:
    try:
        os.link(source, out)
    except OSError:
        shutil.copy2(source, out)


def _import(source: Path, out: Path) -> None:
    """Import a checkpoint of DeepSpeed under the name of `out`."""
    with published(out, is_folder=True, overwrite=False) as part:
        made = import_checkpoint(source, part / "import", kind=DEEPSPEED)
        for path in made.folder.iterdir():
            os.replace(path, part / path.name)
        shutil.rmtree(part / "import")


if __name__ == "__main__":
    main()
