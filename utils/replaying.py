"""Says whether a function runs again in backward whose weights get their gradients only after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_thread = local()  # what a thread runs now


def is_replaying() -> bool:
    """This thread runs inside `replaying`."""
    return getattr(_thread, "depth", 0) > 0


@contextmanager
def replaying() -> Iterator[None]:
    """Calls of modules are repetitions: no gradient of a weight arrives inside, all arrive together later."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


__all__ = ["is_replaying", "replaying"]
