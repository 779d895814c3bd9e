"""The ways to start the node part on other machines, by the names that `--launcher` takes."""

from __future__ import annotations

from ...ops.errors import UsageError
from .base import AllAtOnce, Backend, PerHost, node_index
from .ssh import Ssh

__all__ = ["BACKENDS", "AllAtOnce", "Backend", "PerHost", "backend_named", "node_index"]

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Ssh(),)}


def backend_named(name: str) -> Backend:
    """The backend of that name, whose program is there.

    Raises:
        UsageError: there is no such backend, or this machine has not got its program.
    """
    if name not in BACKENDS:
        raise UsageError(f"--launcher = {name}: must be one of {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    backend.check()
    return backend
