"""The native functions that post and read messages in shared memory (ops/csrc/memory), with their arguments.

Those that copy or wait release the interpreter's lock. `quick` functions keep it: to take it again can take
longer than they do.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_int64, c_uint64, c_void_p
from typing import Any, final

from ... import libraries

DONE, PENDING, ENDED, LEFT, SIZE_DIFFERS, NO_MEMORY = range(6)

_ARGUMENTS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # name -> result, arguments
    "map": (c_void_p, (c_int, c_uint64, c_uint64, c_int)),
    "unmap": (None, (c_void_p, c_uint64)),
    "control_bytes": (c_uint64, ()),
    "open": (None, (c_int, c_void_p, c_void_p, c_uint64, c_uint64, c_uint64, c_uint64)),
    "stop": (None, ()),
    "find_peer": (c_void_p, (c_uint64, c_uint64)),
    "open_peer": (c_void_p, (c_void_p, c_void_p, c_uint64, c_int, c_int, c_uint64, c_uint64)),
    "release_peer": (None, (c_void_p,)),
    "open_group": (c_void_p, (c_uint64, c_int, c_int, c_void_p)),
    "leave_group": (None, (c_void_p,)),
    "close_group": (None, (c_void_p,)),
    "first_reader": (c_int, (c_void_p,)),
    "allocate": (c_int64, (c_uint64,)),
    "free": (None, (c_uint64, c_uint64)),
    "all_gather": (c_void_p, (c_void_p, c_uint64, c_void_p, c_void_p, c_uint64)),
    "gather_parts": (c_void_p, (c_void_p, c_uint64, c_void_p, c_uint64, c_int, c_void_p)),
    "sum": (
        c_void_p,
        (c_void_p, c_uint64, c_void_p, c_int64, *(c_int,) * 5, c_void_p),
    ),
    "transfer": (c_void_p, (c_void_p, c_uint64, c_int, c_void_p, c_int, c_void_p)),
    "wait": (c_int, (c_void_p, c_int64, c_int64, c_int)),
    "about": (c_int, (c_void_p,)),
    "status": (c_int, (c_void_p,)),
    "progress": (None, ()),
    "end": (None, (c_void_p,)),
    "explain_writes": (None, (c_void_p, c_uint64, c_char_p)),
    "forget_writes": (None, (c_void_p,)),
}


@final
class Native:
    """The functions as attributes, without their prefix; `quick` has the same ones, under the lock."""

    def __init__(self) -> None:
        """Raises BuildError: the library cannot be built or loaded on this machine."""
        library = libraries.open_plain("memory")
        self._declare(self, library)
        self.quick = Quick(ctypes.PyDLL(library._name))

    @staticmethod
    def _declare(target: object, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _ARGUMENTS.items():
            function = getattr(library, f"xds_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(target, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@final
class Quick:
    """See `Native`."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        Native._declare(self, library)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


__all__ = ["DONE", "ENDED", "LEFT", "NO_MEMORY", "PENDING", "SIZE_DIFFERS", "Native"]
