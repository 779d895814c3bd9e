"""Builds torchrun's rendezvous settings from its flags."""

from __future__ import annotations

import re

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ..job import Rendezvous
from ..ranks.network import join_endpoint
from .options import ParsedArgs

_C10D_PORT, _STATIC_PORT = 29400, 29500  # torchrun's defaults


def num_machines(args: ParsedArgs) -> tuple[int, int]:
    """(min, max) of --nnodes; (0, 0) if it is not given."""
    text = args.text("nnodes")
    found = re.fullmatch("([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if not text:
        return 0, 0
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(
            f"{args.spelled['nnodes']} = {printable(text)}: must be a number of machines from 1, or MIN:MAX"
        )
    return least, most


def static(args: ParsedArgs, num_nodes: int, endpoint: str = "") -> Rendezvous:
    """The static rendezvous: each machine is given the first machine's address and its own number."""
    address = args.text("master_addr") or endpoint or "127.0.0.1"
    host, port = _split_endpoint(address, args.number("master_port", _STATIC_PORT, 1, 65535))
    if args.has("rdzv_endpoint"):  # as in torchrun, an endpoint takes precedence over --master-addr
        host, port = _split_endpoint(args.text("rdzv_endpoint"), _STATIC_PORT)
    return Rendezvous(
        kind="static",
        endpoint=join_endpoint(host, port),
        run_id=args.text("rdzv_id", "none"),
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        node_rank=args.number("node_rank", 0, most=num_nodes - 1),
        local_addr=args.text("local_addr"),
        settings=_settings(args),
    )


def dynamic(args: ParsedArgs, kind: str, least: int, most: int) -> Rendezvous:
    """A dynamic rendezvous: the machines find each other at an endpoint."""
    endpoint = args.text("rdzv_endpoint")
    if not endpoint and most > 1:
        raise UsageError(
            f"--rdzv-backend = {printable(kind)}: several machines need --rdzv-endpoint HOST:PORT, the same on"
            " each"
        )
    if kind == "c10d":
        host, port = _split_endpoint(endpoint or "127.0.0.1:0", _C10D_PORT)
        endpoint = join_endpoint(host, port)
    return Rendezvous(
        kind=kind,
        endpoint=endpoint,
        run_id=args.text("rdzv_id", "none"),
        min_nodes=least,
        max_nodes=most,
        local_addr=args.text("local_addr"),
        settings=_settings(args),
    )


def _split_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Split host, host:port, [address]:port, or an IPv6 address."""
    found = re.fullmatch(r"\[(.+)\](?::([0-9]{1,5}))?|([^:]+)(?::([0-9]{1,5}))?", text)
    if found is None:
        if text.count(":") > 1 and re.fullmatch("[0-9A-Fa-f:.%a-z]+", text):
            return text, default_port
        raise UsageError(
            f"endpoint = {printable(text)}: must be HOST:PORT, with an IPv6 address in brackets"
        )
    port = found[2] or found[4]
    if port and int(port) > 65535:
        raise UsageError(f"endpoint = {printable(text)}: the port must be a number up to 65535")
    return found[1] or found[3], int(port) if port else default_port


def _settings(args: ParsedArgs) -> dict[str, str]:
    """The pairs of --rdzv-conf, K=V,K=V."""
    found = {}
    for pair in filter(None, args.text("rdzv_conf").split(",")):
        key, equals, value = pair.partition("=")
        if not (key.strip() and equals):
            raise UsageError(
                f"--rdzv-conf = {printable(args.text('rdzv_conf'))}: must be KEY=VALUE,KEY=VALUE"
            )
        found[key.strip()] = value.strip()
    return found
