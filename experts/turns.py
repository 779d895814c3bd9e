"""Lets ranks that share experts run unequal numbers of forwards: for evaluation and generation.

    rank 0   layer 0   layer 1   layer 0   layer 1   at the end
    rank 1   layer 0   layer 1   at the end: layer 0 and layer 1 again, without tokens

Before each exchange the ranks tell one another which layer they call. One that has called its last takes part
in the calls of the others, until all of them are at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Call(NamedTuple):
    """A call of a layer, by its number, without tokens: [0, H], [0, K], [0, K]."""

    number: int
    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


@final
class Turns:
    """Which layers of one engine the ranks call, by their numbers."""

    def __init__(self, group: Collectives, names: Sequence[str]) -> None:
        """group: the ranks that share experts. names: of the layers."""
        self._group, self._names = group, names
        self._is_open = self._is_serving = False

    @property
    def has_ranks(self) -> bool:
        """Other ranks share the experts."""
        return self._group.world_size > 1

    def open(self) -> bool:
        """From here to `close` the ranks may call unequal numbers of layers. For all ranks.

        False: they may already, or this rank shares its experts with none.
        """
        is_new = self.has_ranks and not self._is_open
        self._is_open = self._is_open or is_new
        return is_new

    def close(self) -> None:
        """The ranks call equal numbers of layers again."""
        self._is_open = False

    def take(self, number: int, hidden: Tensor, weights: Tensor) -> None:
        """This rank is about to call layer `number` with hidden_states [T, H], top_k_weights [T, K].

        Raises:
            UsageError: on all ranks of the group: they call different layers.
        """
        if not self._is_open or self._is_serving:
            return
        dtypes = DTYPES.index(hidden.dtype), DTYPES.index(weights.dtype)
        self._called([number + 1, hidden.shape[1], weights.shape[1], *dtypes])

    def of_others(self) -> Iterator[Call]:
        """The calls of other ranks, for a rank that has called its last layer: it has to make each of them."""
        device = self._group.device
        self._is_serving = True
        try:
            while self._is_open and (row := self._called([0] * 5)) is not None:
                number, width, num_choices = row[:3]
                hidden = torch.zeros(0, width, dtype=DTYPES[row[3]], device=device)
                index = torch.zeros(0, num_choices, dtype=torch.int64, device=device)
                yield Call(number - 1, hidden, index, index.to(DTYPES[row[4]]))
        finally:
            self._is_serving = False

    def _called(self, own: list[int]) -> list[int] | None:
        """What the ranks call; None: they are at the end."""
        row = torch.tensor(own, dtype=torch.int64, device=self._group.device)
        rows = self._group.gather_small(row, what="the turns of experts").tolist()
        calls = [other for other in rows if other[0]]
        names = sorted({self._names[call[0] - 1] for call in calls})
        if len(names) > 1:
            raise UsageError(
                f"ranks that share experts call different layers at one time ({', '.join(names)}): an exchange "
                "of tokens is for all of them; let every forward call the same layers"
            )
        return calls[0] if calls else None


__all__ = ["Call", "Turns"]
