"""Checks that every rank has the same model and the same ZeRO section.

Without the check, ranks would exchange flat buffers of unequal sizes, and gloo would abort the process.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import torch
from torch import nn

from ...ops.comm.collectives import Collectives
from ...utils.errors import UsageError
from ...zero.config import ZeroConfig
from ..checkpoint.agreement import exchange

WHAT = "the layout of the model"
SECTION = "zero_optimization"


def check_same_model(model: nn.Module, section: ZeroConfig, collectives: Collectives) -> None:
    """A collective: compare the model's layout on all ranks.

    Sends:   16 bytes to each rank; if the digests differ, 10 more bytes per setting and tensor.

    Raises:
        UsageError: on every rank; names the first setting, parameter or buffer that differs.
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
    shown = exchange(collectives, lines[at] if at < len(lines) else "nothing more", WHAT)
    is_setting = all(text.startswith(SECTION) for text in (shown[0], shown[other]))
    what = "config" if is_setting else "model"
    raise UsageError(
        f"rank {other} has another {what} than rank 0: {shown[other]} on rank {other}, {shown[0]} on rank 0; "
        "build the same model, with the same config, on every rank"
    )


def _lines(model: nn.Module, section: ZeroConfig) -> list[str]:
    """Everything that must be equal, one line each, in layout order."""
    params = [
        f"parameter {name} {_described(param)}{'' if param.requires_grad else ' (frozen)'}"
        for name, param in model.named_parameters()
    ]
    buffers = [f"buffer {name} {_described(buffer)}" for name, buffer in model.named_buffers()]
    return [*_settings(SECTION, section.as_dict()), *params, *buffers]


def _settings(name: str, value: Any) -> list[str]:
    """One line for each setting of a section, and of the sections in it."""
    if not isinstance(value, dict) or not value:
        return [f"{name} = {json.dumps(value, sort_keys=True)}"]
    return [line for key in sorted(value) for line in _settings(f"{name}.{key}", value[key])]


def _described(tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "without a shape"  # refused later, with the remedy
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
