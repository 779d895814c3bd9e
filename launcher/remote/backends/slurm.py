"""Slurm: one srun with one task on each host of the allocation. Without an allocation srun requests one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ....utils.errors import UsageError
from ....utils.sealing import RUN_KEY
from ...job import Host, Remote
from .base import AllAtOnce, check_environment, check_host_name, shell_argv

# variables that every process needs, in addition to the forwarded ones
BASIC_KEYS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "TERM"),
    RUN_KEY,
)


@final
class Slurm(AllAtOnce):
    """`srun --nodelist a,b --ntasks-per-node 1 ...`. Later options take precedence, so the user's come last."""

    name = "slurm"
    program = "srun"
    remedy = "run it where Slurm's commands are, on a login node or inside sbatch or salloc"

    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of srun. Slurm numbers the hosts differently, so orders are found by host name."""
        for host in hosts:
            check_host_name(host.name, also=", [ ] / : @ %")
        return [
            *_srun(len(hosts), remote),
            f"--nodelist={','.join(host.name for host in hosts)}",
            *remote.launcher_args,
            *shell_argv(remote, argv),
        ]

    def own_allocation(self, num_nodes: int, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of an srun that requests `num_nodes` machines and runs `argv` once on each.

        The machines are not known yet, so `argv` does not start a node process. It starts xds itself without
        its options about hosts, which takes the rendezvous from Slurm's variables (cluster_environment.py).
        """
        if num_nodes < 1:
            raise UsageError(
                "--launcher slurm outside of an allocation: set the number of machines with --num_nodes N,"
                " or run it inside sbatch or salloc"
            )
        return [*_srun(num_nodes, remote), *remote.launcher_args, *shell_argv(remote, argv)]

    def environment(self, remote: Remote) -> dict[str, str]:
        """The values of the variables in `--export`. Not in the argv, which every user can read."""
        return dict(remote.environment)


def _srun(num_nodes: int, remote: Remote) -> list[str]:
    check_environment(remote.environment)
    names = [*BASIC_KEYS, *(key for key in remote.environment if key not in BASIC_KEYS)]
    return [
        "srun",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--cpu-bind=none",  # otherwise the task, and so every rank, may be bound to one core
        "--overlap",  # otherwise, inside `srun --pty bash`, the step would wait for the end of that shell
        f"--export={','.join(names)}",
    ]
