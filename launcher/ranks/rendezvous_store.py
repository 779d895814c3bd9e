"""The store in which the ranks meet, listening where it is asked for and nowhere else.

torch's own listens on every interface, and whoever reaches it may read and write all that it holds. So the
socket is made here and handed to torch: bound to the loopback for one machine, and else to the address at which
the machines meet. Within one process torch finds the server of a port that is open already.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import final

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ..job import Rendezvous
from .network import is_loopback, split_endpoint

_DYNAMIC = "xds-c10d"  # torch's c10d, with the second store that it makes bound as well
_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_NO = ("0", "false", "f", "no", "n")  # as torch reads it


def serve(rendezvous: Rendezvous) -> tuple[Rendezvous, TCPStore | None]:
    """The rendezvous for torch's agent, and its store where this process serves it; keep it until the end.

    Where no address of this machine is asked for (a service's, one behind NAT) torch listens everywhere.
    """
    if rendezvous.kind not in ("c10d", "static"):
        return rendezvous, None
    host, port = split_endpoint(rendezvous.endpoint)
    if rendezvous.max_nodes == 1:
        listening = _bound(_LOOPBACK, port)
        store = _served(listening) if listening else None
        port = store.port if store else port  # one that is taken: torch says so, or it is our own
        here = replace(rendezvous, kind="static", endpoint=f"{_LOOPBACK}:{port}", node_rank=0)
        return (here if port else rendezvous), store
    if rendezvous.kind == "c10d":
        rendezvous = replace(rendezvous, kind=_DYNAMIC)
    is_elsewhere = (
        rendezvous.node_rank or str(rendezvous.settings.get("is_host", "")).lower() in _NO
    )
    listening = _listening(host, port) if port and not is_elsewhere else None
    return rendezvous, _served(listening) if listening else None


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket on the first address of `host` that is this machine's and that the others reach, too."""
    is_same_for_all = is_loopback(host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for _, _, _, _, address in found:
        # many a machine has its own name on the loopback: others know it by another address
        if is_same_for_all or not is_loopback(str(address[0])):
            bound = _bound(str(address[0]), port)
            if bound is not None:
                return bound
    return None


def _bound(address: str, port: int) -> socket.socket | None:
    """None: the address is another machine's, or somebody listens there."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        return None
    return listening


def _served(listening: socket.socket) -> TCPStore:
    address, port = listening.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


@final
class _Backend(C10dRendezvousBackend):
    """torch's, under our name: the agent compares it."""

    @property
    def name(self) -> str:
        return _DYNAMIC


def _create_dynamic(params: RendezvousParameters) -> RendezvousHandler:
    _, store = create_backend(params)
    handler = create_handler(store, _Backend(store, params.run_id), params)
    # of torch's own; without it the store that the ranks use would listen everywhere
    vars(handler)["_create_tcp_store_server"] = _serve_ranks
    return handler


def _serve_ranks(host: str, port: int) -> TCPStore:
    listening = _listening(host, port)
    if listening is not None:
        return _served(listening)
    return TCPStore(host, port, is_master=True, multi_tenant=True)


rendezvous_handler_registry.register(_DYNAMIC, _create_dynamic)
