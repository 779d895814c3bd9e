"""`deepspeed.runtime.comm.coalesced_collectives`: one reduce-scatter for a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ....utils.errors import UsageError
from ...comm import comm as collectives
from ...errors import raises_theirs
from ...missing import placeholder


@raises_theirs
def reduce_scatter_coalesced(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """This rank's part of the mean of each tensor, flat. A collective of `group`.

    A tensor is cut into parts of ceil(elements / ranks): the last parts may be shorter, or empty.

    Raises:
        UsageError: the tensors have several dtypes or devices.
    """
    if not tensors:
        return []
    if len({(one.dtype, one.device) for one in tensors}) > 1:
        raise UsageError(
            "reduce_scatter_coalesced: the tensors need one dtype and device; call it for each"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    widths = [-(-one.numel() // size) for one in tensors]
    rows = [
        pad(one.detach().reshape(-1), (0, width * size - one.numel())).view(size, width)
        for one, width in zip(tensors, widths, strict=True)
    ]
    sent = torch.cat(rows, dim=1).div_(size)  # [ranks, elements of one rank]
    mine = sent.new_empty(sent.shape[1])
    collectives.reduce_scatter_fn(mine, sent.view(-1), group=group)
    kept = [
        max(0, min(width, one.numel() - rank * width))
        for one, width in zip(tensors, widths, strict=True)
    ]
    return [part[:number] for part, number in zip(torch.split(mine, widths), kept, strict=True)]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
