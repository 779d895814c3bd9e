"""What `all_gather_coalesced` returns, and several of these as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final


@final
class Gathered:
    """The result of `all_gather_coalesced`, which has ended already."""

    def wait(self, **options: Any) -> None:
        """Does nothing."""


class MultipleAllGatherHandles:
    """Waits for several handles, in their order."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, handle_dependency: bool = True) -> None:
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


__all__ = ["Gathered", "MultipleAllGatherHandles"]
