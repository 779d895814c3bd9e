"""How a head and its nodes talk in one stream with rank 0's output: frames between the bytes of the user.

    bytes of rank 0 ... | 0x1e token part/parts SP text 0x1f LF | ... bytes of rank 0

A frame is one JSON object. It carries the run's random token, so nothing that a script prints is taken for
one, and is cut into parts that a pipe takes whole (POSIX: PIPE_BUF is at least 512, 4096 on Linux), so that
launchers which merge the streams of several hosts cannot tear it. Everything else passes unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, final

PART_CHARS = 1800
_BEGIN, _END = b"\x1e", b"\x1f\n"


def encode(token: str, message: Mapping[str, Any]) -> bytes:
    """The bytes of one message; `sender` in it tells messages of merged streams apart.

    >>> encode("ab", {"kind": "beat"})
    b'\\x1eab - 1/1 {"kind":"beat"}\\x1f\\n'
    """
    text = json.dumps(message, separators=(",", ":"))  # ASCII, without line ends
    sender = re.sub(r"[^\w.]", "_", str(message.get("sender", "")), flags=re.ASCII) or "-"
    cuts = range(0, max(1, len(text)), PART_CHARS)
    parts = [
        f"{token} {sender} {number}/{len(cuts)} {text[at : at + PART_CHARS]}".encode()
        for number, at in enumerate(cuts, start=1)
    ]
    return b"".join(_BEGIN + part + _END for part in parts)


@final
class Decoder:
    """Takes a stream apart as it comes: what is the user's, and the messages."""

    def __init__(self, token: str) -> None:
        self._start = _BEGIN + token.encode() + b" "
        self._held = b""  # the begin of what may become a frame
        self._parts: dict[str, list[str]] = {}

    def feed(self, data: bytes) -> Iterator[bytes | dict[str, Any]]:
        """The user's bytes and the messages in `data`, in order; keeps back what is not whole yet."""
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
            end = data.find(_END)
            if end < 0:
                self._held = data
                return
            message = self._take(data[len(self._start) : end].decode(errors="replace"))
            data = data[end + len(_END) :]
            if message is not None:
                yield message

    def rest(self) -> bytes:
        """What was kept back when the stream ended."""
        held, self._held = self._held, b""
        return held

    def _take(self, part: str) -> dict[str, Any] | None:
        sender, number, text = part.split(" ", 2)
        kept = self._parts.setdefault(sender, [])
        kept.append(text)
        at, _, of = number.partition("/")
        if at != of:
            return None
        message: dict[str, Any] = json.loads("".join(self._parts.pop(sender)))
        return message
