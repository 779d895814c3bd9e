"""Sends a JSON value of every rank to every rank: names, layouts, results; nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch

from .collectives import Collectives


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


__all__ = ["exchange"]
