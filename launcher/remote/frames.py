"""The message format between head and node: frames in the same stream as rank 0's output.

    bytes of rank 0 ... | 0x1e token sender part/parts text padding 0x1f LF | ... bytes of rank 0

A frame is one JSON object. It contains the run's random token, so output of a script is never taken for a
frame. It is split into parts of 1024 bytes, so that launchers that merge the streams of several hosts do not
break it. srun forwards lines of up to that length. mpirun forwards the result of a read of up to 4096 bytes,
which consists of complete parts if nothing else is in the pipe. A part that contains complete parts of other
hosts is repaired. A part that is damaged in another way is dropped. All other bytes pass unchanged.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, final

PART_BYTES = 1024
HEARTBEATS_PER_TIMEOUT = 3  # heartbeats of head and node within the timeout of the other
_BEGIN, _END = b"\x1e", b"\x1f\n"
_SENDER_CHARS = 40


def encode(token: str, message: Mapping[str, Any]) -> bytes:
    """The bytes of one message; its `sender` distinguishes the messages of merged streams.

    >>> frame = encode("ab", {"kind": "beat"})
    >>> frame[:29], frame[-4:], len(frame)
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
