"""A flat buffer that the ranks of a machine have in common, instead of one in each of them.

    memory of the machine ── mapped to read:  `values`      what modules compute with
                          └─ mapped to write: `writable`    each rank writes its own part

A write to `values` ends the process, with a message: it would change what the other ranks compute with.
"""

from __future__ import annotations

from typing import final

from torch import Tensor


@final
class SharedFlat:
    """The buffer [numel]: `values` and `writable` are the same memory. Freed with the last tensor of it.

    num_ranks: of this machine, which have it. is_filler: this one of them sets the first values.
    """

    def __init__(
        self, values: Tensor, writable: Tensor, num_ranks: int, *, is_filler: bool
    ) -> None:
        self.values = values
        self.writable = writable
        self.num_ranks = num_ranks
        self.is_filler = is_filler


__all__ = ["SharedFlat"]
