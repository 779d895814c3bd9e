"""A command named `deepspeed` for `accelerate launch` on several machines, where none is installed.

accelerate runs `deepspeed --hostfile ...` there. xds installs no such command: it would hide a real one.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from .. import stand_in

COMMAND = "deepspeed"
CALLER = "accelerate.commands.launch"
# first: the working folder, from which Python would import, may have files of other users
_SAFE = "import sys; sys.path[:] = filter(None, sys.path)"
START = f"{_SAFE}; from xds.deepspeed.launcher.runner import main; main()"


def put_command_on_path() -> None:
    """Put a folder with the command on PATH, in a process of `accelerate launch`, until it ends."""
    if CALLER not in sys.modules or not stand_in.is_active() or shutil.which(COMMAND):
        return
    folder = Path(tempfile.mkdtemp(prefix="xds_command_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = folder / COMMAND
    line = f'exec {shlex.quote(sys.executable)} -c {shlex.quote(START)} "$@"'
    command.write_text(f"#!/bin/sh\n{line}\n")
    command.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


__all__ = ["put_command_on_path"]
