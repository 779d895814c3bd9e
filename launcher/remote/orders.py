"""Packs the orders of all hosts into one command-line argument. Common fields are stored once."""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...utils.errors import UsageError
from ..job import Order

MAX_BYTES = 120 * 1024  # Linux accepts 128 KiB for one argument, including quoting
_MAX_UNPACKED_BYTES = 64 * 2**20


def encode(token: str, orders: Sequence[Order]) -> str:
    """The run's token and the orders, by host index, as characters that no shell treats specially.

    Raises:
        UsageError: the result is too long for one argument.
    """
    records = [order.as_dict() for order in orders]
    common = {
        key: value for key, value in records[0].items() if all(one[key] == value for one in records)
    }
    own = [{key: value for key, value in one.items() if key not in common} for one in records]
    payload = {"token": token, "common": common, "own": own}
    packed = zlib.compress(json.dumps(payload, separators=(",", ":")).encode(), 9)
    text = base64.urlsafe_b64encode(packed).decode()
    if len(text) > MAX_BYTES:
        raise UsageError(
            f"the orders for {len(orders)} hosts are {len(text)} bytes long, but one argument holds"
            f" {MAX_BYTES}: forward fewer variables, pass shorter arguments, or use --launcher ssh,"
            " which sends the orders over its connections"
        )
    return text


def decode(
    text: str, node_index: int | None, environ: Mapping[str, str] | None = os.environ
) -> tuple[str, Order]:
    """The token and the order of this host: the one with its name, or else number `index`.

    Slurm and mpirun number the hosts differently. So a name that matches exactly one host takes precedence over
    the number, unless `environ` is None. A single order needs neither.

    Raises:
        UsageError: the text is damaged, or there is no order for this host.
    """
    payload = _unpacked(text)
    index = None if environ is None else _index_by_name(payload, environ)
    if index is None:
        index = node_index
    own = payload["own"]
    if index is None and len(own) > 1:
        raise UsageError(
            f"orders for {len(own)} hosts, but the index of this host is unknown: --index is not given,"
            " and neither OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK nor SLURM_PROCID is set"
        )
    index = index or 0
    if not 0 <= index < len(own):
        raise UsageError(f"host number {index}, but the orders are for {len(own)} hosts")
    return payload["token"], Order.from_dict({**payload["common"], **own[index]})


def _index_by_name(payload: dict[str, Any], environ: Mapping[str, str]) -> int | None:
    names = [own.get("host") for own in payload["own"]]
    for name in (environ.get("SLURMD_NODENAME"), socket.gethostname()):
        if name and names.count(name) == 1:
            return names.index(name)
    shorts = [str(name).partition("@")[2] or str(name) for name in names]
    shorts = [name if name[:1].isdigit() else name.partition(".")[0] for name in shorts]
    short = socket.gethostname().partition(".")[0]
    return shorts.index(short) if shorts.count(short) == 1 else None


def _unpacked(text: str) -> dict[str, Any]:
    try:
        packed = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, _MAX_UNPACKED_BYTES)
        if not unpacker.eof:
            raise ValueError("cut off")
        payload = json.loads(data)
        if not (isinstance(payload["token"], str) and isinstance(payload["own"], list)):
            raise ValueError("no orders")
    except (ValueError, KeyError, TypeError, binascii.Error, zlib.error) as error:
        raise UsageError(f"the orders in the command line cannot be decoded ({error})") from error
    else:
        return dict(payload)
