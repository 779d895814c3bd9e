"""Collectives for JSON values, and for actions that fail on all ranks or on none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...ops.comm.collectives import Collectives
from ...utils.errors import DamagedError, PeerError, UsageError, XdsError

Value = TypeVar("Value")
KINDS: tuple[type[XdsError], ...] = (DamagedError, UsageError, XdsError)  # the most specific first


def exchange(collectives: Collectives, value: Any, what: str) -> list[Any]:
    """Every rank's `value`, in rank order. A collective; sends the longest JSON text to each peer.

    Args:
        value: a JSON value.
        what: what the values describe, for the message if a rank does not take part.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)], dtype=torch.int64, device=collectives.device)
    lengths = collectives.gather_small(length, what=what).view(-1).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=collectives.device)
    padded[: len(text)] = text
    table = collectives.gather_small(padded, what=what).cpu()
    found = []
    for row, size in zip(table, lengths, strict=True):
        received = bytearray(size)
        torch.frombuffer(received, dtype=torch.uint8).copy_(row[:size])
        found.append(json.loads(received))
    return found


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
        text = str(error) if isinstance(error, XdsError) else f"{type(error).__name__}: {error}"
        kind = next((at for at, kind in enumerate(KINDS) if isinstance(error, kind)), -1)
        answer = {"error": text, "kind": kind % len(KINDS)}
    answers = exchange(collectives, answer, doing)
    failed = [(rank, one) for rank, one in enumerate(answers) if "error" in one]
    if failed:
        widest = KINDS[max(one["kind"] for _, one in failed)]
        raise widest(_sentence(doing, failed, collectives.world_size)) from failure
    assert failure is None
    return result, [one["value"] for one in answers]  # type: ignore[return-value]


def _sentence(doing: str, failed: list[tuple[int, Any]], world_size: int) -> str:
    rank, first = failed[0]
    if len(failed) == world_size and all(one["error"] == first["error"] for _, one in failed):
        return f"{doing}: {first['error']}"
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"{doing} failed on rank {rank}{others}: {first['error']}"
