"""Test helper: how much memory the gathered parameters of an engine take at once."""

from __future__ import annotations

from typing import Any

import xds


class Peak:
    """The most elements of gathered parameters that had memory at once."""

    def __init__(self, engine: xds.Engine) -> None:
        self._flats = [flat for unit in engine._sharded.units for flat in unit.params]
        self.numel = 0
        for flat in self._flats:
            flat.start_unshard = self._noted(flat.start_unshard)

    def _noted(self, start: Any) -> Any:
        def started() -> None:
            start()
            held_bytes = sum(flat.raw.untyped_storage().nbytes() for flat in self._flats)
            self.numel = max(self.numel, held_bytes // 4)

        return started
