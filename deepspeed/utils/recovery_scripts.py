"""The scripts that DeepSpeed puts beside a checkpoint: `python zero_to_fp32.py . out` writes plain weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ...utils.version import __version__

_TO_FP32 = f'''#!/usr/bin/env python
"""Writes the fp32 weights of the checkpoint in this folder: python zero_to_fp32.py . output_dir

Written by xds {__version__}, which must be installed.
"""

from xds.deepspeed.utils.zero_to_fp32 import (
    OUTPUT_DTYPE_NAMES,
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

if __name__ == "__main__":
    main()
'''


def write_recovery_scripts(folder: Path) -> None:
    """Write the scripts into `folder`, unless they are there."""
    to_torch = Path(__file__).with_name("zero_to_torch.py").read_text()
    for name, text in (("zero_to_fp32.py", _TO_FP32), ("zero_to_torch.py", to_torch)):
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            make_executable(path)


def make_executable(path: Path) -> OSError | None:
    """Let the owner run `path`. Returns the error where that cannot be, as on some file shares."""
    try:
        path.chmod(os.stat(path).st_mode | stat.S_IEXEC)
    except OSError as error:
        return error
    return None


__all__ = ["make_executable", "write_recovery_scripts"]
