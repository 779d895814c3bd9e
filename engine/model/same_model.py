"""Every rank brings the same model and the same ZeRO section, or all are told where theirs differ.

Flat buffers of unequal sizes would meet in a message, and gloo aborts the process.
"""

from __future__ import annotations

import hashlib
import json
import zlib

import torch
from torch import nn

from ...ops.comm.collectives import Collectives
from ...utils.errors import UsageError
from ...zero.config import ZeroConfig
from ..checkpoint.agreement import exchange

WHAT = "the layout of the model"


def check_same_model(model: nn.Module, section: ZeroConfig, collectives: Collectives) -> None:
    """For all ranks. Sends 16 bytes to each; where they differ, 10 bytes a tensor of the model more.

    Raises:
        UsageError: on every rank; names the first parameter, buffer or section that differs.
    """
    lines = _lines(model, section)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:16]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(collectives.device)
    table = collectives.gather_small(mine, what=WHAT)
    if bool((table == table[0]).all()):
        return
    sums = exchange(collectives, [zlib.crc32(line.encode()) for line in lines], WHAT)
    other = next(rank for rank, found in enumerate(sums) if found != sums[0])
    at = next(
        (i for i, (one, two) in enumerate(zip(sums[0], sums[other], strict=False)) if one != two),
        min(len(sums[0]), len(sums[other])),
    )
    told = exchange(collectives, lines[at] if at < len(lines) else "nothing more", WHAT)
    raise UsageError(
        f"rank {other} brings another model than rank 0: {told[other]} on rank {other}, {told[0]} on rank 0; "
        "build the same model, with the same config, on every rank"
    )


def _lines(model: nn.Module, section: ZeroConfig) -> list[str]:
    """What must be the same, a line each, in the order in which it is laid out."""
    params = [
        f"parameter {name} {_told(param)}{'' if param.requires_grad else ' (frozen)'}"
        for name, param in model.named_parameters()
    ]
    buffers = [f"buffer {name} {_told(buffer)}" for name, buffer in model.named_buffers()]
    return [f"zero_optimization {json.dumps(section.as_dict(), sort_keys=True)}", *params, *buffers]


def _told(tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "without a shape"  # refused a little later, with its remedy
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
