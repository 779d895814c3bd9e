"""What every backend is: a way to make the argv that runs the node part elsewhere, whatever the words hold.

Between that argv and the interpreter on the other machine stand shells that nobody chose: the user's login
shell there may be csh or fish. So what they get to read is one line without anything that any of them treats
in a way of its own; it starts /bin/sh, which reads the rest. Words arrive literally, and the last `exec` makes
the process that the far end watches the node part itself.
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

# ssh(1) since 9.6 refuses these in a name, because ProxyCommand and Match exec hand it to a shell
_UNSAFE_HOST = re.compile(r"-|.*[\s\0-\x1f\x7f\\\"'`$<>;&|(){}]", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# what a line may hold between single quotes so that sh, csh and fish read the same
_PLAIN = re.compile(r"[ -~]*")
_NOT_PLAIN = re.compile(r"[^ -~]|[!\\']")
# variables that matter before the first line of Python; all others are in the order, unseen by `ps`
_EARLY = re.compile(r"PYTHON\w*|LD_LIBRARY_PATH|LD_PRELOAD")

# MPI's first: inside a job of Slurm's its processes see both, and Slurm's is then that of another step
_NUL = "the command for other hosts holds a NUL character, which no argument can; take it out"
_INDEX_KEYS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_VERSION_SECONDS = 10.0


class Backend(ABC):
    """A way to start the node part on hosts."""

    name: str

    @property
    @abstractmethod
    def program(self) -> str:
        """The local program that does it: a name in PATH, or a path."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """What to do where the program is missing."""

    def check(self) -> None:
        """Raise a UsageError with the remedy where the program is missing."""
        if shutil.which(self.program) is None:
            raise UsageError(
                f"--launcher = {self.name}: no program {self.program!r} here; {self.remedy}"
            )


class PerHost(Backend):
    """One local process for each host, whose standard streams are those of the node part."""

    @abstractmethod
    def command(self, host: Host, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of the local process that runs `words` on `host`."""


class AllAtOnce(Backend):
    """One local process for all hosts; the orders of all are in `words`."""

    @abstractmethod
    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of the local process that runs `words` once on each of `hosts`."""

    def environment(self, remote: Remote) -> dict[str, str]:
        """Variables that this local process needs besides the launcher's own."""
        return {}


def node_index(environ: Mapping[str, str]) -> int | None:
    """Read on a node: its place among the hosts, from what Slurm or MPI set; None where neither did."""
    for key in _INDEX_KEYS:
        value = environ.get(key, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return None


def check_host_name(name: str, also: str = "") -> None:
    """Raise a UsageError for a host name that a shell or an option could make something else of.

    Args:
        also: further characters that this backend's program treats specially.
    """
    if not name or _UNSAFE_HOST.match(name) or any(char in name for char in also):
        raise UsageError(
            f"host = {name!r}: no name of a machine; it may not begin with - or hold blanks, quotes or"
            f" any of \\ $ < > ; & | ( ) {{ }} {' '.join(also)}".rstrip()
            + "; correct the list of hosts"
        )


def remote_script(remote: Remote, argv: Sequence[str]) -> str:
    """What /bin/sh runs there: enters the folder, sources the environment's script, becomes `words`."""
    parts = [f"cd {shlex.quote(_as_path(remote.folder))}"] if remote.folder else []
    if remote.venv_script:
        script = shlex.quote(_as_path(remote.venv_script))
        missing = shlex.quote(f"xds: --venv_script {remote.venv_script}: no such file here")
        parts.append(f"[ -r {script} ] || {{ echo {missing} >&2; exit 2; }}")
        parts.append(f". {script}")
    # SAFEPATH: the folder entered must not hide standard modules from the node part
    early = {key: value for key, value in remote.environment.items() if _EARLY.fullmatch(key)}
    early["PYTHONSAFEPATH"] = "1"
    assigned = " ".join(f"{key}={shlex.quote(value)}" for key, value in early.items())
    parts += [f"export {assigned}", f"exec {shlex.join(argv)}"]
    return "; ".join(parts)


def shell_line(remote: Remote, argv: Sequence[str]) -> str:
    """One line for a login shell of any kind, sh, csh or fish: runs `words` through /bin/sh.

    Raises:
        UsageError: a NUL is in there, which no command line can carry.
    """
    script = remote_script(remote, argv)
    if "\0" in script:
        raise UsageError(_NUL)
    text = _NOT_PLAIN.sub(_octal, script)
    if not remote.venv_script and text == script:
        return f"exec /bin/sh -c '{script}'"
    # scripts that set up environments are written for bash more often than not
    bash = "command -v bash >/dev/null && exec bash -c " if remote.venv_script else ""
    unpacked = '"$(printf %b "$1")"'
    first = f"{bash}{unpacked}; " if bash else ""
    return f"exec /bin/sh -c '{first}eval {unpacked}' sh '{text}'"


def shell_argv(remote: Remote, argv: Sequence[str]) -> list[str]:
    """The same as `shell_line`, for a program that hands an argv over as it is, without a shell."""
    script = remote_script(remote, argv)
    if "\0" in script:
        raise UsageError(_NUL)
    if remote.venv_script:
        bash = 'command -v bash >/dev/null && exec bash -c "$1"; eval "$1"'
        return ["/bin/sh", "-c", bash, "sh", script]
    return ["/bin/sh", "-c", script]


def refuse_other_program(backend: Backend, not_these: Mapping[str, str]) -> None:
    """Raise a UsageError where the program says that it is that of another backend.

    Args:
        not_these: backend to a word by which its program's `--version` is known.
    """
    try:
        done = subprocess.run(
            [backend.program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return  # the run itself will tell
    version_text = (done.stdout + done.stderr).decode(errors="replace")
    for name, marker in not_these.items():
        if marker in version_text:
            raise UsageError(
                f"--launcher = {backend.name}: {backend.program} here is another MPI's; give --launcher {name},"
                f" or {backend.remedy}"
            )


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise a UsageError for a variable that no shell can set."""
    for key, value in environment.items():
        if not _VARIABLE.fullmatch(key) or "\0" in value:
            raise UsageError(f"environment variable {key!r}: a shell cannot set it; leave it out")


def _octal(match: re.Match[str]) -> str:
    data = match.group().encode("utf-8", "surrogateescape")
    return "".join(f"\\0{byte:03o}" for byte in data)


def _as_path(path: str) -> str:
    """Never an option, and never searched for in PATH."""
    return path if path.startswith("/") else f"./{path}"
