"""Runs an action on all ranks, so that it fails on all of them or on none."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import all_gather_json
from ...utils.errors import DamagedError, PeerError, UsageError, XdsError

Value = TypeVar("Value")
KINDS: tuple[type[XdsError], ...] = (DamagedError, UsageError, XdsError)  # the most specific first

_REMEDIES = {
    errno.ENOSPC: "free space there, or choose another folder",
    errno.EDQUOT: "free space within your quota, or choose another folder",
    errno.EACCES: "choose a folder that this user can write",
    errno.EPERM: "choose a folder that this user can write",
    errno.EROFS: "choose a folder on a file system that is not read-only",
    errno.EEXIST: "a file has this name: choose another folder",
    errno.ENOTDIR: "a file has the name of a folder above it: choose another folder",
}


def failure_text(error: Exception) -> str:
    """What failed, in one line. Errors of the file system get a remedy."""
    if isinstance(error, XdsError):
        return str(error)
    remedy = _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{type(error).__name__}: {error}" + (f"; {remedy}" if remedy else "")


def together(
    collectives: Collectives,
    doing: str,
    action: Callable[[], Value],
    share: Callable[[Value], Any] | None = None,
) -> tuple[Value, list[Any]]:
    """Run `action` on every rank; if it raises on one rank, all ranks raise. A collective.

    Args:
        doing: the start of the error message.
        share: the JSON value that is sent to the other ranks, computed from the result.
    Returns:
        this rank's result, and the shared values of all ranks, in rank order.
    Raises:
        DamagedError or UsageError: if `action` raised nothing else on any rank; XdsError otherwise.
    """
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    result: Value | None = None
    try:
        result = action()
        answer["value"] = None if share is None else share(result)
    except PeerError:
        raise  # the ranks cannot communicate any more
    except Exception as error:
        failure = error
        kind = next((number for number, kind in enumerate(KINDS) if isinstance(error, kind)), -1)
        answer = {"error": failure_text(error), "kind": kind % len(KINDS)}
    answers = all_gather_json(collectives, answer, doing)
    failed = [(rank, reply) for rank, reply in enumerate(answers) if "error" in reply]
    if failed:
        widest = KINDS[max(reply["kind"] for _, reply in failed)]
        raise widest(_sentence(doing, failed, collectives.world_size)) from failure
    assert failure is None
    return result, [reply["value"] for reply in answers]  # type: ignore[return-value]


def _sentence(doing: str, failed: list[tuple[int, Any]], world_size: int) -> str:
    rank, first = failed[0]
    if len(failed) == world_size and all(reply["error"] == first["error"] for _, reply in failed):
        return f"{doing}: {first['error']}"
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"{doing} failed on rank {rank}{others}: {first['error']}"


__all__ = ["failure_text", "together"]
