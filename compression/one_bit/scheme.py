"""The one-bit messages of a group: gradients or momenta, then sums (stage 0) or parameters (stages 1 and 2)."""

from __future__ import annotations

from typing import final

import torch

from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import Split
from ...utils.errors import UsageError
from ..scheme import Buffer, CommScheme, ExactReducer, ExactSender, GradientReducer, ParamSender
from .phase import Phase
from .reducer import OneBitReducer
from .sender import OneBitSender

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@final
class OneBitScheme(CommScheme):
    """One bit per element after the freeze of `phase`."""

    def __init__(
        self,
        phase: Phase,
        collectives: Collectives,
        num_copies: int = 1,
        split: Split | None = None,
    ) -> None:
        """num_copies: so many ranks compute the same gradient, which counts once. split: not needed."""
        self._phase = phase
        self._collectives = collectives
        self._num_copies = num_copies

    def reducer(self, buffer: Buffer) -> GradientReducer:
        if self._collectives.world_size == 1:
            return ExactReducer(self._collectives, buffer.index)
        if buffer.dtype not in DTYPES:
            raise UsageError(
                f"one-bit messages of {buffer.dtype} parameters: magnitudes and errors are fp32; cast the "
                "model with model.float(), or choose AdamW"
            )
        return OneBitReducer(self._collectives, buffer, self._phase, self._num_copies)

    def sender(self, buffer: Buffer) -> ParamSender:
        if self._collectives.world_size == 1:
            return ExactSender(self._collectives, buffer.index)
        return OneBitSender(self._collectives, buffer, self._phase)


__all__ = ["OneBitScheme"]
