"""The ways to start the node part on other machines, by the names that `--launcher` takes."""

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
    """The backend of that name, whose program is there.

    Raises:
        UsageError: there is no such backend, or this machine has not got its program.
    """
    if name == "mvapich":
        raise UsageError(
            "--launcher = mvapich: its mpirun_rsh is not covered, but its mpiexec is that of MPICH;"
            " put that into PATH and give --launcher mpich, or use --launcher ssh with the same hostfile"
        )
    if name not in BACKENDS:
        raise UsageError(f"--launcher = {printable(name)}: must be one of {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    backend.check()
    return backend
