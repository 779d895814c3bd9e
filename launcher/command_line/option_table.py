"""Every option of `xds`, a line or two each: its names, its value, its help, and what becomes of it.

Options without a help text are not in `xds --help`: other launchers have them, and they are read here so that
a command line of theirs runs unchanged, or says why it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

_RUN, _HERE, _HOSTS = "what to run", "on this machine", "on many machines, started from here"
_RESTARTS = "after a failure"
_EACH = "on many machines, started on each (as torchrun is)"
_MORE = "more"
GROUPS = (_RUN, _HERE, _HOSTS, _RESTARTS, _EACH, _MORE)


@final
@dataclass(frozen=True)
class Option:
    """One option.

    value: what its value is called; "" for a switch.
    is_torchrun: the variable PET_... gives it where the command line does not, as for torchrun.
    is_free: its value may look like an option of ours (words for another program).
    note: said when it is given, because it has no effect; reason: why nobody need be told that.
    refusal: why it cannot be given.
    harmless: values that are neither told nor refused.
    """

    name: str
    group: str
    value: str = ""
    help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    is_torchrun: bool = False
    is_free: bool = False
    note: str = ""
    reason: str = ""
    refusal: str = ""
    harmless: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.name.strip("-").replace("-", "_")


OPTIONS = (
    Option("--module", _RUN, help="the script is a module's name, as for python -m",
        aliases=("-m",), is_torchrun=True),
    Option("--no-python", _RUN, help="the script is a program of any kind", is_torchrun=True),
    Option("--python", _RUN, "PATH",
        "the interpreter on the other machines, a path there (default: the one that runs xds)"),
    Option("--dry-run", _RUN, help="print every command and the order of each host; start nothing"),

    Option("--nproc-per-node", _HERE, "N",
        "ranks: a number, gpu, cpu (cores), or auto: one for each GPU, without one 2; on hosts: the first N"
        " slots of each. Also --num-gpus",
        aliases=("--num-gpus", "--num-accelerators"), is_torchrun=True),
    Option("--backend", _HERE, "NAME", "nccl, gloo or mpi (default: nccl on GPUs, gloo on CPUs)",
        choices=("nccl", "gloo", "mpi")),
    Option("--threads-per-rank", _HERE, "N",
        "OMP_NUM_THREADS (default: the variable, or cores divided by ranks)"),
    Option("--log-dir", _HERE, "DIR",
        "keep the output of every rank here (default: a folder for each run under the cache folder)",
        aliases=("--enable-each-rank-log",), is_torchrun=True),
    Option("--bind-cores-to-rank", _HERE, help="give each rank cores of its own"),
    Option("--bind-core-list", _HERE, "LIST", "of these cores, such as 0-3,8 (default: all)"),

    Option("--hostfile", _HOSTS, "FILE",
        "lines such as `worker-1 slots=8` (default: /job/hostfile where it is there)", aliases=("-H",)),
    Option("--include", _HOSTS, "HOSTS", "only these: host[:slot,slot][@host...]; slots also as 0-3",
        aliases=("-i",)),
    Option("--exclude", _HOSTS, "HOSTS", "all but these", aliases=("-e",)),
    Option("--num-nodes", _HOSTS, "N", "the first N hosts"),
    Option("--launcher", _HOSTS, "NAME",
        "ssh (default for hostfiles), pdsh, slurm (default inside an allocation), openmpi, mpich, impi; local:"
        " this machine alone, whatever surrounds it"),
    Option("--launcher-args", _HOSTS, "WORDS", "further words for ssh, srun, mpirun, ..., in one argument",
        is_free=True),
    Option("--ssh-port", _HOSTS, "PORT", "where sshd listens on the hosts"),
    Option("--venv-script", _HOSTS, "FILE", "sourced on each host first, a path there"),
    Option("--master-addr", _HOSTS, "ADDRESS", "of the first host (default: how it is reached)",
        is_torchrun=True),
    Option("--master-port", _HOSTS, "PORT", "there (default: a free one; torchrun's rendezvous: 29500)",
        is_torchrun=True),
    Option("--force-multi", _HOSTS, help="through the launcher even where the only host is this one"),

    Option("--max-restarts", _RESTARTS, "N", "start all ranks again, so often (default 0)",
        is_torchrun=True),
    Option("--elastic-training", _RESTARTS,
        help="go on with the hosts that are left: 100 restarts, from 1 host on, unless said otherwise"),
    Option("--min-elastic-nodes", _RESTARTS, "N", "go on with no fewer hosts"),
    Option("--max-elastic-nodes", _RESTARTS, "N", "use no more hosts at a time"),
    Option("--elastic-config", _RESTARTS, "FILE",
        "the config whose elasticity section says which numbers of ranks fit"),

    Option("--nnodes", _EACH, "N",
        "machines, or MIN:MAX of them; with a hostfile: how many hosts run at a time, further ones are spares",
        is_torchrun=True),
    Option("--node-rank", _EACH, "N", "this machine's number, for the static rendezvous and --no-ssh",
        is_torchrun=True),
    Option("--rdzv-backend", _EACH, "NAME", "static (default), c10d, or another of torch's",
        is_torchrun=True),
    Option("--rdzv-endpoint", _EACH, "HOST:PORT", "where the machines meet (c10d: port 29400)",
        is_torchrun=True),
    Option("--rdzv-id", _EACH, "NAME", "of this run, the same on every machine", is_torchrun=True),
    Option("--rdzv-conf", _EACH, "K=V,...", "torch's further settings", is_torchrun=True),
    Option("--local-addr", _EACH, "ADDRESS", "by which the others reach this machine",
        is_torchrun=True),
    Option("--standalone", _EACH, help="this machine alone, a free port (the default without others)",
        is_torchrun=True),
    Option("--no-ssh", _EACH, help="with --hostfile and --node-rank: every host starts its own part"),

    Option("--save-pid", _MORE, help="write the process id to <pid>.ds in the temporary folder"),
    Option("--quiet", _MORE, help="say nothing about options without effect", aliases=("-q",)),
    Option("--version", _MORE, help="print the version"),
    Option("--help", _MORE, help="print this", aliases=("-h",)),

    # read, because xds does so anyway
    Option("--no-local-rank", _MORE,
        reason="xds never adds --local_rank to the script's arguments; the number is in LOCAL_RANK"),
    Option("--no-ssh-check", _MORE,
        reason="the connection itself tells; there is no other check before it"),
    Option("--run-path", _MORE, is_torchrun=True,
        reason="a script always runs in the rank's own interpreter, as python would run it"),
    Option("--start-method", _MORE, "NAME", choices=("spawn", "fork", "forkserver"), is_torchrun=True,
        reason="ranks are processes of their own program, never forks of xds"),
    Option("--monitor-interval", _MORE, "SECONDS", is_torchrun=True,
        reason="the end of a rank is noticed within 0.1 s"),
    Option("--redirects", _MORE, "STREAMS", aliases=("-r",), is_torchrun=True,
        reason="both streams of every rank are kept in its file anyway"),
    Option("--log-level", _MORE, "LEVEL", choices=("debug", "info", "warning", "error", "critical"),
        reason="xds says only what went wrong; see --quiet"),
    Option("--signals-to-handle", _MORE, "SIGNALS", is_torchrun=True, harmless=(
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",),
        note="SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded, always and only"),
    Option("--tee", _MORE, "STREAMS", aliases=("-t",), is_torchrun=True, harmless=("0",),
        note="every rank's output is kept in its file, and rank 0's is on the terminal too"),
    Option("--local-ranks-filter", _MORE, "RANKS", is_torchrun=True, harmless=("0",),
        note="rank 0's output is on the terminal, the others' in their files"),
    Option("--role", _MORE, "NAME", is_torchrun=True, harmless=("default",),
        note="all ranks have one role"),
    Option("--event-log-handler", _MORE, "NAME", is_torchrun=True, harmless=("null",),
        note="xds tells what happens itself"),
    Option("--shutdown-timeout", _MORE, "SECONDS", is_torchrun=True,
        note="ranks have 3.5 s to end, or what the config says with checkpoint.preemption_seconds"),

    # refused
    Option("--autotuning", _MORE, "MODE",
        refusal="there is no autotuner yet; try sizes with `xds check`, and start without this option"),
    Option("--duplicate-stdout-filters", _MORE, "WORDS", is_torchrun=True,
        refusal="xds does not filter output; give --log-dir and search the ranks' files"),
    Option("--duplicate-stderr-filters", _MORE, "WORDS", is_torchrun=True,
        refusal="xds does not filter output; give --log-dir and search the ranks' files"),
    Option("--logs-specs", _MORE, "NAME",
        refusal="xds writes the ranks' files itself; give --log-dir"),
    Option("--numa-binding", _MORE, "MODE",
        refusal="xds binds to cores, not to NUMA nodes; give --bind-cores-to-rank and --bind-core-list"),
    Option("--virtual-local-rank", _MORE, is_torchrun=True,
        refusal="every rank sees all GPUs, and its own number in LOCAL_RANK; let the script use that"),
)  # fmt: skip
