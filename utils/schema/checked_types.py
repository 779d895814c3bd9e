"""Types of values read from a file: pydantic refuses what is not of them, and converts nothing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LIMIT = 1 << 63  # what torch and the file systems count with

Size = Annotated[int, Field(strict=True, ge=0, lt=LIMIT)]
Positive = Annotated[int, Field(strict=True, gt=0, lt=LIMIT)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
