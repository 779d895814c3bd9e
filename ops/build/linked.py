"""Reads what a linked library needs, and refuses one in which an error of a kernel would end the process.

A linker may leave out a library that it was given (`--as-needed`), and a compiler may copy the C++ runtime into
what it links (`-static-libstdc++`). Then two runtimes are in one process, and a stream of one fails in the
other: an exception with a number in its text loses the text, or the process ends by a segmentation fault.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["REMEDY", "Linked", "read_linked", "why_refused"]

REMEDY = "remove options of the linker from CXX and NVCC_APPEND_FLAGS, or set CXX to another g++"
_DYNAMIC, _DYNSYM = 6, 11  # types of sections
_NEEDED = 1  # tag of an entry of the dynamic section
_GLOBAL = 1  # a symbol's binding: neither local nor weak, as templates are
_RUNTIME = ("__cxa_", "_ZNSt", "_ZNKSt", "_ZSt")  # names of the C++ runtime and of namespace std


@final
@dataclass(frozen=True)
class Linked:
    """needed: the libraries that are loaded with it. runtime: functions of the C++ runtime that it defines."""

    needed: tuple[str, ...]
    runtime: tuple[str, ...]


def read_linked(data: bytes) -> Linked:
    """Read a 64-bit ELF file. Raises ValueError: it is none, or it is damaged."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("it is not a 64-bit ELF file")
    try:
        return _read(data, "<" if data[5] == 1 else ">")
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"its sections cannot be read: {error}") from error


def why_refused(data: bytes, wanted: Sequence[str]) -> str:
    """Why a library with the contents `data` must not be used; "" if it may.

    wanted: beginnings of the names of libraries that it must need.
    """
    try:
        linked = read_linked(data)
    except ValueError as error:
        return str(error)
    missing = [name for name in wanted if not any(one.startswith(name) for one in linked.needed)]
    others = [one for one in linked.needed if one.startswith("libc++")]
    if missing:
        has = ", ".join(linked.needed) or "none"
        return f"it was linked without {' and '.join(missing)} (it needs {has})"
    if others:
        return f"it uses {' and '.join(others)}, and torch another C++ library, libstdc++"
    if linked.runtime:
        first = ", ".join(linked.runtime[:3])
        return (
            f"it holds a C++ runtime beside torch's ({len(linked.runtime)} functions: {first}, ...)"
        )
    return ""


def _read(data: bytes, order: str) -> Linked:
    start, _, _, _, _, size, count = struct.unpack_from(f"{order}QIHHHHH", data, 40)
    sections = [
        struct.unpack_from(f"{order}IIQQQQIIQQ", data, start + at * size) for at in range(count)
    ]

    def text(table: int, at: int) -> str:
        first = sections[table][4] + at
        return data[first : data.index(b"\0", first)].decode("utf-8", "replace")

    def entries(kind: int, layout: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        for section in sections:
            if section[1] == kind:
                content = data[section[4] : section[4] + section[5]]
                for entry in struct.iter_unpack(order + layout, content):
                    yield section[6], entry

    needed = [
        text(table, value) for table, (tag, value) in entries(_DYNAMIC, "qQ") if tag == _NEEDED
    ]
    symbols = [
        text(table, name)
        for table, (name, info, _, where, _, _) in entries(_DYNSYM, "IBBHQQ")
        if where != 0 and info >> 4 == _GLOBAL
    ]
    return Linked(tuple(needed), tuple(name for name in symbols if name.startswith(_RUNTIME)))
