"""The rendezvous store (TCPStore), which listens only on the rendezvous address.

torch's own store listens on every interface, and everyone who reaches it can read and write its contents. So
this module creates the socket and passes it to torch. The socket is bound to the loopback address for one
machine, else to the address of the rendezvous endpoint. torch reuses a server that is already open on a port
of the same process.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
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

from ...ops.watch.store import serve_store
from ..job import Rendezvous
from .network import is_loopback, split_endpoint

_DYNAMIC = "xds-c10d"  # torch's c10d, but its second store is also bound to one address
_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_NO = ("0", "false", "f", "no", "n")  # the values that torch takes for false


def serve(rendezvous: Rendezvous) -> tuple[Rendezvous, TCPStore | None]:
    """The rendezvous for torch's agent, and its store if this process serves it. Keep the store until the end.

    If the endpoint is not an address of this machine (such as a service, or NAT), torch listens everywhere.
    """
    if rendezvous.kind not in ("c10d", "static"):
        return rendezvous, None
    host, port = split_endpoint(rendezvous.endpoint)
    if rendezvous.max_nodes == 1:
        listening = _bound(_LOOPBACK, port)
        store = _served(listening) if listening else None
        # if the port is in use, torch raises, or the store is our own
        port = store.port if store else port
        here = replace(rendezvous, kind="static", endpoint=f"{_LOOPBACK}:{port}", node_rank=0)
        return (here if port else rendezvous), store
    if rendezvous.kind == "c10d":
        rendezvous = replace(rendezvous, kind=_DYNAMIC)
    is_elsewhere = (
        rendezvous.node_rank or str(rendezvous.settings.get("is_host", "")).lower() in _NO
    )
    listening = _listening(host, port) if port and not is_elsewhere else None
    return rendezvous, _served(listening) if listening else None


def serve_at(endpoint: str) -> TCPStore | None:
    """A store at "address:port", which other machines reach; None: the address is not one of this machine."""
    host, port = split_endpoint(endpoint)
    listening = _listening(host, port)
    return None if listening is None else _served(listening)


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket on the first address of `host` that belongs to this machine and that others can reach."""
    is_same_for_all = is_loopback(host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for _, _, _, _, address in found:
        # a machine's own name often resolves to the loopback, but other machines use another address
        if is_same_for_all or not is_loopback(str(address[0])):
            bound = _bound(str(address[0]), port)
            if bound is not None:
                return bound
    return None


def _bound(address: str, port: int) -> socket.socket | None:
    """A listening socket; None if the address belongs to another machine or is in use."""
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
    store: TCPStore = serve_store(listening=listening)
    return store


@final
class _Backend(C10dRendezvousBackend):
    """torch's backend with the name registered here, because the agent compares the names."""

    @property
    def name(self) -> str:
        return _DYNAMIC


def _create_dynamic(params: RendezvousParameters) -> RendezvousHandler:
    _, store = create_backend(params)
    handler = create_handler(store, _Backend(store, params.run_id), params)
    # replaces a method of torch's handler; without it the store of the ranks would listen everywhere
    vars(handler)["_create_tcp_store_server"] = _serve_ranks
    return handler


def _serve_ranks(host: str, port: int) -> TCPStore:
    listening = _listening(host, port)
    if listening is not None:
        return _served(listening)
    return TCPStore(host, port, is_master=True, multi_tenant=True)


rendezvous_handler_registry.register(_DYNAMIC, _create_dynamic)
