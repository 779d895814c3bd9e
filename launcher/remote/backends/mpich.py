"""Starts one process on each host with the mpiexec of MPICH or Intel MPI (both are Hydra)."""

from __future__ import annotations

import shutil
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import final

from ...job import Host, Remote
from .base import AllAtOnce, check_environment, check_host_name, refuse_other_program, shell_argv
from .slurm import BASIC_KEYS


class Hydra(AllAtOnce, ABC):
    """`mpiexec -n 2 -ppn 1 -hosts a,b ...`. `others` identifies programs of other MPIs."""

    others: Mapping[str, str]

    @property
    def program(self) -> str:
        """mpiexec.hydra if it exists, because mpiexec may belong to another MPI."""
        return "mpiexec.hydra" if shutil.which("mpiexec.hydra") else "mpiexec"

    def check(self) -> None:
        """Raise a UsageError if mpiexec is missing or belongs to another MPI."""
        super().check()
        refuse_other_program(self, not_these=self.others)

    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of mpiexec, which passes the arguments unchanged, without a shell."""
        for host in hosts:
            check_host_name(host.name, also=", : @ /")
        check_environment(remote.environment)
        names = [*BASIC_KEYS, *(key for key in remote.environment if key not in BASIC_KEYS)]
        return [
            *(self.program, "-n", str(len(hosts)), "-ppn", "1"),
            *("-hosts", ",".join(host.name for host in hosts)),
            *("-genvlist", ",".join(names)),  # otherwise all variables would be forwarded
            *self._more(),
            *remote.launcher_args,
            *shell_argv(remote, argv),
        ]

    def environment(self, remote: Remote) -> dict[str, str]:
        """The values of the variables in `-genvlist`. Not in the argv, which every user can read."""
        return dict(remote.environment)

    def _more(self) -> list[str]:
        return []


@final
class Mpich(Hydra):
    """The mpiexec of MPICH."""

    name = "mpich"
    remedy = "install MPICH on every host, or use --launcher ssh, which needs nothing but ssh"
    others = {"openmpi": "Open MPI", "impi": "Intel(R) MPI"}


@final
class IntelMpi(Hydra):
    """The mpiexec of Intel MPI, which by default pins processes and prefers a scheduler's layout to -ppn."""

    name = "impi"
    remedy = "source Intel MPI's vars.sh, or use --launcher ssh, which needs nothing but ssh"
    others = {"openmpi": "Open MPI", "mpich": "HYDRA build details"}

    def environment(self, remote: Remote) -> dict[str, str]:
        """As for MPICH, and one process per host inside a scheduler's job too."""
        return {**remote.environment, "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"}

    def _more(self) -> list[str]:
        return ["-genv", "I_MPI_PIN", "0"]
