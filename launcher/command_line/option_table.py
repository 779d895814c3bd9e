"""The table of all options of `xds`: names, value, help, and whether the option has an effect.

Options without a help text are not in `xds --help`. They are options of other launchers. They are accepted so
that a command line of another launcher runs unchanged, or fails with a reason.
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

    value: the name of its value; "" for a switch.
    elsewhere: what other launchers call it, in words: suggested to a user who writes it.
    is_torchrun: as in torchrun, the variable PET_... sets it if the command line does not.
    is_free: its value may look like an option of xds (arguments for another program).
    note: logged if the option is given, because it has no effect.
    reason: why the option has no effect; not logged.
    refusal: why the option cannot be used.
    harmless: values for which nothing is logged or refused.
    """

    name: str
    group: str
    value: str = ""
    help: str = ""
    aliases: tuple[str, ...] = ()
    elsewhere: str = ""
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
    Option("--as-deepspeed", _RUN,
        help="in each rank `import deepspeed` is xds.deepspeed: scripts for DeepSpeed run unchanged"),
    Option("--autotuning", _RUN, "MODE",
        "tune: find the fastest micro-batch and stage by experiments, as deepspeed does; run: then train so",
        choices=("tune", "run")),

    Option("--nproc-per-node", _HERE, "N",
        "ranks: a number, gpu, cpu (cores), or auto: one for each GPU, without one 2; on hosts: the first N"
        " slots of each",
        aliases=("--num-gpus", "--num-accelerators"), is_torchrun=True,
        elsewhere="nproc nprocs num-processes num-procs ranks num-ranks world-size gpus ngpus devices"
        " num-devices n np"),
    Option("--backend", _HERE, "NAME", "nccl, gloo or mpi (default: nccl on GPUs, gloo on CPUs)",
        choices=("nccl", "gloo", "mpi")),
    Option("--log-dir", _HERE, "DIR",
        "folder for the output of every rank (default: a new folder for each run under the cache folder)",
        aliases=("--enable-each-rank-log",), is_torchrun=True),
    Option("--bind-cores-to-rank", _HERE, help="give each rank cores of its own"),
    Option("--bind-core-list", _HERE, "LIST", "the cores to use, such as 0-3,8 (default: all)"),

    Option("--hostfile", _HOSTS, "FILE",
        "lines such as `worker-1 slots=8` (default: /job/hostfile if it exists)", aliases=("-H",),
        elsewhere="hosts machinefile hostlist"),
    Option("--include", _HOSTS, "HOSTS", "only these: host[:slot,slot][@host...]; slots also as 0-3",
        aliases=("-i",)),
    Option("--exclude", _HOSTS, "HOSTS", "all but these", aliases=("-e",)),
    Option("--num-nodes", _HOSTS, "N", "the first N hosts"),
    Option("--launcher", _HOSTS, "NAME",
        "ssh (default for hostfiles), pdsh, slurm (default inside an allocation), openmpi, mpich, impi; local:"
        " only this machine, even inside a cluster"),
    Option("--launcher-args", _HOSTS, "WORDS", "more arguments for ssh, srun, mpirun, ..., in one string",
        is_free=True),
    Option("--ssh-port", _HOSTS, "PORT", "the port of sshd on the hosts"),
    Option("--venv-script", _HOSTS, "FILE", "script to source first on each host, a path on that host"),
    Option("--master-addr", _HOSTS, "ADDRESS",
        "address of the first host, or of this machine with --recover (default: the one of the connections)",
        is_torchrun=True, elsewhere="main-process-ip main-address"),
    Option("--master-port", _HOSTS, "PORT",
        "port on the first host (default: a free one; torchrun's rendezvous: 29500)",
        is_torchrun=True, elsewhere="main-process-port main-port port"),
    Option("--force-multi", _HOSTS, help="use the launcher even if the only host is this one"),

    Option("--recover", _RESTARTS,
        help="when a rank fails the others go on in the same processes; needs recovery.enabled in the config"),
    Option("--spares", _RESTARTS, "N",
        "with --recover: processes on each host that wait for a lost rank's place (default: 0)"),
    Option("--max-restarts", _RESTARTS, "N", "how many times all ranks are started again (default: 0)",
        is_torchrun=True),
    Option("--elastic-training", _RESTARTS,
        help="continue with the remaining hosts; the defaults become 100 restarts and at least 1 host"),
    Option("--min-elastic-nodes", _RESTARTS, "N", "the smallest number of hosts to continue with"),
    Option("--max-elastic-nodes", _RESTARTS, "N", "the largest number of hosts to use at a time"),
    Option("--elastic-config", _RESTARTS, "FILE",
        "the config whose elasticity section defines the valid numbers of ranks"),

    Option("--nnodes", _EACH, "N",
        "number of machines, or MIN:MAX", is_torchrun=True, elsewhere="num-machines nodes machines"),
    Option("--node-rank", _EACH, "N", "this machine's number, for the static rendezvous and --no-ssh",
        is_torchrun=True, elsewhere="machine-rank"),
    Option("--rdzv-backend", _EACH, "NAME", "static (default), c10d, or another of torch's",
        is_torchrun=True),
    Option("--rdzv-endpoint", _EACH, "HOST:PORT", "the rendezvous endpoint (default port with c10d: 29400)",
        is_torchrun=True),
    Option("--rdzv-id", _EACH, "NAME", "the id of this run, the same on every machine", is_torchrun=True),
    Option("--rdzv-conf", _EACH, "K=V,...", "more rendezvous settings of torch", is_torchrun=True),
    Option("--local-addr", _EACH, "ADDRESS", "the address by which the others reach this machine",
        is_torchrun=True),
    Option("--standalone", _EACH, help="only this machine, with a free port (the default for one machine)",
        is_torchrun=True),
    Option("--no-ssh", _EACH, help="with --hostfile and --node-rank: xds is started on every host"),

    Option("--quiet", _MORE, help="show warnings and errors alone; as --log-level warning", aliases=("-q",)),
    Option("--log-level", _MORE, "LEVEL", "what rank 0 shows of xds's messages (default: info)",
        choices=("debug", "info", "warning", "error", "critical")),
    Option("--version", _MORE, help="print the version"),
    Option("--help", _MORE, help="print this", aliases=("-h",)),

    # accepted without effect, because xds always does this
    Option("--no-local-rank", _MORE,
        reason="xds never adds --local_rank to the script's arguments; the number is in LOCAL_RANK"),
    Option("--no-ssh-check", _MORE,
        reason="there is no separate check; a failing connection is reported"),
    Option("--run-path", _MORE, is_torchrun=True,
        reason="a script always runs in the rank's own interpreter, as with python"),
    Option("--start-method", _MORE, "NAME", choices=("spawn", "fork", "forkserver"), is_torchrun=True,
        reason="ranks are processes of their own program, never forks of xds"),
    Option("--monitor-interval", _MORE, "SECONDS", is_torchrun=True,
        reason="the end of a rank is detected within 0.1 s"),
    Option("--redirects", _MORE, "STREAMS", aliases=("-r",), is_torchrun=True,
        reason="both streams of every rank are always written to its file"),
    Option("--signals-to-handle", _MORE, "SIGNALS", is_torchrun=True, harmless=(
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",),
        note="SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded, always and only"),
    Option("--tee", _MORE, "STREAMS", aliases=("-t",), is_torchrun=True, harmless=("0",),
        note="every rank's output is written to its file, and rank 0's also to the terminal"),
    Option("--local-ranks-filter", _MORE, "RANKS", is_torchrun=True, harmless=("0",),
        note="rank 0's output is on the terminal, that of the others in their files"),
    Option("--role", _MORE, "NAME", is_torchrun=True, harmless=("default",),
        note="all ranks have the same role"),
    Option("--event-log-handler", _MORE, "NAME", is_torchrun=True, harmless=("null",),
        note="xds logs events itself"),
    Option("--save-pid", _MORE, note="the shell has the process id of xds in $!"),
    Option("--shutdown-timeout", _MORE, "SECONDS", is_torchrun=True,
        note="ranks have 3.5 s to end, or checkpoint.preemption_seconds of the config"),

    # refused
    Option("--dry-run", _MORE,
        refusal="was removed; `xds check` explains a config, and `xds --help` the options"),
    Option("--python", _MORE, "PATH",
        refusal="was removed; start xds with the interpreter whose path exists on all machines"),
    Option("--threads-per-rank", _MORE, "N", refusal="was removed; set the variable OMP_NUM_THREADS"),
    Option("--duplicate-stdout-filters", _MORE, "WORDS", is_torchrun=True,
        refusal="xds does not filter output; give --log-dir and search the ranks' files"),
    Option("--duplicate-stderr-filters", _MORE, "WORDS", is_torchrun=True,
        refusal="xds does not filter output; give --log-dir and search the ranks' files"),
    Option("--logs-specs", _MORE, "NAME",
        refusal="xds writes the ranks' files itself; set --log-dir"),
    Option("--numa-binding", _MORE, "MODE",
        refusal="xds binds to cores, not to NUMA nodes; set --bind-cores-to-rank and --bind-core-list"),
    Option("--virtual-local-rank", _MORE, is_torchrun=True,
        refusal="every rank sees all GPUs, and its local rank in LOCAL_RANK; use that in the script"),
)  # fmt: skip
