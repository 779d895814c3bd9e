"""The config section `ops`: whether native ops are built and used. Nothing here imports torch."""

from __future__ import annotations

from typing import final

from pydantic import Field

from ..utils.schema.section import Report, Section
from ..utils.schema.values import Flag


@final
class Ops(Section):
    """Native ops, compiled on first use. Their torch versions compute the same values more slowly."""

    native: Flag = Field(
        True,
        description="ops are compiled on first use; false compiles and loads none, and runs their torch "
        "versions. A process whose other engine has loaded them runs them in all engines",
    )
    require: Flag = Field(
        False,
        description="where ops cannot be compiled, training raises with the compiler's last lines; false warns "
        "once and uses their torch versions",
    )

    def check_with(self, config: object, report: Report) -> None:
        """See `Section.check_with`."""
        if self.require and not self.native:
            report.complain(
                "ops.require", True, "ops.native = false switches native ops off; drop one"
            )
