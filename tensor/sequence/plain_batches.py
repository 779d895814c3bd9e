"""Cuts the inputs of a plain model into the tokens of each rank: every tensor with tokens in dimension 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import UsageError
from .batches import IGNORED

POSITIONS = ("position_ids", "positions")
LABELS = ("labels", "targets")


def first_of(wanted: Sequence[str], names: Sequence[str]) -> str:
    """The first of `wanted` that is among `names`; "" without one."""
    return next((name for name in wanted if name in names), "")


def cut_plain_batch(
    inputs: dict[str, Any], labels: str, positions: str, rank: int, world_size: int
) -> tuple[dict[str, Any], Tensor]:
    """The inputs of `rank`, and the weight of the mean over its labels in the mean over all of them, [].

    labels, positions: names of inputs. Labels [B, N] are not shifted; those of -100 do not count. Positions
    [1, N] are made where there are none.

    Raises:
        UsageError: the batch cannot be cut.
    """
    setting = f"sequence_parallel_size = {world_size}"
    wanted: Tensor = inputs[labels]
    if not isinstance(wanted, Tensor) or wanted.dim() < 2:
        raise UsageError(f"{setting}: {labels} must be a tensor of shape [samples, tokens]")
    length = wanted.shape[1]
    if length % world_size:
        raise UsageError(
            f"{setting}: a sequence of the batch has {length} tokens, and all ranks of a plain model need "
            f"equally many; pad the batch to {length + -length % world_size} tokens"
        )
    found = dict(inputs)
    if found.get(positions) is None:
        found[positions] = torch.arange(length, device=wanted.device).unsqueeze(0)
    own = length // world_size
    for name, value in found.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
            found[name] = value[:, rank * own : (rank + 1) * own].contiguous()
    counts = [(part != IGNORED).sum() for part in (found[labels], wanted)]
    return found, counts[0] / counts[1]


__all__ = ["LABELS", "POSITIONS", "cut_plain_batch", "first_of"]
