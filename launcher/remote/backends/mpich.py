"""MPICH's and Intel MPI's mpiexec (both are hydra) as a way to start one process on each host."""

from __future__ import annotations

import shutil
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import final

from ...job import Host, Remote
from .base import AllAtOnce, check_environment, check_host_name, refuse_other_program, shell_argv
from .slurm import BASIC_KEYS


class Hydra(AllAtOnce, ABC):
    """`mpiexec -n 2 -ppn 1 -hosts a,b ...`; `others` tells the programs that are no such mpiexec."""

    others: Mapping[str, str]

    @property
    def program(self) -> str:
        """mpiexec.hydra where it is there: mpiexec may be another MPI's."""
        return "mpiexec.hydra" if shutil.which("mpiexec.hydra") else "mpiexec"

    def check(self) -> None:
        """Raise a UsageError where mpiexec is missing, or is another MPI's."""
        super().check()
        refuse_other_program(self, not_these=self.others)

    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of mpiexec; it hands the words over as they are, without a shell."""
        for host in hosts:
            check_host_name(host.name, also=", : @ /")
        check_environment(remote.environment)
        names = [*BASIC_KEYS, *(key for key in remote.environment if key not in BASIC_KEYS)]
        return [
            *(self.program, "-n", str(len(hosts)), "-ppn", "1"),
            *("-hosts", ",".join(host.name for host in hosts)),
            *("-genvlist", ",".join(names)),  # else everything here would go along
            *self._more(),
            *remote.launcher_args,
            *shell_argv(remote, argv),
        ]

    def environment(self, remote: Remote) -> dict[str, str]:
        """The values of what `-genvlist` names: never in the argv, which everybody can read."""
        return dict(remote.environment)

    def _more(self) -> list[str]:
        return []


@final
class Mpich(Hydra):
    """MPICH's own."""

    name = "mpich"
    remedy = "install MPICH on every host, or use --launcher ssh, which needs nothing but ssh"
    others = {"openmpi": "Open MPI", "impi": "Intel(R) MPI"}


@final
class IntelMpi(Hydra):
    """The same program with habits of its own: it pins processes, and follows a scheduler before -ppn."""

    name = "impi"
    remedy = "source Intel MPI's vars.sh, or use --launcher ssh, which needs nothing but ssh"
    others = {"openmpi": "Open MPI", "mpich": "HYDRA build details"}

    def environment(self, remote: Remote) -> dict[str, str]:
        """As MPICH's, and one process a host inside a scheduler's job too."""
        return {**remote.environment, "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"}

    def _more(self) -> list[str]:
        return ["-genv", "I_MPI_PIN", "0"]
