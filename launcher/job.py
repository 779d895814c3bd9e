"""What is to be run, and where: plain data, made from the command line and sent to every host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final


@final
@dataclass(frozen=True)
class Job:
    """What each rank runs.

    num_ranks: on this machine where no hosts are named: a number, "auto" (one for each GPU, without one 2),
        "gpu", or "cpu" (one a core).
    threads_per_rank: OMP_NUM_THREADS of each; None is cores // ranks, unless the variable is set.
    log_dir: where every rank's output is kept; "" is a folder for each run under the cache folder.
    bind_cores: give each rank of a machine its own cores; core_list: of these, "0-3,8", "" for all.
    """

    kind: Literal["script", "module", "program"]
    target: str
    args: tuple[str, ...] = ()
    num_ranks: int | Literal["auto", "gpu", "cpu"] = "auto"
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    threads_per_rank: int | None = None
    log_dir: str = ""
    bind_cores: bool = False
    core_list: str = ""


@final
@dataclass(frozen=True)
class Rendezvous:
    """How the elastic agents of several machines find one another: torch's rendezvous, its words.

    The default is one machine. kind: "c10d" (the agents agree who takes part), "static" (node_rank is given),
        or another of torch's.
    endpoint: "host:port"; port 0 is any free one.
    settings: torch's rdzv_conf.
    """

    kind: str = "c10d"
    endpoint: str = "127.0.0.1:0"
    run_id: str = ""
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    local_addr: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Restarts:
    """What happens after a failure.

    max_restarts: how often all ranks are started again.
    min_nodes, max_nodes: with how many hosts a run goes on; 0 is all of them.
    fits: whether a number of ranks may be trained with (the config's elasticity section); None is any.
    """

    max_restarts: int = 0
    min_nodes: int = 0
    max_nodes: int = 0
    fits: Callable[[int], bool] | None = None


@final
@dataclass(frozen=True)
class Host:
    """A machine of a hostfile. slots: the numbers of the devices to use on it, one rank each."""

    name: str
    slots: tuple[int, ...]


@final
@dataclass(frozen=True)
class Remote:
    """What goes along to other machines, and how they are reached.

    folder: the working folder, entered on each; python: the interpreter, a path on each.
    venv_script: sourced there before it; environment: variables that are set there.
    launcher_args: further words for ssh, srun, mpirun, ... itself.
    is_numbered: device numbers were named by the user, so they are made visible on each host.
    """

    folder: str
    python: str
    environment: Mapping[str, str]
    venv_script: str = ""
    ssh_port: int | None = None
    launcher_args: tuple[str, ...] = ()
    master_addr: str = ""
    master_port: int | None = None
    is_numbered: bool = False


@final
@dataclass(frozen=True)
class Order:
    """What one host is asked to run: its part of one start of all ranks.

    generation: 0 for the first start, then 1 more for each restart, of at most max_restarts.
    agent_restarts: how often torch's agent restarts by itself, where no head does it.
    devices: the numbers of the GPUs its ranks see; None is as it finds them.
    heartbeat_seconds: how often the head writes to this host's standard input; 0 is never.
    """

    job: Job
    rendezvous: Rendezvous
    num_ranks: int | Literal["auto", "gpu", "cpu"]
    generation: int = 0
    max_restarts: int = 0
    agent_restarts: int = 0
    devices: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    host: str = ""
    heartbeat_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Order:
        """The order that `as_dict` told."""
        fields = dict(record)
        job, rendezvous = dict(fields["job"]), fields["rendezvous"]
        job["args"] = tuple(job["args"])
        fields["job"], fields["rendezvous"] = Job(**job), Rendezvous(**rendezvous)
        if fields["devices"] is not None:
            fields["devices"] = tuple(fields["devices"])
        return Order(**fields)
