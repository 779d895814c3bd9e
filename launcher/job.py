"""Data classes for what is run and where. Made from the command line and sent to every host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final


@final
@dataclass(frozen=True)
class Job:
    """What each rank runs.

    num_ranks: number of ranks on this machine if no hosts are named: a number, "auto" (one per GPU, or 2
        without a GPU), "gpu" (one per GPU), or "cpu" (one per core).
    log_dir: folder for every rank's output; "" means a new folder for each run under the cache folder.
    bind_cores: give each rank of a machine its own cores.
    core_list: the cores to use, such as "0-3,8"; "" means all.
    recovers: when a rank fails, the others go on. num_spares: processes that wait for its place.
    num_sites: of the hostfile; each has the same number of consecutive ranks.
    """

    kind: Literal["script", "module", "program"]
    target: str
    args: tuple[str, ...] = ()
    num_ranks: int | Literal["auto", "gpu", "cpu"] = "auto"
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    log_dir: str = ""
    bind_cores: bool = False
    core_list: str = ""
    recovers: bool = False
    num_spares: int = 0
    num_sites: int = 1


@final
@dataclass(frozen=True)
class Rendezvous:
    """The settings of torch's rendezvous between the elastic agents. The default is one machine.

    kind: "c10d" (the agents agree on the participants), "static" (node_rank is given), or another of torch's.
    endpoint: "host:port"; port 0 means any free port.
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

    max_restarts: how many times all ranks are started again.
    min_nodes, max_nodes: the numbers of hosts with which a run continues; 0 means all hosts.
    fits: whether a number of ranks is valid (the config's elasticity section); None accepts any number.
    """

    max_restarts: int = 0
    min_nodes: int = 0
    max_nodes: int = 0
    fits: Callable[[int], bool] | None = None


@final
@dataclass(frozen=True)
class Host:
    """A machine of a hostfile. slots: the device numbers to use on it, one rank each.

    site: the name of the place where it stands; "" where the hostfile names none.
    is_spare: it has no ranks until another host is lost.
    """

    name: str
    slots: tuple[int, ...]
    site: str = ""
    is_spare: bool = False


@final
@dataclass(frozen=True)
class Remote:
    """How other machines are reached, and what is set on them.

    folder: the working folder on each machine; python: the path of the interpreter on each machine.
    venv_script: sourced before the interpreter starts; environment: variables that are set there.
    launcher_args: additional arguments for ssh, srun, mpirun, ... itself.
    is_numbered: the user named device numbers, so each host shows its ranks these alone.
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
    """What one host runs: its part of one start of all ranks. The head process sends it to the node process.

    generation: 0 for the first start, plus 1 for each restart, at most max_restarts.
    agent_restarts: how often torch's agent restarts the ranks itself, if there is no head process to do it.
    devices: the numbers of the GPUs that its ranks see; None leaves the visible GPUs unchanged.
    heartbeat_seconds: how often the head process writes to this host's standard input; 0 means never.
    key: seals the messages of the ranks, see utils/sealing.py; "" leaves the one in the environment, if any. It
        is secret: an order in the arguments of a command has none.
    counts: with recovery, the ranks of each host, in the order of their numbers; () on one machine. This host
        is number `rendezvous.node_rank` of them; None: it is spare, and its processes wait for a place.
    takes_over: the head before this one was killed. No rank starts until the head says which.
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
    key: str = field(default="", repr=False)
    counts: tuple[int, ...] = ()
    takes_over: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The order as JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Order:
        """The order from the result of `as_dict`."""
        fields = dict(record)
        job, rendezvous = dict(fields["job"]), fields["rendezvous"]
        job["args"] = tuple(job["args"])
        fields["job"], fields["rendezvous"] = Job(**job), Rendezvous(**rendezvous)
        if fields["devices"] is not None:
            fields["devices"] = tuple(fields["devices"])
        fields["counts"] = tuple(fields["counts"])
        return Order(**fields)
