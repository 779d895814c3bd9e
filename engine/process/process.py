"""Sets up the process: local rank, device and process group."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ...ops.device import device_of, device_type, has_backend, num_devices
from ...ops.torch_internals import open_fake_group
from ...utils.errors import PeerError, UsageError
from ...utils.messages import write_stderr
from .foreign_launcher import fill, place

TIMEOUT_SECONDS = 600.0
MAX_TIMEOUT_SECONDS = 1e6  # eleven days; gloo counts milliseconds in 32 bits
LATE_SECONDS = 30.0  # then a rank says for whom it waits
_CONNECT_SECONDS = 2.0
_TICK_SECONDS = 0.1
_first_rank = 0  # of the set of this rank: see `join`
_HOST_ADDRESS = "XDS_HOST_ADDRESS"  # of this host, where the launcher has started ranks on several
LAUNCHER_KEYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def local_rank() -> int:
    """This process's number on its node; 0 if the environment does not define it."""
    if "LOCAL_RANK" not in os.environ:
        with contextlib.suppress(UsageError):  # `join` raises it if it has to create the group
            found = place(os.environ)
            return found.local_rank if found is not None else 0
    return int(os.environ.get("LOCAL_RANK", "0"))


def pick_device() -> torch.device:
    """The device of this local rank, which becomes the current one; the CPU on a node without accelerators.

    A spare waits here until it has the place of a lost rank.

    Raises:
        UsageError: DS_ACCELERATOR names a device that torch does not find.
    """
    _take_place()
    count = num_devices()
    if not count:
        return torch.device("cpu")
    device = torch.device(device_type(), local_rank() % count)
    device_of(device).make_current()
    return device


def _take_place() -> None:
    if "XDS_SPARE" in os.environ:
        from ...recovery.spares import take_place

        take_place()


@dataclass(frozen=True)
class Joins:
    """This process takes the place of a lost rank of a run that goes on.

    generation: of the run when it was started. attempt: its number among such processes.
    """

    generation: int
    attempt: int


def joins() -> Joins | None:
    """What the launcher says in XDS_JOINS; None: this process has started with the run."""
    found = os.environ.get("XDS_JOINS", "")
    return Joins(*map(int, found.split())) if found else None


def num_sites() -> int:
    """What the launcher says in XDS_SITES: the sites of the hostfile. Each has as many consecutive ranks."""
    return int(os.environ.get("XDS_SITES", "1"))


def check_spare_hosts(wanted: int) -> None:
    """Raises UsageError: the launcher has fewer spare hosts (XDS_SPARE_HOSTS) than the config wants."""
    found = int(os.environ.get("XDS_SPARE_HOSTS", "0"))
    if found < wanted:
        raise UsageError(
            f"recovery.spare_hosts = {wanted}: the launcher reaches {found}; write `spare` after the slots of "
            "so many hosts of the hostfile, start with `xds --recover --hostfile`, or set a smaller number"
        )


def num_launched() -> int | None:
    """The ranks that a launcher has described; None: none has. The same on all ranks."""
    found = os.environ.get("WORLD_SIZE", "")
    return int(found) if found else None


def is_launched() -> bool:
    """There may be other ranks: the process group exists, or a launcher has described it."""
    return dist.is_initialized() or all(key in os.environ for key in LAUNCHER_KEYS)


def join(device: torch.device, num_sets: int = 1) -> dist.ProcessGroup:
    """The default process group; created from the launcher's environment if it does not exist.

    num_sets: so many equal sets of consecutive ranks each have a default group of their own.

    - If srun or mpirun started one process per rank, their variables are read. Without a launcher's
      environment the group has one rank.
    - `XDS_BACKEND` selects a backend; the default is the device's own, nccl on GPUs, and gloo on CPUs.
    - `XDS_TIMEOUT_SECONDS` is how long a rank waits for the others before it fails. An existing group keeps
      its own timeout.
    - NCCL connects the ranks here, on their devices, and not at the first collective; see `start_group`.

    Raises:
        UsageError: the backend is not available, the timeout is invalid, or the environment is incomplete.
        PeerError: the ranks have not met within the timeout.
    """
    _take_place()
    if not dist.is_initialized():
        backend = _backend(device)
        timeout = timedelta(seconds=timeout_seconds())
        if backend != "mpi":
            fill(os.environ)
        present = [key for key in LAUNCHER_KEYS if key in os.environ]
        if num_sets > 1:
            _start_set(backend, device, num_sets, timeout)
        elif joins() is not None:
            # the others train: nothing is sent until this rank has its place
            open_fake_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        elif backend == "mpi":
            dist.init_process_group("mpi")
        elif len(present) == len(LAUNCHER_KEYS):
            with _meeting(timeout.total_seconds()):
                start_group(backend, device, int(os.environ["WORLD_SIZE"]), timeout=timeout)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            missing = ", ".join(key for key in LAUNCHER_KEYS if key not in present)
            raise UsageError(
                f"WORLD_SIZE = {os.environ['WORLD_SIZE']}, but {missing} is not set: start the script with "
                "`xds script.py`, or call torch.distributed.init_process_group before xds.initialize"
            )
        else:
            dist.init_process_group(
                backend, store=HashStore(), rank=0, world_size=1, timeout=timeout
            )
    group = dist.group.WORLD
    assert group is not None
    return group


def rank_in_job() -> int:
    """The number of this rank among all of the job, also where sets of ranks have groups of their own."""
    return _first_rank + dist.get_rank()


def _start_set(backend: str, device: torch.device, num_sets: int, timeout: timedelta) -> None:
    """Create the group of one of `num_sets` sets of ranks. New processes of a set have another name for it."""
    found = joins()
    num_ranks = int(os.environ["WORLD_SIZE"]) // num_sets
    global _first_rank
    number, rank = divmod(int(os.environ["RANK"]), num_ranks)
    _first_rank = number * num_ranks
    # the launcher numbers new processes in the order of their ranks
    name = f"set{number}/{0 if found is None else found.attempt - rank}"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with _meeting(timeout.total_seconds()):
        base = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        if _HOST_ADDRESS in os.environ:
            base = _store_of_set(base, name, rank, timeout.total_seconds())
        store = dist.PrefixStore(name, base)  # type: ignore[attr-defined]
        start_group(
            backend,
            device,
            num_ranks,
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
        )


def _store_of_set(told: Any, name: str, rank: int, timeout_seconds: float) -> Any:
    """The store of a set of ranks, on the host of its first one. Where that is, they learn at the launcher's.

    So ranks of one site meet inside it, however far away the launcher is.
    """
    from ...ops.watch.store import Store, serve_store

    messages = Store(told, "sets", rank)
    if not rank:
        address = os.environ[_HOST_ADDRESS]
        store = serve_store(address)
        messages.set(name, f"{store.port} {address}")
        return store
    deadline = time.monotonic() + timeout_seconds
    while (found := messages.read(name)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("their first rank has not said where they meet")
        time.sleep(_TICK_SECONDS)
    port, _, address = found.partition(" ")
    return dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _meeting(timeout_seconds: float) -> Iterator[None]:
    """The start of the group from the environment: its errors are sentences, and it ends at the timeout."""
    rank, num_ranks, host, port = (os.environ[key] for key in LAUNCHER_KEYS)
    who = f"rank {rank} of {num_ranks} waits for the others at {host}:{port}"
    late = threading.Timer(LATE_SECONDS, write_stderr, (f"xds: {who}; {_MEETING}\n",))
    late.daemon = True
    late.start()
    try:
        # torch's own agent serves the store and is there; torch waits for longer than its timeout
        if rank != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            _reach(host, int(port), timeout_seconds)
        yield
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in reason:
            raise UsageError(
                f"MASTER_PORT = {port}: in use on this machine, by another run or program; set another port, "
                "the same for all ranks; `xds script.py` finds a free one"
            ) from error
        raise PeerError(
            f"{who}, for at most {timeout_seconds:.0f} s (XDS_TIMEOUT_SECONDS), and they have not met: "
            f"{reason}; {_MEETING}"
        ) from error
    finally:
        late.cancel()


_MEETING = (
    "start every rank, with the same MASTER_ADDR and MASTER_PORT, and look at the output of those that have "
    "ended; a process that is alone needs RANK, WORLD_SIZE and the variables of mpirun and srun unset"
)


def _reach(host: str, port: int, timeout_seconds: float) -> None:
    """Wait until rank 0 answers. Raises OSError: it has not within the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            return
        except OSError:  # also a name that is not known yet
            if time.monotonic() > deadline:
                raise
        time.sleep(_TICK_SECONDS)


def start_group(backend: str, device: torch.device, num_ranks: int, **options: Any) -> None:
    """Create the group of all ranks; with NCCL on `device`, which connects the ranks now.

    A group that keeps its device makes torch build every later group by ncclCommSplit, which waits for all
    ranks. `new_group(use_local_synchronization=True)`, and a group with processes of another job, would hang.
    So the device is forgotten once the ranks are connected: later groups connect by themselves.

    options: more arguments of init_process_group.
    """
    connects = backend == "nccl" and device.type != "cpu" and num_ranks > 1
    if not connects:
        dist.init_process_group(backend, **options)
        return
    dist.init_process_group(backend, device_id=device, **options)
    group = dist.group.WORLD
    assert group is not None
    group.bound_device_id = None


def timeout_seconds() -> float:
    """How long a rank waits for another rank: XDS_TIMEOUT_SECONDS, or ten minutes."""
    requested = os.environ.get("XDS_TIMEOUT_SECONDS", "")
    try:
        seconds = float(requested) if requested else TIMEOUT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise UsageError(
            f'XDS_TIMEOUT_SECONDS = "{requested}": must be a number of seconds above 0, at most '
            f"{MAX_TIMEOUT_SECONDS:.0f}; {TIMEOUT_SECONDS:.0f} is the default when it is unset"
        )
    return seconds


def _backend(device: torch.device) -> str:
    requested = os.environ.get("XDS_BACKEND", "")
    own = device_of(device).backend
    backend = requested or own
    names = [name for name in dict.fromkeys(("nccl", "gloo", "mpi", own)) if has_backend(name)]
    if backend not in names:
        raise UsageError(
            f'XDS_BACKEND = "{backend}": this torch has {", ".join(names)}; choose one of them or '
            "leave it unset"
        )
    return backend
