"""Small values that every rank of a group gets from every other rank: errors, JSON values, hosts, tensors.

    with agreeing(world, "xds.initialize"):
        cut(model)      rank 0: UsageError: the block has no MLP
                        rank 1: UsageError: xds.initialize failed on rank 0: the block has no MLP

All functions here use the operations of `Collectives`. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from ...utils.errors import UsageError, XdsError
from ..flat import bytes_to, cut
from .collectives import Collectives

TEXT_BYTES = 512  # of an error, for each rank


# -- errors -------------------------------------------------------------------------------------------------


@contextmanager
def agreeing(collectives: Collectives, doing: str) -> Iterator[None]:
    """Make an error of one rank an error of all ranks. **Collective.**

    Ranks have different parts of a model, so a check may fail on some of them alone. The body must not call a
    collective. Each rank sends 512 bytes to each other rank when the body ends.

    Raises:
        UsageError: Another rank has raised an error; the text has that rank and the error. A rank that has
            raised an error itself raises its own error again.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        agree(collectives, "" if failure is None else _text(failure), UsageError, doing)
    except UsageError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, XdsError) else f"{type(error).__name__}: {error}"


def agree(collectives: Collectives, text: str, kind: type[XdsError], doing: str) -> None:
    """Raise `kind` on every rank if any rank has a `text`. **Collective.**

    Args:
        text: What is wrong on this rank; "" for nothing. Each rank sends 512 bytes of it to each other rank.
        doing: The subject of the error's sentence, e.g. "xds.initialize".
    """
    # decoding leaves out a character that the limit cuts in two
    encoded = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    sent = bytes_to(collectives.device, encoded)
    table = collectives.gather_small(sent, what=f"whether {doing} works").view(-1, TEXT_BYTES).cpu()
    if not table[:, 0].any():
        return
    failed = [rank for rank, row in enumerate(table) if row[0]]
    first = bytes(table[failed[0]].tolist()).rstrip(b"\0").decode(errors="ignore")
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    raise kind(f"{doing} failed on rank {failed[0]}{others}: {text or first}")


# -- JSON values --------------------------------------------------------------------------------------------


def all_gather_json(collectives: Collectives, value: Any, what: str) -> list[Any]:
    """Return the JSON value of every rank, in rank order. **Collective.**

    Each rank sends as many bytes to each other rank as the longest text has.

    Args:
        value: A JSON value; ranks may have different ones.
        what: What the values describe. The error has it if a rank does not take part.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)], dtype=torch.int64, device=collectives.device)
    lengths = collectives.gather_small(length, what=what).view(-1).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=collectives.device)
    padded[: len(text)] = text
    table = collectives.gather_small(padded, what=what).cpu()
    values = []
    for row, length_bytes in zip(table, lengths, strict=True):
        received = bytearray(length_bytes)
        torch.frombuffer(received, dtype=torch.uint8).copy_(row[:length_bytes])
        values.append(json.loads(received))
    return values


# -- hosts --------------------------------------------------------------------------------------------------


def host_numbers(collectives: Collectives) -> list[int]:
    """Return a number for each rank; ranks of one machine have the same number. **Collective.**"""
    table = collectives.gather_small(torch.tensor([host_key()], device=collectives.device))
    return [int(number) for number in table.flatten().tolist()]


def host_key() -> int:
    """Return a number of 56 bits that identifies this machine."""
    return int.from_bytes(hashlib.sha256(_host_id().encode()).digest()[:7], "big")


def _host_id() -> str:
    """Host name and boot id. Containers and network namespaces of one machine may have different names."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return platform.node() + file.read()
    except OSError:
        return platform.node()


# -- tensors that all ranks have ----------------------------------------------------------------------------


@final
class EqualParts:
    """Splits a tensor that all ranks have, and joins it again.

        rank 0  |a a|      rank 1  |b b|      joined on both  |a a b b|

    A rank keeps or sends its own part only. `kind` is the kind of the bytes that joining sends.
    """

    def __init__(self, group: Collectives, kind: str) -> None:
        self._group = group
        self._kind = kind

    def are_used(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is split. It needs one element for each rank."""
        return torch.Size(shape).numel() >= self._group.world_size

    def numel_of(self, numel: int) -> int:
        """The number of elements of this rank's part."""
        start, stop = cut(numel, self._group.world_size)[self._group.rank]
        return stop - start

    def own(self, tensor: Tensor) -> Tensor:
        """A copy of this rank's part, [n]."""
        start, stop = cut(tensor.numel(), self._group.world_size)[self._group.rank]
        return tensor.detach().reshape(-1)[start:stop].clone()

    def joined(self, part: Tensor, shape: Sequence[int], what: str) -> Tensor:
        """The whole tensor. **Collective.** Each rank sends its part to each other rank."""
        ranges = cut(torch.Size(shape).numel(), self._group.world_size)
        whole = part.new_empty(ranges[-1][1])
        outs = [whole[start:stop] for start, stop in ranges]
        parts = [part] * len(ranges)
        self._group.all_to_all(outs, parts, what=what, kind=self._kind).wait()
        return whole.view(tuple(shape))


__all__ = ["EqualParts", "agree", "agreeing", "all_gather_json", "host_key", "host_numbers"]
