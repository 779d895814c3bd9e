"""`deepspeed.launcher.constants`: names of launchers."""

from __future__ import annotations

from typing import Any

from ..missing import placeholder

PDSH_LAUNCHER = "pdsh"
PDSH_MAX_FAN_OUT = 1024
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
