"""`xds --dry-run`: prints every command that would run, and the order of each host. Starts nothing.

Values of variables whose names suggest secrets are printed as ***, also inside packed orders.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..job import Host, Job, Order, Remote, Rendezvous, Restarts
from ..remote.backends import BACKENDS, AllAtOnce, Backend, PerHost
from ..remote.backends.orders import encode
from .forwarded_variables import is_secret

if TYPE_CHECKING:
    from .where import Hosts, Local

_HIDDEN = "***"
_TOKEN = "TOKEN"
_PORT = "29500"
_ORDERS_LAST = ("folder", "environment")


def show(where: Local | Hosts) -> int:
    """Print the commands for `where`. Returns 0."""
    from .where import Hosts

    if isinstance(where, Hosts):
        backend = BACKENDS[where.launcher]
        text = dry_run(where.job, where.hosts, where.remote, backend, where.restarts)
    else:
        text = dry_run_here(where.job, where.rendezvous, where.restarts, where.devices)
    sys.stdout.write(text)
    return 0


def dry_run(
    job: Job, hosts: Sequence[Host], remote: Remote, backend: Backend, restarts: Restarts
) -> str:
    """The commands that would start `job` on `hosts` through `backend`, one per line.

    Raises:
        UsageError: the real start would raise the same error.
    """
    from ..remote.host_selection import choose_hosts
    from ..remote.start import make_orders

    shown = replace(remote, environment=without_secrets(remote.environment))
    first = hosts[0].name.rpartition("@")[2]
    address = remote.master_addr or first
    port = remote.master_port or (0 if isinstance(backend, PerHost) else int(_PORT))
    rendezvous = Rendezvous(
        "static", f"[{address}]:{port}" if ":" in address else f"{address}:{port}", f"{_TOKEN}.0"
    )
    chosen = choose_hosts(hosts, len(hosts), restarts) or [
        (host, len(host.slots)) for host in hosts
    ]
    orders = make_orders(job, chosen, shown, rendezvous)
    orders = [replace(order, max_restarts=restarts.max_restarts) for order in orders]
    lines = [*_head_lines(backend, orders, remote, restarts)]
    if isinstance(backend, PerHost):
        argv = [remote.python, "-u", "-m", "xds.launcher.remote.node"]
        for (host, _), order in zip(chosen, orders, strict=True):
            lines += [shlex.join(backend.command(host, shown, argv)), *_order_lines(order)]
    elif isinstance(backend, AllAtOnce):
        argv = [
            remote.python,
            "-u",
            "-m",
            "xds.launcher.remote.node",
            "--orders",
            encode(_TOKEN, orders),
        ]
        command = backend.command([host for host, _ in chosen], shown, argv)
        extra = without_secrets(backend.environment(shown))
        prefix = ["env", *(f"{key}={value}" for key, value in extra.items())] if extra else []
        lines.append(shlex.join([*prefix, *command]))
        for order in orders:
            lines += _order_lines(order)
    return "".join(f"{line}\n" for line in lines)


def dry_run_here(
    job: Job,
    rendezvous: Rendezvous,
    restarts: Restarts,
    devices: Sequence[int] | None = None,
) -> str:
    """The commands that would run on this machine, one for each rank.

    Raises:
        UsageError: this machine lacks the requested devices or backend.
    """
    from ..ranks.elastic import count_ranks, num_cores

    num_ranks = len(devices) if devices is not None else count_ranks(job, job.num_ranks)
    threads = job.threads_per_rank or max(1, num_cores() // num_ranks)
    is_alone = rendezvous.max_nodes == 1
    is_known = is_alone or rendezvous.node_rank is not None
    address, _, port = rendezvous.endpoint.rpartition(":")
    lines = [
        f"# {num_ranks} ranks on this machine, supervised by this process; a rank is started as by:"
    ]
    if not is_alone:
        nodes = f"{rendezvous.min_nodes} to {rendezvous.max_nodes}"
        nodes = nodes if rendezvous.min_nodes != rendezvous.max_nodes else f"{rendezvous.max_nodes}"
        lines.append(
            f"# one of {nodes} machines; rendezvous at {rendezvous.endpoint} ({rendezvous.kind})"
        )
    if not is_known:
        lines.append(
            "# ranks are numbered after the rendezvous; shown here as if this machine was the first"
        )
    lines.append(f"# restarts after a failure: {restarts.max_restarts}")
    first = num_ranks * (rendezvous.node_rank or 0)
    environment = {
        "CUDA_VISIBLE_DEVICES": "" if devices is None else ",".join(map(str, devices)),
        "WORLD_SIZE": str(num_ranks * rendezvous.max_nodes),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port if port not in ("", "0") else _PORT,
        "OMP_NUM_THREADS": str(threads),
        "XDS_BACKEND": job.backend or "",
    }
    for local_rank in range(num_ranks):
        own = {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank), **environment}
        settings = [f"{key}={value}" for key, value in own.items() if value]
        lines.append(shlex.join(["env", *settings, *_script(job)]))
    return "".join(f"{line}\n" for line in lines)


def _script(job: Job) -> list[str]:
    before = {
        "script": [sys.executable, "-u"],
        "module": [sys.executable, "-u", "-m"],
        "program": [],
    }
    return [*before[job.kind], job.target, *job.args]


def _head_lines(
    backend: Backend, orders: Sequence[Order], remote: Remote, restarts: Restarts
) -> Iterator[str]:
    ranks = sum(order.num_ranks for order in orders if isinstance(order.num_ranks, int))
    yield f"# {ranks} ranks on {len(orders)} hosts, started through {backend.name}"
    if isinstance(backend, PerHost):
        yield "# each command starts a node process, which reads its order from its standard input:"
        if not remote.master_port:
            yield "# the rendezvous port is a free port that the first host reports (0 here)"
    else:
        yield "# one command for all hosts; the orders are packed in its arguments; in short they are:"
        if not remote.master_port:
            yield f"# the rendezvous port is chosen at each start ({_PORT} here)"
    least = restarts.min_nodes or len(orders)
    yield f"# restarts after a failure: {restarts.max_restarts}, with at least {least} hosts"


def _order_lines(order: Order) -> Iterator[str]:
    """The order as comment lines, one for each setting."""
    fields = order.as_dict()
    job, rendezvous = fields["job"], fields["rendezvous"]
    yield f"#   host {json.dumps(order.host)}: {order.num_ranks} ranks"
    yield f"#     {job['kind']}: {json.dumps([job['target'], *job['args']])}"
    node = f"node {rendezvous['node_rank']} of {rendezvous['max_nodes']}"
    yield f"#     rendezvous at {rendezvous['endpoint']} as {node}"
    if order.devices is not None:
        yield f"#     devices: {','.join(map(str, order.devices))}"
    details: dict[str, Any] = {
        key: job[key] for key in ("backend", "threads_per_rank", "log_dir") if job[key]
    }
    details |= {key: fields[key] for key in _ORDERS_LAST if fields[key]}
    for key, value in details.items():
        yield f"#     {key}: {json.dumps(value, sort_keys=True)}"


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, with *** as the value of those whose names suggest secrets."""
    return {key: _HIDDEN if is_secret(key) else value for key, value in environment.items()}
