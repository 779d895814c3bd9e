"""Proves on a few tokens that a model gives the same loss with its tokens on one rank and on several."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...tensor.sequence.batches import short_batch
from ...utils.errors import UsageError

NEAR, NEAR_16_BITS = 1e-4, 2e-2  # relative difference of losses; a wrong mask gives 1e-2 and more


@final
class SequenceProof:
    """What is compared before the first training step, and whether that is over."""

    def __init__(
        self, model: nn.Module, group: Collectives, world: Collectives, dtype: torch.dtype | None
    ) -> None:
        """group, world: the ranks of a sequence, and all. dtype: in which heads are sent; None: their own."""
        self._is_done = False
        self._model = model
        self._group = group
        self._world = world
        self._dtype = dtype

    @property
    def is_done(self) -> bool:
        """Nothing is to be proven, or no more."""
        return self._is_done or self._world.was_reopened

    def short(self, inputs: dict[str, Any], labels: str) -> dict[str, Any] | None:
        """The inputs of the proof; None: the batch of a rank has too few tokens. Sends 8 bytes to each rank.

        labels: the name of one of the inputs.
        """
        found = short_batch(inputs, self._group.world_size, labels)
        mine = torch.tensor([found is not None], dtype=torch.int64, device=self._world.device)
        is_possible = bool(self._world.gather_small(mine, what="a proof of sequences").all())
        return found if is_possible else None

    def compare(self, found: Tensor, wanted: Tensor) -> None:
        """End the proof. The losses are those with tokens on several ranks, and on one.

        Raises:
            UsageError: they differ.
        """
        has_16_bits = self._dtype is not None or self._computes_in_16_bits()
        near = NEAR_16_BITS if has_16_bits else NEAR
        if not torch.isclose(found.float(), wanted.float(), rtol=near, atol=near):
            raise UsageError(
                f"sequence_parallel_size = {self._group.world_size}: {type(self._model).__name__} gives the "
                f"loss {found.item():.6f} with its tokens on several ranks, and {wanted.item():.6f} on one: "
                "its attention has a mask of its own, or modules that need all tokens; set it to 1"
            )
        self._is_done = True

    def _computes_in_16_bits(self) -> bool:
        params = list(self._model.parameters())
        if params and torch.is_autocast_enabled(params[0].device.type):
            return True
        return any(param.is_floating_point() and param.dtype.itemsize == 2 for param in params)


__all__ = ["SequenceProof"]
