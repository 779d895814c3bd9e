"""Lets ranks that share experts run unequal numbers of forwards: for evaluation and generation.

    rank 0   layer 0   layer 1   layer 0   layer 1   at the end
    rank 1   layer 0   layer 1   at the end: layer 0 and layer 1 again, without tokens

Before each exchange the ranks tell one another which layer they call. One that has called its last takes part
in the calls of the others, until all of them are at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError, XdsError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@final
class Turns:
    """The calls of the layers of one engine, in the order of their numbers."""

    def __init__(
        self, group: Collectives, names: Sequence[str], experts: Sequence[Callable[..., object]]
    ) -> None:
        """group: the ranks that share experts. names: of the layers. experts: what calls those of each."""
        self._group, self._names, self._experts = group, names, experts
        self._is_open = self._is_serving = False

    @property
    def has_ranks(self) -> bool:
        """Other ranks share the experts."""
        return self._group.world_size > 1

    @contextmanager
    def uneven(self, autocast: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside, the ranks may run unequal numbers of forwards, without backward. For all ranks.

        autocast: around forwards.
        """
        if self._is_open or not self.has_ranks:
            yield
            return
        self._is_open = True
        try:
            yield
        except XdsError:  # of a message: the other ranks have it as well
            self._is_open = False
            raise
        finally:
            try:
                if self._is_open:
                    with torch.no_grad(), autocast():
                        self._serve()
            finally:
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

    def _serve(self) -> None:
        """Call layers without tokens, as long as another rank calls them."""
        self._is_serving = True
        try:
            while True:
                row = self._called([0] * 5)
                if row is None:
                    return
                number, width, num_choices = row[:3]
                device = self._group.device
                index = torch.zeros(0, num_choices, dtype=torch.int64, device=device)
                hidden = torch.zeros(0, width, dtype=DTYPES[row[3]], device=device)
                self._experts[number - 1](hidden, index, index.to(DTYPES[row[4]]))
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


__all__ = ["Turns"]
