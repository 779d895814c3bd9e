"""The ways to send gradients and what comes back, each as two exchanges that can be checked and timed.

    reduce   gradients of all ranks [world_size * n] ---> this rank's part of their sum [n]
    gather   this rank's part [n] ----------------------> all parts [world_size * n], on every rank

All inputs are 1 or -1: every scheme sends them without loss, so results can be checked. A new scheme is a
line of SCHEMES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from ...compression.legs import Buffer
from ...compression.one_bit.phase import MomentumRange, OneBitState, Phase
from ...compression.one_bit.reducer import OneBitReducer
from ...compression.one_bit.sender import OneBitSender
from ...compression.reducer import ExactReducer
from ...compression.zeropp.errors import NoErrors
from ...compression.zeropp.reducer import QuantizedReducer
from ...compression.zeropp.sender import QuantizedSender
from ...ops.comm.collectives import Collectives
from ...ops.comm.levels import Levels
from ...ops.comm.single_rank import SingleRank

PART_NUMEL = 1024  # every part is a multiple of it: no scheme has padding


class Exchanges(NamedTuple):
    """reduce: (flat, own part of the sum). gather: (own part, flat). Both are complete on return."""

    reduce: Callable[[Tensor, Tensor], None]
    gather: Callable[[Tensor, Tensor], None]


@final
@dataclass(frozen=True)
class Scheme:
    """make: the exchanges of a flat buffer. dtype: of its tensors; None: that of the run."""

    name: str
    make: Callable[[Collectives, Buffer], Exchanges]
    dtype: torch.dtype | None = None
    is_exact: bool = False


def _exact(collectives: Collectives, buffer: Buffer) -> Exchanges:
    reducer = ExactReducer(collectives, buffer.index)
    return Exchanges(
        lambda flat, out: reducer.reduce(flat, out, add=False).wait(),
        lambda own, flat: reducer.gather(own, flat).wait(),
    )


@final
class _Frozen(OneBitState):
    """The variance is frozen, and there is no momentum yet."""

    is_frozen = True
    variance_steps = 1
    beta = 0.0
    unit = 1.0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def momentum_of(self, buffer: int) -> Sequence[MomentumRange]:
        return []

    def still(self, buffer: int, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.bool, device=self._device)


def _one_bit(collectives: Collectives, buffer: Buffer, *, is_sharded: bool) -> Exchanges:
    phase = Phase()
    phase.bind(_Frozen(collectives.device))
    buffer = Buffer(buffer.index, buffer.numel, buffer.gaps, buffer.dtype, is_sharded)
    reducer = OneBitReducer(collectives, buffer, phase)
    sender = OneBitSender(collectives, buffer, phase)

    def reduce(flat: Tensor, out: Tensor) -> None:
        reducer.reduce(flat, out, add=False).wait()
        reducer.end_step()

    def gather(own: Tensor, flat: Tensor) -> None:
        if is_sharded:
            sender.publish(flat, own).wait()
            return
        reducer.gather(own, flat).wait()
        reducer.end_step()

    return Exchanges(reduce, gather)


def _zeropp(collectives: Collectives, buffer: Buffer) -> Exchanges:
    levels = Levels(collectives, collectives, SingleRank(collectives.device))  # all across
    reducer = QuantizedReducer(levels, buffer, NoErrors())
    sender = QuantizedSender(levels, buffer)

    def reduce(flat: Tensor, out: Tensor) -> None:
        reducer.reduce(flat, out, add=False).wait()
        reducer.end_step()

    return Exchanges(reduce, lambda own, flat: sender.gather(flat, own).wait())


# the first one is what the others are compared with
SCHEMES = (
    Scheme("exact", _exact, is_exact=True),
    Scheme("exact, bfloat16", _exact, torch.bfloat16, is_exact=True),
    Scheme("one bit, stage 0", partial(_one_bit, is_sharded=False)),
    Scheme("one bit, stages 1, 2", partial(_one_bit, is_sharded=True)),
    Scheme("ZeRO++, int4 and int8", _zeropp),
)


def schemes_for(dtype: torch.dtype) -> list[Scheme]:
    """The schemes for buffers of `dtype`: exact messages of another one only where it is narrower."""
    return [s for s in SCHEMES if s.dtype is None or s.dtype.itemsize < dtype.itemsize]


__all__ = ["PART_NUMEL", "SCHEMES", "Exchanges", "Scheme", "schemes_for"]
