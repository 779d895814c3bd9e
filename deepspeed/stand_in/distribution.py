"""The metadata of a distribution `deepspeed`, for libraries that ask for its version before they import it."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path
from typing import final

from .release import ALIAS, VERSION


@final
class Standing(Distribution):
    """Name and version only; it lists no files."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        summary = "xds stands in for deepspeed"
        return f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {VERSION}\nSummary: {summary}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).resolve().parents[1] / path
