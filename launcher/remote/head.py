"""The head process: runs a job on several hosts, through one connection per host or one command for all."""

from __future__ import annotations

from collections.abc import Sequence

from ...utils.errors import UsageError
from ..job import Host, Job, Remote, Restarts
from .backends.base import AllAtOnce, Backend, PerHost
from .host_selection import choose_hosts


def run(
    job: Job, hosts: Sequence[Host], remote: Remote, backend: Backend, restarts: Restarts
) -> int:
    """Run `job` on `hosts` to its end. Returns the exit code of the first rank that failed, or 0.

    Rank 0 is on the first host and writes to this process's streams. The others write to files on their hosts.

    Raises:
        UsageError: the backend's program is missing, or the numbers of hosts and ranks are not valid.
    """
    backend.check()
    if not choose_hosts(hosts, len(hosts), restarts):
        raise UsageError(_unfit(hosts, restarts))
    if isinstance(backend, AllAtOnce):
        from .head_at_once import run_at_once

        return run_at_once(job, hosts, remote, backend, restarts)
    from .head_per_host import run_per_host

    assert isinstance(backend, PerHost)
    return run_per_host(job, hosts, remote, backend, restarts)


def _unfit(hosts: Sequence[Host], restarts: Restarts) -> str:
    ranks = sum(len(host.slots) for host in hosts)
    least = restarts.min_nodes or len(hosts)
    if len(hosts) < least:
        return f"{len(hosts)} host(s) are named, {least} are needed; name more, or lower --nnodes"
    return (
        f"no number of ranks up to {ranks} (all slots of {len(hosts)} hosts) is valid for the elasticity"
        " section of the config; `xds elastic config.json` prints the valid ones"
    )
