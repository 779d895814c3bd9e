"""The base classes of backends, which make the argv that starts a node process on a host, with correct quoting.

The argv passes through the user's login shell on the host, which may be csh or fish. So that shell gets one
line without characters that the shells treat differently. The line starts /bin/sh, which reads the rest.
Arguments arrive unchanged. The last `exec` replaces the shell, so the process that ssh or srun monitors is
the node process.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ....utils.errors import UsageError
from ...job import Host, Remote

# ssh(1) since 9.6 refuses these in a name, because ProxyCommand and Match exec pass it to a shell
_UNSAFE_HOST = re.compile(r"-|.*[\s\0-\x1f\x7f\\\"'`$<>;&|(){}]", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# characters that sh, csh and fish read in the same way between single quotes
_PLAIN = re.compile(r"[ -~]*")
_NOT_PLAIN = re.compile(r"[^ -~]|[!\\']")
# variables that are needed before Python starts; all others are in the order, so `ps` does not show them
_EARLY = re.compile(r"PYTHON\w*|LD_LIBRARY_PATH|LD_PRELOAD")

# MPI's variables first: in a Slurm job MPI processes see both, and Slurm's belongs to another step
_NUL = "the command for other hosts contains a NUL character, which is not possible; remove it"
_INDEX_KEYS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_VERSION_SECONDS = 10.0


class Backend(ABC):
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


class PerHost(Backend):
    """One local process for each host, whose standard streams are those of the node process."""

    @abstractmethod
    def command(self, host: Host, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of the local process that runs `argv` on `host`."""


class AllAtOnce(Backend):
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


def refuse_other_program(backend: Backend, not_these: Mapping[str, str]) -> None:
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
