"""Where a command line runs: on this machine, on hosts that are started from here, or as one of several.

Flags win over the environment. In this order: --launcher local; torchrun's flags; hosts that were named; the
hostfile that is there by default; an allocation of Slurm; what something else that starts a process on each
machine left in the environment; this machine alone.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ..job import Host, Job, Remote, Rendezvous, Restarts
from .hosts import filter_hosts, first_hosts, read_hostfile
from .meeting import dynamic, num_machines, static
from .options import Asked, judge

DEFAULT_HOSTFILE = "/job/hostfile"
_ELASTIC_RESTARTS = 100  # deepspeed's
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_MEETING = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone", "local_addr")
_NAMING_HOSTS = ("hostfile", "force_multi", "launcher")


@final
@dataclass(frozen=True)
class Local:
    """This machine's ranks. devices: the GPUs that they see; None is as they are found."""

    job: Job
    rendezvous: Rendezvous = Rendezvous()
    restarts: Restarts = Restarts()
    devices: tuple[int, ...] | None = None


@final
@dataclass(frozen=True)
class Hosts:
    """Ranks on hosts that are started from here. launcher: the backend's name."""

    job: Job
    hosts: tuple[Host, ...]
    remote: Remote
    launcher: str
    restarts: Restarts = Restarts()


def where_to_run(
    asked: Asked, environ: Mapping[str, str], default_hostfile: str = DEFAULT_HOSTFILE
) -> Local | Hosts:
    """Decide from the command line and the environment; reads hostfiles, starts nothing.

    Raises:
        UsageError: options that exclude one another, or name what is not there.
    """
    _check_pairs(asked)
    where = _where(asked, environ, default_hostfile)
    python = asked.text("python", sys.executable)
    if isinstance(where, Local) and os.path.realpath(python) != os.path.realpath(sys.executable):
        raise UsageError(
            f"--python = {printable(python)}: is for other machines; on this one start xds itself with it,"
            f" `{shlex.quote(python)} -m xds.launcher.cli ...`"
        )
    return where


def _where(asked: Asked, environ: Mapping[str, str], default_hostfile: str) -> Local | Hosts:
    if asked.text("launcher").lower() == "local":
        return _here(replace(asked, given={**asked.given, "launcher": ""}))
    if asked.has("no_ssh"):
        return _one_of(asked, _all_hosts(asked, default_hostfile))
    if asked.has(*_MEETING, "node_rank"):
        return _met(_with_torchruns(asked, environ))
    if asked.has(*_NAMING_HOSTS) or Path(default_hostfile).is_file():
        hosts = _all_hosts(asked, default_hostfile, environ)
        if asked.has("force_multi", "launcher") or not _is_here(hosts):
            return _on_hosts(asked, hosts, asked.text("launcher", "ssh").lower(), environ)
        return _on_slots(asked, hosts[0])
    return _by_environment(asked, environ)


def _check_pairs(asked: Asked) -> None:
    """Refuse options that exclude one another."""
    pairs = [
        (("module",), ("no_python",)),
        (("include",), ("exclude",)),
        (("include", "exclude"), ("num_nodes", "nproc_per_node")),
        (("num_nodes",), ("nnodes",)),
        (_NAMING_HOSTS, _MEETING),
        (("hostfile",), ("node_rank",)),
        (("no_ssh",), ("force_multi", "launcher", *_MEETING)),
        (("standalone",), ("node_rank",)),
    ]
    for one, other in pairs:
        if other == ("node_rank",) and asked.has("no_ssh"):
            continue
        if asked.text("nproc_per_node") == "auto" and "nproc_per_node" in other:
            other = tuple(name for name in other if name != "nproc_per_node")
        if asked.has(*one) and asked.has(*other):
            raise UsageError(
                f"{asked.first(*one)} and {asked.first(*other)} exclude one another;"
                " drop one of them"
            )


# -- what is run --------------------------------------------------------------------------------------


def _job(asked: Asked) -> Job:
    is_module, is_program = asked.has("module"), asked.has("no_python")
    backend = asked.text("backend")
    log_dir = asked.text("log_dir")
    return Job(
        kind="module" if is_module else "program" if is_program else "script",
        target=asked.command[0],
        args=asked.command[1:],
        num_ranks=_num_ranks(asked),
        backend=backend or None,  # type: ignore[arg-type]  # one of its choices
        threads_per_rank=asked.number("threads_per_rank", 0, least=1) or None,
        log_dir="" if log_dir == "None" else log_dir,  # deepspeed's word for none
        bind_cores=asked.has("bind_cores_to_rank"),
        core_list=asked.text("bind_core_list"),
    )


def _num_ranks(asked: Asked) -> int | Literal["auto", "gpu", "cpu"]:
    text = asked.text("nproc_per_node", "auto")
    if text == "auto" or text == "-1":
        return "auto"
    if text in ("gpu", "cpu"):
        return "gpu" if text == "gpu" else "cpu"
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) < 1:
        raise UsageError(
            f"{asked.spelled['nproc_per_node']} = {printable(text)}: must be a number from 1, auto, gpu or cpu"
        )
    return int(text)


def _restarts(asked: Asked, min_nodes: int = 0, max_nodes: int = 0) -> Restarts:
    """min_nodes, max_nodes: what --nnodes said, 0 for nothing."""
    is_elastic = asked.has("elastic_training")
    least = asked.number("min_elastic_nodes", min_nodes or int(is_elastic), least=1)
    most = asked.number("max_elastic_nodes", max_nodes, least=1)
    if most and least > most:
        raise UsageError(
            f"--min-elastic-nodes = {least}, --max-elastic-nodes = {most}: the first must not be"
            " the larger one; swap them"
        )
    return Restarts(
        max_restarts=asked.number("max_restarts", _ELASTIC_RESTARTS if is_elastic else 0),
        min_nodes=least,
        max_nodes=most,
        fits=_fits(asked.text("elastic_config")),
    )


def _fits(config: str) -> Callable[[int], bool] | None:
    if not config:
        return None
    from ...engine.elastic.world_sizes import fits

    return fits(config)


# -- this machine alone -------------------------------------------------------------------------------


def _here(asked: Asked) -> Local:
    least = max(asked.number("num_nodes", 1, least=1), num_machines(asked)[0])
    if least > 1:
        name = asked.first("num_nodes", "nnodes")
        raise UsageError(f"{name} = {least}: no other hosts are named; give them with --hostfile")
    job, devices = _job(asked), _named_devices(asked)
    if devices is not None:
        job = replace(job, num_ranks=len(devices))
    return Local(job, _alone(asked), _restarts(asked), devices)


def _alone(asked: Asked) -> Rendezvous:
    """A free port on the loopback, or the address and port that were asked for."""
    if asked.has("master_port"):
        return static(asked, 1)
    return Rendezvous()


def _named_devices(asked: Asked) -> tuple[int, ...] | None:
    """The GPUs that --include or --exclude of localhost leave; None where neither is given."""
    if not asked.has("include", "exclude"):
        return None
    own = num_gpus()
    if not own and asked.has("exclude"):
        raise UsageError(
            f"--exclude = {printable(asked.text('exclude'))}: no GPU is known here to leave out; name a"
            " hostfile with --hostfile, or the number of ranks with --nproc-per-node"
        )
    include, exclude = asked.text("include"), asked.text("exclude")
    slots = range(own or 1024)  # where none is known, the numbers are taken as they are
    name = next((name for name in _own_names() if name in include + exclude), "localhost")
    try:
        (host,) = filter_hosts([Host(name, tuple(slots))], include, exclude)
    except UsageError as error:
        raise UsageError(f"{error} (without --hostfile, this machine is the only one)") from None
    return None if host.slots == tuple(slots) else host.slots


def num_gpus() -> int:
    """The GPUs of this machine as its driver lists them, without torch; 0 also where that is unknown."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def _own_names() -> frozenset[str]:
    name = socket.gethostname()
    return _LOCAL_NAMES | {name, name.partition(".")[0]}


def _is_here(hosts: Sequence[Host]) -> bool:
    return len(hosts) == 1 and hosts[0].name in _own_names()


def _on_slots(asked: Asked, host: Host) -> Local:
    """A hostfile that names this machine alone."""
    job = replace(_job(asked), num_ranks=len(host.slots))
    devices = host.slots if asked.has("include", "exclude") else None
    return Local(job, _alone(asked), _restarts(asked, *num_machines(asked)), devices)


# -- hosts that are started from here -----------------------------------------------------------------


def _all_hosts(
    asked: Asked, default_hostfile: str, environ: Mapping[str, str] | None = None
) -> list[Host]:
    """The hosts of the hostfile, or of the allocation, that the options leave."""
    path = asked.text("hostfile")
    if not path and Path(default_hostfile).is_file():
        path = default_hostfile
    if path and asked.has("hostfile") and not Path(path).exists():
        raise UsageError(
            f"{asked.spelled['hostfile']} = {printable(path)}: no such file; correct the path, or leave it out"
            " to run on this machine"
        )
    hosts = read_hostfile(path) if path else _allocated(environ or {})
    if not hosts and asked.has("force_multi"):
        hosts = [Host("localhost", tuple(range(_count_here(asked))))]
    if not hosts:
        name = asked.first("launcher", "force_multi", "no_ssh")
        raise UsageError(f"{name}: no hosts are named; give them with --hostfile")
    hosts = filter_hosts(hosts, asked.text("include"), asked.text("exclude"))
    num_ranks = _num_ranks(asked)
    if num_ranks in ("gpu", "cpu"):
        raise UsageError(
            f"{asked.spelled['nproc_per_node']} = {printable(num_ranks)}: hosts have the slots that the"
            " hostfile says; give a number, or leave it out"
        )
    least, most = num_machines(asked)
    if least > len(hosts):
        raise UsageError(
            f"{asked.spelled['nnodes']} = {printable(asked.text('nnodes'))}: there are {len(hosts)} "
            "hosts; ask for fewer"
        )
    has_restarts = asked.number("max_restarts", 0) > 0 or asked.has("elastic_training")
    if most and not has_restarts:
        hosts = hosts[:most]  # further ones would be spares
    num_nodes = asked.number("num_nodes", 0, least=1)
    return first_hosts(hosts, num_nodes, 0 if isinstance(num_ranks, str) else num_ranks)


def _count_here(asked: Asked) -> int:
    num_ranks = _num_ranks(asked)
    return num_ranks if isinstance(num_ranks, int) else num_gpus() or 2


def _allocated(environ: Mapping[str, str]) -> list[Host]:
    from .surroundings import in_slurm_allocation

    return in_slurm_allocation(environ)


def _on_hosts(
    asked: Asked, hosts: Sequence[Host], launcher: str, environ: Mapping[str, str]
) -> Hosts:
    from ..remote.backends import BACKENDS, backend_named

    if launcher not in BACKENDS:
        backend_named(launcher)  # says why
    job = replace(_job(asked), num_ranks="auto")  # the slots say it
    restarts = _restarts(asked, *num_machines(asked))
    if restarts.max_nodes and not restarts.min_nodes:  # not all there are, but all at a time
        restarts = replace(restarts, min_nodes=min(restarts.max_nodes, len(hosts)))
    return Hosts(job, tuple(hosts), remote(asked, environ), launcher, restarts)


def remote(asked: Asked, environ: Mapping[str, str]) -> Remote:
    """How other machines are reached, and what goes along.

    Raises:
        UsageError: --launcher-args or an environment file cannot be read.
    """
    from .carried import carried

    folder = os.getcwd()
    words = asked.text("launcher_args")
    try:
        launcher_args = tuple(shlex.split(words))
    except ValueError as error:
        raise UsageError(
            f"--launcher-args = {printable(words)}: {error}; close the quotes as for a shell"
        ) from None
    return Remote(
        folder=folder,
        python=asked.text("python", sys.executable),
        environment=carried(environ, Path(folder), Path.home()),
        venv_script=asked.text("venv_script"),
        ssh_port=_port(asked, "ssh_port"),
        launcher_args=launcher_args,
        master_addr=asked.text("master_addr"),
        master_port=_port(asked, "master_port"),
        is_numbered=asked.has("include", "exclude"),
    )


def _port(asked: Asked, name: str) -> int | None:
    return asked.number(name, 0, least=1, most=65535) or None


# -- one of several machines, each started by somebody else -------------------------------------------


def _one_of(asked: Asked, hosts: Sequence[Host]) -> Local:
    """deepspeed's --no_ssh: this machine is number --node-rank of the hostfile."""
    if not asked.has("node_rank"):
        raise UsageError(
            "--no-ssh: needs --node-rank, this machine's place among the hosts, from 0"
        )
    host = hosts[asked.number("node_rank", 0, most=len(hosts) - 1)]
    first = hosts[0].name.rpartition("@")[2]
    meeting = static(asked, len(hosts), first)
    job = replace(_job(asked), num_ranks=len(host.slots))
    devices = host.slots if asked.has("include", "exclude") else None
    return Local(job, meeting, _restarts(asked), devices)


def _met(asked: Asked) -> Local:
    """torchrun's flags: its rendezvous, with its defaults."""
    least, most = num_machines(asked)
    least, most = least or 1, most or 1
    if asked.has("standalone"):
        if least > 1:
            raise UsageError(f"--standalone: is one machine, --nnodes = {least}; drop one of them")
        return _here(replace(asked, given={**asked.given, "nnodes": "", "master_port": ""}))
    kind = asked.text("rdzv_backend", "static")
    if kind == "static":
        meeting = static(asked, most, asked.text("rdzv_endpoint"))
        if least != most:
            raise UsageError(
                f"--nnodes = {least}:{most}: machines may come and go only with --rdzv-backend c10d"
                " and --rdzv-endpoint HOST:PORT"
            )
    else:
        meeting = dynamic(asked, kind, least, most)
    job = _job(asked)
    return Local(job, meeting, _restarts(asked), _named_devices(asked))


def _by_environment(asked: Asked, environ: Mapping[str, str]) -> Local | Hosts:
    """No flag says where: torchrun's variables, a step of srun's or pods, Slurm, or this machine."""
    from .surroundings import found

    merged = _with_torchruns(asked, environ)
    if merged.has(*_MEETING, "node_rank", "master_addr"):
        return _met(merged)
    meeting = found(environ)
    if meeting is not None and meeting.max_nodes > 1:
        return Local(_job(merged), meeting, _restarts(merged), _named_devices(merged))
    if not _is_in_step(environ) and len(_allocated(environ)) > 1:
        return _on_hosts(asked, _all_hosts(asked, "", environ), "slurm", environ)
    if num_machines(merged)[0] > 1:
        raise UsageError(
            f"{merged.spelled['nnodes']} = {printable(merged.text('nnodes'))}: the machines do not know "
            "where to meet; give each --master-addr and --node-rank, or --rdzv-backend c10d --rdzv-endpoint "
            "HOST:PORT, or name them all with --hostfile"
        )
    return _here(merged)


def _with_torchruns(asked: Asked, environ: Mapping[str, str]) -> Asked:
    """With torchrun's variables for what was not given, and these judged as options are."""
    if "TORCHELASTIC_RUN_ID" in environ:  # inside a rank: what started it is not ours to repeat
        return asked
    merged = asked.with_defaults(environ)
    judge(merged)
    return merged


def _is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process for a part of the job; a shell it opened is for all of it."""
    from ...engine.process.foreign_launcher import in_step

    return in_step(environ) and "SLURM_PTY_PORT" not in environ
