"""Test helper: runs a whole script in a rank that is already there, instead of a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def run_script(path: str, folder: str, *options: str) -> None:
    """Execute the file as `python path options` does, in `folder`. The process goes on in its old folder."""
    argv, here = sys.argv, Path.cwd()
    names = {"__name__": "__main__", "__file__": path, "__doc__": "A script."}
    sys.argv = [path, *options]
    os.chdir(folder)
    try:
        exec(compile(Path(path).read_text(), path, "exec"), names)
    finally:
        sys.argv = argv
        os.chdir(here)
