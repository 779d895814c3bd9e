"""What head and node send one another: messages in frames, in the same stream as rank 0's output, and orders.

    bytes of rank 0 ... | 0x1e token sender part/parts text padding 0x1f LF | ... bytes of rank 0

A frame is one JSON object. It contains the run's random token, so output of a script is never taken for a
frame. It is split into parts of 1024 bytes, so that launchers that merge the streams of several hosts do not
break it. srun forwards lines of up to that length. mpirun forwards the result of a read of up to 4096 bytes,
which consists of complete parts if nothing else is in the pipe. A part that contains complete parts of other
hosts is repaired. A part that is damaged in another way is dropped. All other bytes pass unchanged.

The orders of all hosts are also packed into one command-line argument. Common fields are stored once.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from ...utils.errors import UsageError
from ..job import Order

PART_BYTES = 1024
HEARTBEATS_PER_TIMEOUT = 3  # heartbeats of head and node within the timeout of the other
_BEGIN, _END = b"\x1e", b"\x1f\n"
_SENDER_CHARS = 40

MAX_BYTES = 120 * 1024  # Linux accepts 128 KiB for one argument, including quoting
_MAX_UNPACKED_BYTES = 64 * 2**20


def frame(token: str, message: Mapping[str, Any]) -> bytes:
    """The bytes of one message; its `sender` distinguishes the messages of merged streams.

    >>> data = frame("ab", {"kind": "beat"})
    >>> data[:29], data[-4:], len(data)
    (b'\\x1eab - 0001/0001 {"kind":"beat', b'  \\x1f\\n', 1024)
    """
    text = json.dumps(message, separators=(",", ":"))  # ASCII, without line ends
    head = f"{token} {_sender_id(str(message.get('sender', '')))} "
    text_bytes = PART_BYTES - len(_BEGIN + _END) - len(f"{head}0001/0001 ")
    cuts = range(0, max(1, len(text)), text_bytes)
    parts = [
        f"{head}{number:04}/{len(cuts):04} {text[at : at + text_bytes]:<{text_bytes}}".encode()
        for number, at in enumerate(cuts, start=1)
    ]
    return b"".join(_BEGIN + part + _END for part in parts)


def _sender_id(sender: str) -> str:
    name = re.sub(r"[^\w.]", "_", sender, flags=re.ASCII) or "-"
    return name if len(name) <= _SENDER_CHARS else f"{name[:30]}_{zlib.crc32(sender.encode()):08x}"


@final
class Decoder:
    """Splits a stream into the user's bytes and the messages, incrementally."""

    def __init__(self, token: str) -> None:
        self._start = _BEGIN + token.encode() + b" "
        self._held = b""  # the beginning of a possible frame
        self._parts: dict[str, list[str]] = {}

    def feed(self, data: bytes) -> Iterator[bytes | dict[str, Any]]:
        """The user's bytes and the messages in `data`, in order. Keeps incomplete parts for the next call."""
        data, self._held = self._held + data, b""
        while data:
            at = data.find(_BEGIN)
            if at < 0:
                yield data
                return
            if at:
                yield data[:at]
                data = data[at:]
            if len(data) < len(self._start) and self._start.startswith(data):
                self._held = data
                return
            if not data.startswith(self._start):  # the user's own record separator
                yield data[:1]
                data = data[1:]
                continue
            length = self._part_length(data)
            if length == 0:
                self._held = data
                return
            if length < 0:  # it contains complete parts of another host: move them to the front
                data = (
                    data[-length : PART_BYTES - length]
                    + data[:-length]
                    + data[PART_BYTES - length :]
                )
                length = PART_BYTES
            message = self._take(data[len(self._start) : length - len(_END)])
            data = data[length:]
            if message is not None:
                yield message

    def _part_length(self, data: bytes) -> int:
        """The length of the part at the start of `data`; 0 if it is incomplete, -n if another one begins at n.

        The length of a damaged part covers only bytes that are certainly not output.
        """
        reach = PART_BYTES + len(self._start) - 1
        inner = data.find(self._start, 1, reach)
        if inner < 0:
            is_whole = data.startswith(_END, PART_BYTES - len(_END))
            if is_whole or len(data) >= reach:
                return PART_BYTES if is_whole else len(self._start)
            return 0
        end = inner + PART_BYTES
        if inner == PART_BYTES and data.startswith(_END, PART_BYTES - len(_END)):
            return PART_BYTES
        if len(data) < end:
            return 0
        return -inner if data.startswith(_END, end - len(_END)) else inner

    def rest(self) -> bytes:
        """The bytes that were kept when the stream ended."""
        held, self._held = self._held, b""
        return held

    def _take(self, data: bytes) -> dict[str, Any] | None:
        """Process one part. Returns the message if it is complete."""
        try:
            sender, number, text = data.decode("ascii").split(" ", 2)
            at, of = map(int, number.split("/"))
            kept = self._parts.setdefault(sender, [])
            if at == 1:
                kept.clear()
            kept.append(text)
            if at != of:
                return None
            message = json.loads("".join(self._parts.pop(sender))) if len(kept) == of else None
        except ValueError:
            return None
        return message if isinstance(message, dict) else None


# -- orders -----------------------------------------------------------------------------------------------


def pack_orders(token: str, orders: Sequence[Order]) -> str:
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


def unpack_order(
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
