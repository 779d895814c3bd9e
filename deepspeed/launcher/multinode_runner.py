"""`deepspeed.launcher.multinode_runner`: the commands that start ranks on several hosts, to build and to read.

`main` of runner.py does not use them: the `xds` command has launchers of its own, with restarts and reports.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess as subprocess  # scripts and tests replace parts of it here
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from shlex import split
from typing import Any

from ...utils.errors import UsageError
from ..errors import methods_raise_theirs
from ..missing import placeholder
from ..utils.numa import bound_cores, numactl_options
from .constants import PDSH_MAX_FAN_OUT

_LAUNCH = "xds.deepspeed.launcher.launch"
_SAFE = re.compile(r"[\w@%+=:,./-]*")


class MultiNodeRunner(ABC):
    """Builds the command of one launcher.

    Args:
        args: what `parse_args` returned.
        world_info_base64: what `encode_world_info` returned.
        resource_pool: the number of slots of each host.
    """

    program = ""
    name = ""
    selects_hosts = False  # whether it takes --include, --exclude, --num_nodes and --num_gpus

    def __init__(
        self,
        args: argparse.Namespace,
        world_info_base64: str,
        resource_pool: Mapping[str, int] | None = None,
    ) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.resource_pool = dict(resource_pool or {})
        self.exports: dict[str, str] = {}

    def backend_exists(self) -> Any:
        """The path of the launcher's program; None where it is not installed."""
        return shutil.which(self.program)

    @abstractmethod
    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> Any:
        """The command, as a list of words."""

    def add_export(self, key: str, var: str) -> None:
        """Set a variable on the hosts. A value that a shell could interpret gets quotes."""
        value = var.strip()
        self.exports[key.strip()] = value if _SAFE.fullmatch(value) else f'"{value}"'

    def parse_user_args(self) -> list[str]:
        return list(self.args.user_args)

    def validate_args(self) -> None:
        """
        Raises:
            UsageError: the launcher cannot select hosts as asked.
        """
        given = self.args
        if self.selects_hosts or not hasattr(given, "include"):
            return
        if given.include or given.exclude or given.num_nodes != -1 or given.num_gpus != -1:
            raise UsageError(
                f"--launcher {self.name}: takes no --include, --exclude, --num_nodes and --num_gpus; give a "
                "hostfile of the hosts to use"
            )

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, Sequence[int]]) -> None:
        """
        Raises:
            UsageError: the launcher cannot use exactly these slots.
        """
        return None

    def python_words(self) -> list[str]:
        """The interpreter before the script, unless --no_python."""
        if self.args.no_python:
            return []
        return [sys.executable, "-u", *(["-m"] if self.args.module else [])]

    def script_words(self) -> list[str]:
        return [*self.python_words(), self.user_script, *self.user_arguments]

    def slots_of_each_host(self) -> int:
        """
        Raises:
            UsageError: hosts have different numbers of slots.
        """
        numbers = set(self.resource_pool.values())
        if len(numbers) != 1:
            raise UsageError(
                f"--launcher {self.name}: needs the same number of slots on every host; the hostfile has "
                f"{dict(self.resource_pool)}"
            )
        return int(numbers.pop())

    def rendezvous(self) -> dict[str, str]:
        """The variables that all ranks share."""
        return {
            "MASTER_ADDR": str(self.args.master_addr),
            "MASTER_PORT": str(self.args.master_port),
            "WORLD_SIZE": str(sum(self.resource_pool.values())),
            "LOCAL_SIZE": str(self.slots_of_each_host()),
        }


class PDSHRunner(MultiNodeRunner):
    """pdsh starts launch.py on each host."""

    program = name = "pdsh"
    selects_hosts = True

    def parse_user_args(self) -> list[str]:
        """pdsh's command passes a shell, which would split arguments with spaces."""
        quoted = '"{}"'.format
        return [
            quoted(word.replace('"', '\\"')) if " " in word else word
            for word in self.args.user_args
        ]

    def get_cmd(
        self, environment: dict[str, str], active_resources: Mapping[str, Any]
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """(the command, one that ends the ranks, the environment for both)."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            more = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{more} -p {self.args.ssh_port}".strip()
        pdsh = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", ",".join(active_resources)]
        pdsh += split(self.args.launcher_args)
        source = [] if self.args.venv_script is None else [f"source {self.args.venv_script};"]
        exports = [f"export {name}={value};" for name, value in self.exports.items()]
        launch = [sys.executable, "-u", "-m", _LAUNCH, f"--world_info={self.world_info_base64}"]
        flags = ("no_python", "module", "no_local_rank")
        words = [f"--{flag}" for flag in flags if getattr(self.args, flag)]
        words += ["--node_rank=%n", f"--master_addr={self.args.master_addr}"]
        words += [f"--master_port={self.args.master_port}"]
        if self.args.enable_each_rank_log != "None":
            words.append(f"--enable_each_rank_log={self.args.enable_each_rank_log}")
        folder = f"cd {os.path.abspath('.')};"
        command = [*pdsh, *source, *exports, folder, *launch, *words]
        kill = [*pdsh, "pkill", "-f", self.world_info_base64]
        return [*command, self.user_script, *self.user_arguments], kill, environment


class OpenMPIRunner(MultiNodeRunner):
    """Open MPI's mpirun starts every rank; the ranks use NCCL or gloo."""

    program = "ompi_info"
    name = "openmpi"

    def get_cmd(
        self, environment: dict[str, str], active_resources: Mapping[str, Any]
    ) -> list[str]:
        more = split(self.args.launcher_args)
        names = [
            word for word, before in zip(more[1:], more, strict=False) if before.endswith("-mca")
        ]
        network = [] if "btl_tcp_if_include" in names else ["--mca", "btl_tcp_if_include", "eth0"]
        command = ["mpirun", "-n", str(sum(self.resource_pool.values()))]
        command += ["-hostfile", self.args.hostfile, "--mca", "btl", "^openib", *network, *more]
        for name, value in self.exports.items():
            command += ["-x", f"{name}={value}"]
        return command + self.script_words()


class MPICHRunner(MultiNodeRunner):
    """MPICH's mpirun starts every rank."""

    program = "mpirun"
    name = "mpich"

    def get_cmd(
        self, environment: dict[str, str], active_resources: Mapping[str, Any]
    ) -> list[str]:
        total = str(sum(self.resource_pool.values()))
        command = ["mpirun", "-n", total, "-ppn", str(self.slots_of_each_host())]
        command += split(self.args.launcher_args)
        for name, value in {**self.exports, **self.rendezvous()}.items():
            command += ["-genv", name, value]
        return [*command, "-hosts", ",".join(self.resource_pool), *self.script_words()]


class IMPIRunner(MultiNodeRunner):
    """Intel MPI's mpirun starts every rank, each with its own variables and cores."""

    program = "mpirun"
    name = "impi"

    def get_cmd(
        self, environment: dict[str, str], active_resources: Mapping[str, Any]
    ) -> list[str]:
        each = self.slots_of_each_host()
        command = ["mpirun", "-ppn", str(each), *split(self.args.launcher_args)]
        variables = {**self.exports, **self.rendezvous(), "I_MPI_PIN": "0"}
        if self.args.bind_cores_to_rank:
            cores = bound_cores(self.args.bind_core_list, each, 0)
            variables["OMP_NUM_THREADS"] = str(len(cores))
        for name, value in variables.items():
            command += ["-genv", name, value]
        command += ["-hosts", ",".join(self.resource_pool)]
        for rank in range(sum(self.resource_pool.values())):
            command += [] if rank == 0 else [":"]
            command += [
                "-n",
                "1",
                "-env",
                "RANK",
                str(rank),
                "-env",
                "LOCAL_RANK",
                str(rank % each),
            ]
            command += self._binding(rank % each, each) + self.script_words()
        return command

    def _binding(self, local_rank: int, each: int) -> list[str]:
        if not self.args.bind_cores_to_rank:
            return []
        # numactl runs on the host of the rank, whose memory is not known here
        cores = bound_cores(self.args.bind_core_list, each, local_rank)
        return ["numactl", *numactl_options(cores, [])]


class SlurmRunner(MultiNodeRunner):
    """srun starts every rank."""

    program = "sinfo"
    name = "slurm"
    selects_hosts = True

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, Sequence[int]]) -> None:
        for host, slots in active_resources.items():
            if list(slots) != list(range(len(slots))):
                raise UsageError(
                    f"--launcher slurm: cannot select specific device ids, here {list(slots)} of {host}; name "
                    "whole hosts, or the first slots of each"
                )
        numbers = {host: len(slots) for host, slots in active_resources.items()}
        if len(set(numbers.values())) > 1:
            raise UsageError(
                f"--launcher slurm: needs the same slot count on every host, and the filter leaves {numbers}"
            )

    def get_cmd(
        self, environment: dict[str, str], active_resources: Mapping[str, Any]
    ) -> list[str]:
        self.validate_active_resources(active_resources)
        total = sum(len(slots) for slots in active_resources.values())
        command = ["srun", "-n", str(total), *split(self.args.launcher_args)]
        if self.args.include or self.args.exclude:
            command += ["--nodelist", ",".join(active_resources)]
            command += ["--nodes", str(len(active_resources))]
        if self.args.num_nodes > 0:
            command += ["--nodes", str(self.args.num_nodes)]
        if self.args.num_gpus > 0:
            command += ["--gpus-per-node", str(self.args.num_gpus)]
        exports = "".join(f",{name}={value}" for name, value in self.exports.items())
        return [*command, f"--export=ALL{exports}", *self.script_words()]


class MVAPICHRunner(MultiNodeRunner):
    """MVAPICH's mpirun starts every rank."""

    program = "mpiname"
    name = "mvapich"

    def get_cmd(
        self, environment: dict[str, str], active_resources: Mapping[str, Any]
    ) -> list[str]:
        total = str(sum(self.resource_pool.values()))
        command = ["mpirun", "-np", total, "-ppn", str(self.slots_of_each_host())]
        command += ["-hosts", ",".join(self.resource_pool), *split(self.args.launcher_args)]
        for name, value in {**self.exports, **self.rendezvous()}.items():
            command += ["-env", f"{name}={value}"]
        return command + self.script_words()


for _runner in (MultiNodeRunner, PDSHRunner, OpenMPIRunner, MPICHRunner, IMPIRunner, SlurmRunner):
    methods_raise_theirs(_runner)
methods_raise_theirs(MVAPICHRunner)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SlurmRunner",
]
