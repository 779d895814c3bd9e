"""`python -m xds` is the command `xds`, where the environment's scripts are not on PATH."""

from __future__ import annotations

import os
import sys

from .launcher.cli import main

if __name__ == "__main__":
    # python -m puts the working folder there, where a file may have the name of a standard module
    if sys.path and os.path.realpath(sys.path[0]) == os.getcwd():
        del sys.path[0]
    sys.exit(main())
