"""Slurm: one srun, one task on each host of the allocation; without an allocation, srun asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ....utils.errors import UsageError
from ...job import Host, Remote
from .base import AllAtOnce, check_environment, check_host_name, shell_argv

# what a process needs to find itself at home, besides what the user has go along
BASIC_KEYS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "TERM")


@final
class Slurm(AllAtOnce):
    """`srun --nodelist a,b --ntasks-per-node 1 ...`; later options win, so the user's come last."""

    name = "slurm"
    program = "srun"
    remedy = "run it where Slurm's commands are, on a login node or inside sbatch or salloc"

    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of srun. Slurm numbers hosts in an order of its own: the orders are found by name."""
        for host in hosts:
            check_host_name(host.name, also=", [ ] / : @ %")
        return [
            *_srun(len(hosts), remote),
            f"--nodelist={','.join(host.name for host in hosts)}",
            *remote.launcher_args,
            *shell_argv(remote, argv),
        ]

    def own_allocation(self, num_nodes: int, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of an srun that asks for `num_nodes` machines and runs `words` once on each.

        Nobody knows yet which machines these will be, so `words` are no node part: they are xds itself,
        without its options about hosts, and find each other by what Slurm tells them (surroundings.py).
        """
        if num_nodes < 1:
            raise UsageError(
                "--launcher slurm outside of an allocation: say how many machines to ask for, --num_nodes N,"
                " or run it inside sbatch or salloc"
            )
        return [*_srun(num_nodes, remote), *remote.launcher_args, *shell_argv(remote, argv)]

    def environment(self, remote: Remote) -> dict[str, str]:
        """The values of what `--export` names: never in the argv, which everybody can read."""
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
        "--cpu-bind=none",  # else the one task, and so every rank, may be held on one core
        "--overlap",  # inside `srun --pty bash` the step would wait for that shell's end
        f"--export={','.join(names)}",
    ]
