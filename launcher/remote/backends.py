"""The programs that start node processes on hosts: ssh for each host, or one command that reaches all hosts.

The argv of a node process passes through the user's login shell on the host, which may be csh or fish. So that
shell gets one line without characters that the shells treat differently. The line starts /bin/sh, which reads
the rest. Arguments arrive unchanged. The last `exec` replaces the shell, so the process that ssh or srun
monitors is the node process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.sealing import RUN_KEY
from ..job import Host, Remote

# ssh(1) since 9.6 refuses these in a name, because ProxyCommand and Match exec pass it to a shell
_UNSAFE_HOST = re.compile(r"-|.*[\s\0-\x1f\x7f\\\"'`$<>;&|(){}]", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# characters that sh, csh and fish read in the same way between single quotes
_PLAIN = re.compile(r"[ -~]*")
_NOT_PLAIN = re.compile(r"[^ -~]|[!\\']")
# variables that are needed before Python starts; all others are in the order, so `ps` does not show them
_EARLY = re.compile(r"PYTHON\w*|LD_LIBRARY_PATH|LD_PRELOAD")

_NUL = "the command for other hosts contains a NUL character, which is not possible; remove it"
# MPI's variables first: in a Slurm job MPI processes see both, and Slurm's belongs to another step
_INDEX_KEYS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_VERSION_SECONDS = 10.0
_INDEX_MARK = "XDSINDEXOFHOST"  # pdsh's %n takes its place
# variables that every process needs, in addition to the forwarded ones
_BASIC_KEYS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "TERM"),
    RUN_KEY,
)


class LaunchBackend(ABC):
    """A way to start node processes on hosts."""

    name: str

    @property
    @abstractmethod
    def program(self) -> str:
        """The local program that starts them: a name in PATH, or a path."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """What to do if the program is missing."""

    def check(self) -> None:
        """Raise a UsageError with the remedy if the program is missing."""
        if shutil.which(self.program) is None:
            raise UsageError(
                f"--launcher = {self.name}: no program {self.program!r} here; {self.remedy}"
            )


class PerHost(LaunchBackend):
    """One local process for each host, whose standard streams are those of the node process."""

    @abstractmethod
    def command(self, host: Host, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of the local process that runs `argv` on `host`."""


class AllAtOnce(LaunchBackend):
    """One local process for all hosts; the orders of all hosts are in `argv`."""

    @abstractmethod
    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of the local process that runs `argv` once on each of `hosts`."""

    def environment(self, remote: Remote) -> dict[str, str]:
        """Variables that this local process needs in addition to those of the launcher."""
        return {}


def node_index(environ: Mapping[str, str]) -> int | None:
    """The index of this host from the variables of Slurm or MPI, read on the host; None if there are none."""
    for key in _INDEX_KEYS:
        value = environ.get(key, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return None


def check_host_name(name: str, also: str = "") -> None:
    """Raise a UsageError for a host name that a shell could interpret, or that looks like an option.

    Args:
        also: more characters that this backend's program treats specially.
    """
    if "@" in name and "@" in also:
        raise UsageError(
            f"host = {name!r}: not a valid host name for this launcher: user@host works with --launcher ssh "
            "and pdsh; write the host alone, or choose one of them"
        )
    if not name or _UNSAFE_HOST.match(name) or any(char in name for char in also):
        raise UsageError(
            f"host = {name!r}: not a valid host name; it must not begin with - or contain blanks, quotes or"
            f" any of \\ $ < > ; & | ( ) {{ }} {' '.join(also)}".rstrip()
            + "; correct the list of hosts"
        )


def remote_script(remote: Remote, argv: Sequence[str]) -> str:
    """The script that /bin/sh runs on the host: changes the folder, sources `venv_script`, executes `argv`."""
    parts = [f"cd {shlex.quote(_as_path(remote.folder))}"] if remote.folder else []
    if remote.venv_script:
        script = shlex.quote(_as_path(remote.venv_script))
        missing = shlex.quote(f"xds: --venv_script {remote.venv_script}: no such file here")
        parts.append(f"[ -r {script} ] || {{ echo {missing} >&2; exit 2; }}")
        parts.append(f". {script}")
    # PYTHONSAFEPATH: modules in the working folder must not hide standard modules in the node process
    early = {key: value for key, value in remote.environment.items() if _EARLY.fullmatch(key)}
    early["PYTHONSAFEPATH"] = "1"
    assigned = " ".join(f"{key}={shlex.quote(value)}" for key, value in early.items())
    parts += [f"export {assigned}", f"exec {shlex.join(argv)}"]
    return "; ".join(parts)


def shell_line(remote: Remote, argv: Sequence[str]) -> str:
    """One line for any login shell (sh, csh or fish) that runs `argv` through /bin/sh.

    Raises:
        UsageError: the script contains a NUL, which a command line cannot contain.
    """
    script = remote_script(remote, argv)
    if "\0" in script:
        raise UsageError(_NUL)
    text = _NOT_PLAIN.sub(_octal, script)
    if not remote.venv_script and text == script:
        return f"exec /bin/sh -c '{script}'"
    # scripts that set up environments are usually written for bash
    bash = "command -v bash >/dev/null && exec bash -c " if remote.venv_script else ""
    unpacked = '"$(printf %b "$1")"'
    first = f"{bash}{unpacked}; " if bash else ""
    return f"exec /bin/sh -c '{first}eval {unpacked}' sh '{text}'"


def shell_argv(remote: Remote, argv: Sequence[str]) -> list[str]:
    """The same as `shell_line`, for a program that passes an argv unchanged, without a shell."""
    script = remote_script(remote, argv)
    if "\0" in script:
        raise UsageError(_NUL)
    if remote.venv_script:
        bash = 'command -v bash >/dev/null && exec bash -c "$1"; eval "$1"'
        return ["/bin/sh", "-c", bash, "sh", script]
    return ["/bin/sh", "-c", script]


def refuse_other_program(backend: LaunchBackend, not_these: Mapping[str, str]) -> None:
    """Raise a UsageError if the program belongs to another backend.

    Args:
        not_these: backend to a text in the output of its program's `--version`.
    """
    try:
        done = subprocess.run(
            [backend.program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return  # the run itself will report the error
    version_text = (done.stdout + done.stderr).decode(errors="replace")
    for name, marker in not_these.items():
        if marker in version_text:
            raise UsageError(
                f"--launcher = {backend.name}: {backend.program} belongs to another MPI; set --launcher {name},"
                f" or {backend.remedy}"
            )


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise a UsageError for a variable that no shell can set."""
    for key, value in environment.items():
        if not _VARIABLE.fullmatch(key) or "\0" in value:
            raise UsageError(f"environment variable {key!r}: a shell cannot set it; remove it")


def _octal(match: re.Match[str]) -> str:
    data = match.group().encode("utf-8", "surrogateescape")
    return "".join(f"\\0{byte:03o}" for byte in data)


def _as_path(path: str) -> str:
    """A path that is not taken for an option, and not searched in PATH."""
    return path if path.startswith("/") else f"./{path}"


# -- one process for each host --------------------------------------------------------------------------------


CONNECT_SECONDS = 10
ALIVE_SECONDS = 5
ALIVE_COUNT = 3


@final
class Ssh(PerHost):
    """`ssh HOST 'exec /bin/sh -c ...'`. `XDS_SSH` names another program with the same arguments."""

    name = "ssh"
    remedy = (
        "install OpenSSH's client, or set XDS_SSH to the path of a program with the same arguments"
    )

    @property
    def program(self) -> str:
        """The path in XDS_SSH, or ssh."""
        return os.environ.get("XDS_SSH") or "ssh"

    def command(self, host: Host, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of ssh. ssh uses the first setting of an option, so the user's come first."""
        check_host_name(host.name)
        return [
            self.program,
            *remote.launcher_args,
            "-T",
            *(["-p", str(remote.ssh_port)] if remote.ssh_port else []),
            *_ssh_options(),
            "--",
            host.name,
            shell_line(remote, argv),
        ]


def _ssh_options() -> list[str]:
    """Options for ssh: no prompts, timeouts, log only errors, no forwarding, no shared connection."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "LogLevel": "ERROR",
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",  # a shared connection would keep our streams open
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


# -- one process for all hosts --------------------------------------------------------------------------------


@final
class Pdsh(AllAtOnce):
    """`pdsh -R ssh -w a,b LINE`. The ranks wait for each other, so the fan-out is the number of hosts."""

    name = "pdsh"
    program = "pdsh"
    remedy = "install pdsh, or use --launcher ssh, which needs nothing but ssh"

    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of pdsh. It replaces %n by the host's index, and %% by a percent sign."""
        for host in hosts:
            check_host_name(host.name, also=", [ ] ^ / : %")
        line = shell_line(remote, [*argv, "--index", _INDEX_MARK]).replace("%", "%%")
        return [
            *(self.program, "-R", "ssh", "-S", "-N", "-b"),  # -b: the first Ctrl-C ends it
            *("-f", str(len(hosts))),
            *remote.launcher_args,
            *("-w", ",".join(host.name for host in hosts)),
            line.replace(_INDEX_MARK, "%n"),
        ]

    def environment(self, remote: Remote) -> dict[str, str]:
        """The options for ssh, after those of the user."""
        users = os.environ.get("PDSH_SSH_ARGS_APPEND", "").split()
        port = ["-p", str(remote.ssh_port)] if remote.ssh_port else []
        return {"PDSH_SSH_ARGS_APPEND": " ".join([*users, "-T", *port, *_ssh_options()])}


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
        check_environment(remote.environment)
        names = [*_BASIC_KEYS, *(key for key in remote.environment if key not in _BASIC_KEYS)]
        return [
            *(
                self.program,
                f"--nodes={len(hosts)}",
                f"--ntasks={len(hosts)}",
                "--ntasks-per-node=1",
            ),
            *("--kill-on-bad-exit=1", "--input=none"),
            "--cpu-bind=none",  # otherwise the task, and so every rank, may be bound to one core
            "--overlap",  # otherwise, inside `srun --pty bash`, the step would wait for the end of that shell
            f"--export={','.join(names)}",
            f"--nodelist={','.join(host.name for host in hosts)}",
            *remote.launcher_args,
            *shell_argv(remote, argv),
        ]

    def environment(self, remote: Remote) -> dict[str, str]:
        """The values of the variables in `--export`. Not in the argv, which every user can read."""
        return dict(remote.environment)


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
        names = [*_BASIC_KEYS, *(key for key in remote.environment if key not in _BASIC_KEYS)]
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


BACKENDS: dict[str, LaunchBackend] = {
    backend.name: backend for backend in (Ssh(), Pdsh(), Slurm(), OpenMpi(), Mpich(), IntelMpi())
}


def backend_named(name: str) -> LaunchBackend:
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
