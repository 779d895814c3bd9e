"""Starts one process on each host with Open MPI's mpirun. The process itself does not call MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ....utils.sealing import RUN_KEY
from ...job import Host, Remote
from .base import AllAtOnce, check_host_name, refuse_other_program, shell_argv


@final
class OpenMpi(AllAtOnce):
    """`mpirun -n 2 --map-by ppr:1:node --host a:1,b:1 ...`, with no network and no transport named."""

    name = "openmpi"
    program = "mpirun"
    remedy = "install Open MPI on every host, or use --launcher ssh, which needs nothing but ssh"

    def check(self) -> None:
        """Raise a UsageError if mpirun is missing or does not belong to Open MPI."""
        super().check()
        refuse_other_program(self, not_these={"mpich": "HYDRA", "impi": "Intel(R) MPI"})

    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of mpirun, which passes the arguments unchanged, without a shell."""
        for host in hosts:
            check_host_name(host.name, also=", : + @ /")
        return [
            *(self.program, "-n", str(len(hosts)), "--map-by", "ppr:1:node"),
            *("--host", ",".join(f"{host.name}:1" for host in hosts)),
            *("--bind-to", "none"),  # otherwise all ranks of a host would be bound to one core
            *("--stdin", "none", "--quiet"),
            *("-x", RUN_KEY),  # the name; the value is not in the argv, which every user can read
            *remote.launcher_args,
            *shell_argv(remote, argv),
        ]
