"""The section `data_efficiency`: DeepSpeed's library for fewer samples and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from pydantic import Field

from ...utils.schema.section import Entry, Group, Refused, Report, Section, nested
from ...utils.schema.values import Flag, Natural
from .data_sampling import DataSampling

_ROUTING = "random layer-token dropping is not supported yet; set it to false or remove the section"


@final
class DataEfficiency(Section):
    """Fewer samples and tokens for the same loss."""

    others: ClassVar[Mapping[str, Entry]] = {
        "data_routing": Group(
            "which tokens are computed",
            {
                "enabled": Refused(Flag, _ROUTING, harmless=(False,)),
                "random_ltd": Group(
                    "drops tokens in layers",
                    {"enabled": Refused(Flag, _ROUTING, harmless=(False,))},
                    open=True,
                ),
            },
        )
    }

    enabled: Flag = Field(False, description="without effect: the sections in it have switches")
    seed: Natural = Field(1234, description="of the samples' order")
    data_sampling: DataSampling = nested(DataSampling)

    def check(self, report: Report) -> None:
        """See `DataSampling.check`."""
        self.data_sampling.check("enabled" in self.model_fields_set and not self.enabled, report)


__all__ = ["DataEfficiency"]
