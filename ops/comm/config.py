"""The config section `communication`: how ranks and machines send messages. Imports no torch."""

from __future__ import annotations

from typing import final

from pydantic import Field

from ...utils.schema.section import Section
from ...utils.schema.values import Flag


@final
class Communication(Section):
    """Messages between CPU ranks. GPUs use NCCL."""

    shared_memory: Flag = Field(
        True,
        description="CPU ranks of one machine read each other's memory; false: they send messages through "
        "gloo. It needs native ops; a line in the log says where it is not possible",
    )
    hierarchical: Flag = Field(
        True,
        description="CPU ranks on several machines add gradients inside a machine first, and each byte goes to "
        "each other machine once; false: to each of its ranks. Sums are taken in another order. It needs "
        "shared_memory",
    )

    def where(self, *, has_native_ops: bool) -> Communication:
        """The section as it holds where native ops are compiled, or are switched off."""
        return self if has_native_ops else self.model_copy(update={"shared_memory": False})


__all__ = ["Communication"]
