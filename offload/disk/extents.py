"""Divides a file into extents: aligned ranges of bytes, one for each named state. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from .options import aligned


@final
@dataclass(frozen=True)
class Extent:
    """A range of a file. It begins at a multiple of 4096 bytes."""

    name: str
    offset: int  # in bytes, from the start of the file
    num_bytes: int

    @property
    def padded_bytes(self) -> int:
        """Its size in the file: `num_bytes`, rounded up to a multiple of 4096."""
        return aligned(self.num_bytes)

    def __str__(self) -> str:
        return self.name


@final
class Extents:
    """Extents one after another, in the order in which they are added."""

    def __init__(self) -> None:
        self._by_name: dict[str, Extent] = {}
        self._total_bytes = 0

    def add(self, name: str, num_bytes: int) -> Extent:
        """Append an extent of `num_bytes`. Each name occurs once."""
        assert num_bytes >= 0 and name not in self._by_name, name
        extent = Extent(name, self._total_bytes, num_bytes)
        self._by_name[name] = extent
        self._total_bytes += extent.padded_bytes
        return extent

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return self._total_bytes

    def __getitem__(self, name: str) -> Extent:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)
