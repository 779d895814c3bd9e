"""The config section `ops`: whether native ops are built and used. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, final

from pydantic import Field

from ..utils.schema.keys import Report
from ..utils.schema.rules import FLAG
from ..utils.schema.section import Section


@final
class Ops(Section):
    """Native ops, compiled on first use. Their torch versions compute the same values more slowly."""

    native: Annotated[bool, FLAG] = Field(
        True, description="ops are compiled on first use; false uses their torch versions"
    )
    require: Annotated[bool, FLAG] = Field(
        False,
        description="where ops cannot be compiled, training raises with the compiler's last lines; false warns "
        "once and uses their torch versions",
    )


def check_ops(section: Ops, report: Report) -> None:
    """Check the combination of the section's keys."""
    if section.require and not section.native:
        report.complain("ops.require", True, "ops.native = false switches native ops off; drop one")
