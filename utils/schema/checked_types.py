"""Strict pydantic types for values read from a file: other types are rejected, nothing is converted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LIMIT = 1 << 63  # torch and file systems use signed 64-bit sizes

Size = Annotated[int, Field(strict=True, ge=0, lt=LIMIT)]
Positive = Annotated[int, Field(strict=True, gt=0, lt=LIMIT)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
