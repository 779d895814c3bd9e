"""Decides where a command line runs: on this machine, on hosts that it starts, or as one of several machines.

Flags take precedence over the environment. The order is: --launcher local; torchrun's flags; named hosts; the
default hostfile; the variables of a program that starts one xds on each machine; a Slurm allocation; only this
machine.
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

from ...ops.device import num_devices_of_driver
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.trust import is_found
from ..job import Host, Job, Remote, Rendezvous, Restarts
from .hosts import by_site, filter_hosts, first_hosts, read_hostfile
from .options import ParsedArgs, check_options
from .rendezvous import dynamic, num_machines, static

DEFAULT_HOSTFILE = "/job/hostfile"
_ELASTIC_RESTARTS = 100  # deepspeed's default
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_RENDEZVOUS_OPTIONS = (
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "local_addr",
)
_NAMING_HOSTS = ("hostfile", "force_multi", "launcher")


@final
@dataclass(frozen=True)
class Local:
    """Ranks on this machine. devices: the GPUs that they see; None leaves the visible GPUs unchanged."""

    job: Job
    rendezvous: Rendezvous = Rendezvous()
    restarts: Restarts = Restarts()
    devices: tuple[int, ...] | None = None


@final
@dataclass(frozen=True)
class Hosts:
    """Ranks on hosts that xds connects to. launcher: the backend's name."""

    job: Job
    hosts: tuple[Host, ...]
    remote: Remote
    launcher: str
    restarts: Restarts = Restarts()


def where_to_run(
    args: ParsedArgs, environ: Mapping[str, str], default_hostfile: str = DEFAULT_HOSTFILE
) -> Local | Hosts:
    """Decide from the command line and the environment. Reads hostfiles, starts nothing.

    Raises:
        UsageError: options cannot be combined, or name a file or host that does not exist.
    """
    _check_pairs(args)
    if not args.has("hostfile"):
        default_hostfile = found_hostfile(default_hostfile)
    return _where(args, environ, default_hostfile)


def found_hostfile(path: str = DEFAULT_HOSTFILE) -> str:
    """`path` if there is a file that no other user may change; else ""."""
    return path if path and is_found(path, f"--hostfile {path}") else ""


def _where(args: ParsedArgs, environ: Mapping[str, str], default_hostfile: str) -> Local | Hosts:
    if args.text("launcher").lower() == "local":
        return _this_machine(replace(args, given={**args.given, "launcher": ""}))
    if args.has("no_ssh"):
        return _one_of_hosts(args, _all_hosts(args, default_hostfile))
    if args.has(*_RENDEZVOUS_OPTIONS, "node_rank"):
        return _torchrun_rendezvous(_with_torchrun_variables(args, environ))
    if args.has(*_NAMING_HOSTS) or default_hostfile:
        hosts = _all_hosts(args, default_hostfile, environ)
        if args.has("force_multi", "launcher") or not _is_here(hosts):
            return _on_hosts(args, hosts, args.text("launcher", "ssh").lower(), environ)
        return _on_slots(args, hosts[0])
    return _by_environment(args, environ)


def _check_pairs(args: ParsedArgs) -> None:
    """Raise a UsageError for options that cannot be combined."""
    pairs = [
        (("module",), ("no_python",)),
        (("include",), ("exclude",)),
        (("include", "exclude"), ("num_nodes", "nproc_per_node")),
        (_NAMING_HOSTS, _RENDEZVOUS_OPTIONS),
        (("hostfile",), ("node_rank",)),
        (("no_ssh",), ("force_multi", "launcher", *_RENDEZVOUS_OPTIONS)),
        (("standalone",), ("node_rank",)),
        (("recover",), ("node_rank", "no_ssh", *_RENDEZVOUS_OPTIONS)),
        (("recover",), ("elastic_training", "min_elastic_nodes", "max_elastic_nodes")),
    ]
    for one, other in pairs:
        if other == ("node_rank",) and args.has("no_ssh"):
            continue
        if args.text("nproc_per_node") == "auto" and "nproc_per_node" in other:
            other = tuple(name for name in other if name != "nproc_per_node")
        if args.has(*one) and args.has(*other):
            raise UsageError(
                f"{args.first(*one)} and {args.first(*other)} cannot be combined; drop one of them"
            )


# -- what is run --------------------------------------------------------------------------------------


def _job(args: ParsedArgs) -> Job:
    is_module, is_program = args.has("module"), args.has("no_python")
    backend = args.text("backend")
    log_dir = args.text("log_dir")
    return Job(
        kind="module" if is_module else "program" if is_program else "script",
        target=args.command[0],
        args=args.command[1:],
        num_ranks=_num_ranks(args),
        backend=backend or None,  # type: ignore[arg-type]  # one of its choices
        log_dir="" if log_dir == "None" else log_dir,  # deepspeed's default, meaning none
        bind_cores=args.has("bind_cores_to_rank"),
        core_list=args.text("bind_core_list"),
        recovers=args.has("recover"),
        num_spares=args.number("spares", 0, least=0),
    )


def _num_ranks(args: ParsedArgs) -> int | Literal["auto", "gpu", "cpu"]:
    text = args.text("nproc_per_node", "auto")
    if text == "auto" or text == "-1":
        return "auto"
    if text in ("gpu", "cpu"):
        return "gpu" if text == "gpu" else "cpu"
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) < 1:
        raise UsageError(
            f"{args.spelled['nproc_per_node']} = {printable(text)}: must be a number from 1, auto, gpu or cpu"
        )
    return int(text)


def _restarts(args: ParsedArgs) -> Restarts:
    is_elastic = args.has("elastic_training")
    least = args.number("min_elastic_nodes", int(is_elastic), least=1)
    most = args.number("max_elastic_nodes", 0, least=1)
    if most and least > most:
        raise UsageError(
            f"--min-elastic-nodes = {least}, --max-elastic-nodes = {most}: the minimum must not be"
            " larger than the maximum; swap them"
        )
    return Restarts(
        max_restarts=args.number("max_restarts", _ELASTIC_RESTARTS if is_elastic else 0),
        min_nodes=least,
        max_nodes=most,
        fits=_fits(args.text("elastic_config")),
    )


def _fits(config: str) -> Callable[[int], bool] | None:
    if not config:
        return None
    from ...engine.elastic.world_sizes import fits

    return fits(config)


# -- this machine alone -------------------------------------------------------------------------------


def _this_machine(args: ParsedArgs) -> Local:
    least = max(args.number("num_nodes", 1, least=1), num_machines(args)[0])
    if least > 1:
        name = args.first("num_nodes", "nnodes")
        raise UsageError(f"{name} = {least}: no other hosts are named; name them with --hostfile")
    job, devices = _job(args), _named_devices(args)
    if devices is not None:
        job = replace(job, num_ranks=len(devices))
    return Local(job, _alone(args), _restarts(args), devices)


def _alone(args: ParsedArgs) -> Rendezvous:
    """A free port on the loopback address, or the requested address and port."""
    if args.has("master_port"):
        return static(args, 1)
    return Rendezvous()


def _named_devices(args: ParsedArgs) -> tuple[int, ...] | None:
    """The GPUs selected by --include or --exclude on this machine; None if neither is given."""
    if not args.has("include", "exclude"):
        return None
    own = num_devices_of_driver()
    if not own and args.has("exclude"):
        raise UsageError(
            f"--exclude = {printable(args.text('exclude'))}: this machine has no known GPU to exclude; set"
            " --hostfile, or the number of ranks with --nproc-per-node"
        )
    include, exclude = args.text("include"), args.text("exclude")
    slots = range(own or 1024)  # if no GPU is known, all numbers are accepted
    name = next((name for name in _own_names() if name in include + exclude), "localhost")
    try:
        (host,) = filter_hosts([Host(name, tuple(slots))], include, exclude)
    except UsageError as error:
        raise UsageError(f"{error} (without --hostfile, this machine is the only one)") from None
    return None if host.slots == tuple(slots) else host.slots


def _own_names() -> frozenset[str]:
    name = socket.gethostname()
    return _LOCAL_NAMES | {name, name.partition(".")[0]}


def _is_here(hosts: Sequence[Host]) -> bool:
    return len(hosts) == 1 and hosts[0].name in _own_names()


def _on_slots(args: ParsedArgs, host: Host) -> Local:
    """Run on this machine with the slots of a hostfile that names only this machine."""
    job = replace(_job(args), num_ranks=len(host.slots))
    devices = host.slots if args.has("include", "exclude") else None
    return Local(job, _alone(args), _restarts(args), devices)


# -- hosts that xds connects to -----------------------------------------------------------------------


def _all_hosts(
    args: ParsedArgs, default_hostfile: str, environ: Mapping[str, str] | None = None
) -> list[Host]:
    """The hosts of the hostfile or of the allocation that the options select."""
    if args.has("nnodes"):
        raise UsageError(
            f"{args.spelled['nnodes']}: is for machines that each start xds; of named hosts choose with"
            " --num-nodes, or with --min-elastic-nodes and --max-elastic-nodes"
        )
    path = args.text("hostfile") or default_hostfile
    if path and args.has("hostfile") and not Path(path).exists():
        raise UsageError(
            f"{args.spelled['hostfile']} = {printable(path)}: no such file; correct the path, or remove the"
            " option to run on this machine"
        )
    hosts = read_hostfile(path) if path else _allocated(environ or {})
    if not hosts and args.has("force_multi"):
        hosts = [Host("localhost", tuple(range(_count_here(args))))]
    if not hosts:
        name = args.first("launcher", "force_multi", "no_ssh")
        or_srun = " start xds by `srun --nodes=N --ntasks-per-node=1 xds ...`, or"
        is_slurm = args.text("launcher").lower() == "slurm"
        raise UsageError(
            f"{name}: no hosts are named;{or_srun * is_slurm} name them with --hostfile"
        )
    hosts = filter_hosts(hosts, args.text("include"), args.text("exclude"))
    num_ranks = _num_ranks(args)
    if num_ranks in ("gpu", "cpu"):
        raise UsageError(
            f"{args.spelled['nproc_per_node']} = {printable(num_ranks)}: the hostfile defines the"
            " slots of the hosts; set a number, or remove the option"
        )
    num_nodes = args.number("num_nodes", 0, least=1)
    return by_site(first_hosts(hosts, num_nodes, 0 if isinstance(num_ranks, str) else num_ranks))


def _num_sites(hosts: Sequence[Host]) -> int:
    return len({host.site for host in hosts if not host.is_spare})


def _count_here(args: ParsedArgs) -> int:
    num_ranks = _num_ranks(args)
    return num_ranks if isinstance(num_ranks, int) else num_devices_of_driver() or 2


def _allocated(environ: Mapping[str, str]) -> list[Host]:
    from .cluster_environment import in_slurm_allocation

    return in_slurm_allocation(environ)


def _on_hosts(
    args: ParsedArgs, hosts: Sequence[Host], launcher: str, environ: Mapping[str, str]
) -> Hosts:
    from ..remote.backends import BACKENDS, PerHost, backend_named

    if launcher not in BACKENDS:
        backend_named(launcher)  # raises the error
    if args.has("recover") and not isinstance(BACKENDS[launcher], PerHost):
        raise UsageError(
            f"--recover with --launcher {launcher}: it takes no orders after the start, so no place of a lost "
            "rank could be filled; use --launcher ssh with a hostfile"
        )
    spare = next((host.name for host in hosts if host.is_spare), "")
    if spare and not args.has("recover"):
        raise UsageError(
            f"host {printable(spare)} is marked `spare`, which needs --recover; add it, or remove the word "
            "from the hostfile"
        )
    if not any(not host.is_spare for host in hosts):
        raise UsageError("all hosts are marked `spare`; remove the word from those that get ranks")
    # the slots define the number of ranks
    job = replace(_job(args), num_ranks="auto", num_sites=_num_sites(hosts))
    restarts = _restarts(args)
    # by default as many as run at a time, not all hosts
    if restarts.max_nodes and not restarts.min_nodes:
        restarts = replace(restarts, min_nodes=min(restarts.max_nodes, len(hosts)))
    if job.num_sites > 1 and restarts.max_nodes:
        raise UsageError(
            f"--max-elastic-nodes = {restarts.max_nodes}: the hostfile has {job.num_sites} sites, which need "
            "all of their hosts; remove the option, or site= from the hostfile"
        )
    return Hosts(job, tuple(hosts), remote(args, environ), launcher, restarts)


def remote(args: ParsedArgs, environ: Mapping[str, str]) -> Remote:
    """How other machines are reached, and the settings for them.

    Raises:
        UsageError: --launcher-args or an environment file cannot be parsed.
    """
    from .forwarded_variables import forwarded_variables

    folder = os.getcwd()
    text = args.text("launcher_args")
    try:
        launcher_args = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--launcher-args = {printable(text)}: {error}; close the quotes as in a shell"
        ) from None
    return Remote(
        folder=folder,
        python=sys.executable,
        environment=forwarded_variables(environ, Path(folder), Path.home()),
        venv_script=args.text("venv_script"),
        ssh_port=_port(args, "ssh_port"),
        launcher_args=launcher_args,
        master_addr=args.text("master_addr"),
        master_port=_port(args, "master_port"),
        is_numbered=args.has("include", "exclude"),
    )


def _port(args: ParsedArgs, name: str) -> int | None:
    return args.number(name, 0, least=1, most=65535) or None


# -- one of several machines that each start xds -------------------------------------------------------


def _one_of_hosts(args: ParsedArgs, hosts: Sequence[Host]) -> Local:
    """deepspeed's --no_ssh: this machine is number --node-rank of the hostfile."""
    if not args.has("node_rank"):
        raise UsageError(
            "--no-ssh: needs --node-rank, the index of this machine in the list of hosts, from 0"
        )
    host = hosts[args.number("node_rank", 0, most=len(hosts) - 1)]
    first = hosts[0].name.rpartition("@")[2]
    rendezvous = static(args, len(hosts), first)
    job = replace(_job(args), num_ranks=len(host.slots), num_sites=_num_sites(hosts))
    devices = host.slots if args.has("include", "exclude") else None
    return Local(job, rendezvous, _restarts(args), devices)


def _torchrun_rendezvous(args: ParsedArgs) -> Local:
    """torchrun's flags: its rendezvous, with its defaults."""
    least, most = num_machines(args)
    least, most = least or 1, most or 1
    if args.has("standalone"):
        if least > 1:
            raise UsageError(
                f"--standalone: means one machine, but --nnodes = {least}; remove one of them"
            )
        return _this_machine(replace(args, given={**args.given, "nnodes": "", "master_port": ""}))
    kind = args.text("rdzv_backend", "static")
    if kind == "static":
        rendezvous = static(args, most, args.text("rdzv_endpoint"))
        if least != most:
            raise UsageError(
                f"--nnodes = {least}:{most}: a variable number of machines needs --rdzv-backend c10d"
                " and --rdzv-endpoint HOST:PORT"
            )
    else:
        rendezvous = dynamic(args, kind, least, most)
    job = _job(args)
    return Local(job, rendezvous, _restarts(args), _named_devices(args))


def _by_environment(args: ParsedArgs, environ: Mapping[str, str]) -> Local | Hosts:
    """Without flags: torchrun's variables, a step of srun, pods, a Slurm allocation, or this machine."""
    from .cluster_environment import find_rendezvous

    merged = _with_torchrun_variables(args, environ)
    if merged.has(*_RENDEZVOUS_OPTIONS, "node_rank", "master_addr"):
        return _torchrun_rendezvous(merged)
    rendezvous = find_rendezvous(environ)
    if rendezvous is not None and rendezvous.max_nodes > 1:
        return Local(_job(merged), rendezvous, _restarts(merged), _named_devices(merged))
    if not _is_in_step(environ) and len(_allocated(environ)) > 1:
        return _on_hosts(args, _all_hosts(args, "", environ), "slurm", environ)
    if num_machines(merged)[0] > 1:
        raise UsageError(
            f"{merged.spelled['nnodes']} = {printable(merged.text('nnodes'))}: the machines have no "
            "rendezvous endpoint; set --master-addr and --node-rank on each, or --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT, or name all of them with --hostfile"
        )
    return _this_machine(merged)


def _with_torchrun_variables(args: ParsedArgs, environ: Mapping[str, str]) -> ParsedArgs:
    """The options with torchrun's variables as defaults, checked in the same way as options."""
    if "TORCHELASTIC_RUN_ID" in environ:  # inside a rank: the variables belong to its launcher
        return args
    merged = args.with_defaults(environ)
    check_options(merged)
    return merged


def _is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one task of a step. A shell of `srun --pty` does not count."""
    from ...engine.process.foreign_launcher import in_step

    return in_step(environ) and "SLURM_PTY_PORT" not in environ
