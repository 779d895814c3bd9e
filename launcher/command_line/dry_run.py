"""`xds --dry-run`: prints the command lines of a run, and starts nothing.

Values of variables whose names suggest secrets are printed as ***. The orders that node processes get (the
script, its arguments, the rendezvous, variables) are not printed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..job import Job
from .forwarded_variables import is_secret

if TYPE_CHECKING:
    from .where import Hosts, Local

_NODE = ("-u", "-m", "xds.launcher.remote.node")


def show(where: Local | Hosts) -> int:
    """Print the commands for `where`. Returns 0.

    Raises:
        UsageError: the real start would raise the same error.
    """
    from .where import Hosts

    for line in _on_hosts(where) if isinstance(where, Hosts) else _here(where):
        print(line)
    return 0


def _here(where: Local) -> Iterator[str]:
    from ..ranks.elastic import count_ranks

    devices, meeting = where.devices, where.rendezvous
    ranks = len(devices) if devices is not None else count_ranks(where.job, where.job.num_ranks)
    yield f"# {ranks} ranks on this machine" + ("" if devices is None else f", devices {devices}")
    if meeting.max_nodes > 1:
        yield f"# one of {meeting.max_nodes} machines; rendezvous at {meeting.endpoint}"
    yield f"# restarts after a failure: {where.restarts.max_restarts}; each rank is started as by:"
    yield shlex.join(_script(where.job, sys.executable))


def _on_hosts(where: Hosts) -> Iterator[str]:
    from ..remote.backends import BACKENDS, AllAtOnce, PerHost

    backend, remote = BACKENDS[where.launcher], where.remote
    shown = replace(remote, environment=without_secrets(remote.environment))
    node = [remote.python, *_NODE]
    slots = ", ".join(f"{host.name} {len(host.slots)}" for host in where.hosts)
    yield f"# ranks on each host: {slots}"
    yield f"# restarts after a failure: {where.restarts.max_restarts}; each rank is started as by:"
    yield f"# {shlex.join(_script(where.job, remote.python))}"
    if isinstance(backend, PerHost):
        for host in where.hosts:
            yield shlex.join(backend.command(host, shown, node))
    elif isinstance(backend, AllAtOnce):
        extra = without_secrets(backend.environment(shown))
        prefix = ["env", *(f"{key}={value}" for key, value in extra.items())] if extra else []
        command = backend.command(where.hosts, shown, [*node, "--orders", "ORDERS"])
        yield shlex.join([*prefix, *command])


def _script(job: Job, python: str) -> list[str]:
    before = {"script": [python, "-u"], "module": [python, "-u", "-m"], "program": []}
    return [*before[job.kind], job.target, *job.args]


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, with *** as the value of those whose names suggest secrets."""
    return {key: "***" if is_secret(key) else value for key, value in environment.items()}
