"""The section `data_efficiency`: DeepSpeed's library for fewer samples and tokens."""

from __future__ import annotations

from typing import final

from pydantic import Field

from ...utils.schema.section import Report, Section, nested
from ...utils.schema.values import Flag, Natural
from ..dropping.config import DataRouting
from .data_sampling import DataSampling


@final
class DataEfficiency(Section):
    """Fewer samples and tokens for the same loss."""

    enabled: Flag = Field(False, description="without effect: the sections in it have switches")
    seed: Natural = Field(1234, description="of the samples' order, and of the choice of tokens")
    data_sampling: DataSampling = nested(DataSampling)
    data_routing: DataRouting = nested(DataRouting)

    @property
    def drops_tokens(self) -> bool:
        """Random-LTD is on."""
        return self.data_routing.random_ltd.enabled

    def check(self, report: Report) -> None:
        """See `DataSampling.check` and `DataRouting.check`."""
        self.data_sampling.check("enabled" in self.model_fields_set and not self.enabled, report)
        self.data_routing.check(self.enabled, report)


__all__ = ["DataEfficiency"]
