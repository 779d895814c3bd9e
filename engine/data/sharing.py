"""Batches that one rank reads and other ranks need.

    share_batches     first stage   iterator ──> micro-batches ──header, then tensors──>  other stages
    gather_batches    each rank     one batch ──header, tensors──> all ranks

A header is text: the structure, the shapes and dtypes, plain values. Nothing in it is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.flat import align_up, bytes_of, moved, numel_of
from ...utils.arguments import wrong
from ...utils.errors import UsageError

PLAIN = (bool, int, float, str, type(None))
HEAD_BYTES = 4096  # of a header in the first message
NUMBER_BYTES = 8
ALIGN_BYTES = 16  # where a tensor of any dtype may begin
WHAT = "the batches of a step"
KIND = "batches"
ENDED = "the iterator given to train_batch or eval_batch ended"


def share_batches(
    collectives: Collectives,
    iterator: Iterator[Any] | None,
    count: int,
    device: torch.device,
    call: str,
) -> list[Any]:
    """The next `count` batches of rank 0's `iterator`, on every rank of the pipeline, on `device`.

    Mappings arrive as dicts. Sends a header and the tensors from rank 0. `call`: for messages.

    Raises:
        UsageError: on every rank: rank 0 has no iterator, it ended early, or a batch has values that cannot be
            sent.
    """
    header = b""
    tensors: list[Tensor] = []
    error: Exception | None = None
    if collectives.rank == 0:
        try:
            with collectives.publishing_errors(f"the data iterator of {call}"):
                batches = _next_batches(_checked(iterator, call), count)
            header, tensors = _encode(batches)
        except UsageError as problem:
            error, header = problem, json.dumps({"error": str(problem)}).encode()
        if error is None and collectives.world_size == 1:
            return batches
    header, data = _send(collectives, header, tensors)
    found = json.loads(header)
    if error is not None:
        raise error
    if "error" in found:
        raise UsageError(found["error"])
    arrived = _cut(data, found["tensors"])
    return [_decode(item, arrived) for item in found["batches"]]


def gather_batches(collectives: Collectives, batch: Any, what: str) -> list[Any]:
    """The batch of each rank, on every rank. `what`: for messages.

    Raises:
        UsageError: on the rank whose batch has values that cannot be sent.
    """
    device = collectives.device
    header, tensors = _encode([batch])
    mine = _packed([_text(header), *map(as_bytes, tensors)], device)
    lengths = moved(torch.tensor([len(header), mine.numel()]), device)
    table = collectives.gather_small(lengths, what=what).tolist()
    outs = [torch.empty(total, dtype=torch.uint8, device=device) for _, total in table]
    collectives.all_to_all(outs, [mine] * len(outs), what=what, kind=KIND).wait()
    found = []
    for (header_bytes, _), data in zip(table, outs, strict=True):
        row = json.loads(bytes_of(data[:header_bytes]))
        arrived = _cut(data[align_up(header_bytes, ALIGN_BYTES) :], row["tensors"])
        found.append(_decode(row["batches"][0], arrived))
    return found


def _send(collectives: Collectives, header: bytes, tensors: list[Tensor]) -> tuple[bytes, Tensor]:
    """The header and the bytes of all tensors of rank 0, each tensor at a multiple of `ALIGN_BYTES`.

    The first message has the header, if it is short, and both lengths: the host of a receiver waits for it.
    """
    device, is_first = collectives.device, collectives.rank == 0
    parts = [_text(header[HEAD_BYTES:]), *map(as_bytes, tensors)] if is_first else []
    total = sum(align_up(part.numel(), ALIGN_BYTES) for part in parts)
    numbers = b"".join(n.to_bytes(NUMBER_BYTES, "little") for n in (len(header), total))
    head = numbers + header[:HEAD_BYTES].ljust(HEAD_BYTES)
    if is_first:
        first = moved(_text(head), device)
    else:
        first = torch.empty(len(head), dtype=torch.uint8, device=device)
    collectives.broadcast(first, what=WHAT)
    if not is_first:
        head = bytes_of(first)
    start = 2 * NUMBER_BYTES
    header_bytes = int.from_bytes(head[:NUMBER_BYTES], "little")
    total = int.from_bytes(head[NUMBER_BYTES:start], "little")
    data = (
        _packed(parts, device) if is_first else torch.empty(total, dtype=torch.uint8, device=device)
    )
    if total:
        collectives.broadcast(data, what=WHAT)
    rest = max(0, header_bytes - HEAD_BYTES)
    if not is_first:
        header = head[start:][:header_bytes] + (bytes_of(data[:rest]) if rest else b"")
    return header, data[align_up(rest, ALIGN_BYTES) :]


def _packed(parts: list[Tensor], device: torch.device) -> Tensor:
    """Bytes of the host or of a device, one part after another; those of the host in one copy."""
    if any(part.device.type != "cpu" for part in parts):
        return torch.cat([_padded(moved(part, device)) for part in parts])
    return moved(torch.cat([_padded(part) for part in parts]), device)


def _text(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a strided tensor without a graph, [n] uint8."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    # not view(-1): one element counts as contiguous with any stride, and keeps it
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _padded(part: Tensor) -> Tensor:
    return nn.functional.pad(part, (0, align_up(part.numel(), ALIGN_BYTES) - part.numel()))


def _cut(data: Tensor, rows: list[Any]) -> Iterator[Tensor]:
    """The tensors in `data`, by shape and dtype."""
    at = 0
    for shape, name in rows:
        dtype: torch.dtype = getattr(torch, name)
        num_bytes = numel_of(shape) * dtype.itemsize
        yield data[at : at + num_bytes].view(dtype).view(shape)
        at += align_up(num_bytes, ALIGN_BYTES)


def _checked(iterator: Any, call: str) -> Iterator[Any]:
    if not hasattr(iterator, "__next__"):
        raise wrong(
            f"{call}: data_iter",
            iterator,
            "an iterator of batches on the first stage, such as iter(loader)",
        )
    found: Iterator[Any] = iterator
    return found


def _next_batches(iterator: Iterator[Any], count: int) -> list[Any]:
    batches: list[Any] = []
    while len(batches) < count:
        try:
            batches.append(next(iterator))
        except StopIteration:
            raise UsageError(
                f"{ENDED} after {len(batches)} of {count} micro-batches: pass an iterator with enough batches, "
                "such as one of a RepeatingLoader, or lower gradient_accumulation_steps"
            ) from None
    return batches


def _encode(batches: list[Any]) -> tuple[bytes, list[Tensor]]:
    tensors: list[Tensor] = []
    items = [_encoded(batch, tensors, "batch") for batch in batches]
    rows = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    return json.dumps({"batches": items, "tensors": rows}).encode(), tensors


def _encoded(value: Any, tensors: list[Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise UsageError(
                f"{where}: a {value.layout} tensor cannot be sent to other stages; make it dense"
            )
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        pairs = [[key, _encoded(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()]
        if not all(isinstance(key, str) for key, _ in pairs):
            raise UsageError(f"{where}: keys of a batch that is sent to other stages must be text")
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, tensors, f"{where}[{at}]") for at, item in enumerate(value)]
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": items}
    if isinstance(value, PLAIN):
        return {"plain": value}
    raise UsageError(
        f"{where} is a {type(value).__name__}, which cannot be sent to other pipeline stages: a batch may hold "
        "tensors, numbers, text, dicts, lists and tuples; or pass training_data to xds.initialize, which every "
        "stage reads itself"
    )


def _decode(item: Any, tensors: Iterator[Tensor]) -> Any:
    ((kind, value),) = item.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: _decode(inner, tensors) for key, inner in value}
    if kind == "plain":
        return value
    items = [_decode(inner, tensors) for inner in value]
    return tuple(items) if kind == "tuple" else items


__all__ = ["as_bytes", "gather_batches", "share_batches"]
