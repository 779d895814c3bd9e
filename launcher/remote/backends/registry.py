"""The backends by the names that `--launcher` accepts."""

from __future__ import annotations

from ....utils.errors import UsageError
from ....utils.quoting import printable
from .base import Backend
from .mpich import IntelMpi, Mpich
from .openmpi import OpenMpi
from .pdsh import Pdsh
from .slurm import Slurm
from .ssh import Ssh

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Ssh(), Pdsh(), Slurm(), OpenMpi(), Mpich(), IntelMpi())
}


def backend_named(name: str) -> Backend:
    """The backend of that name, after a check that its program exists.

    Raises:
        UsageError: there is no such backend, or its program is missing on this machine.
    """
    if name == "mvapich":
        raise UsageError(
            "--launcher = mvapich: its mpirun_rsh is not supported, but its mpiexec is that of MPICH;"
            " add that to PATH and set --launcher mpich, or use --launcher ssh with the same hostfile"
        )
    if name not in BACKENDS:
        raise UsageError(f"--launcher = {printable(name)}: must be one of {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    backend.check()
    return backend
