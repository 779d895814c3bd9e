"""Detects a device whose queue is stuck. On a device, a collective's wait returns before the work is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch


@final
class Probe:
    """Records an event on the device's default stream, and a new one each time the event has completed.

    Used by the watcher's thread only, so the training thread has no cost. Work on streams that the default
    stream does not wait for is not detected.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None
        self.count = 0

    def is_stuck(self) -> bool:
        """Whether the event of the last call has not completed. `count` is the number of that event."""
        if self._event is not None and not self._event.query():
            return True
        self._event = self._record()
        self.count += 1
        return False

    def _record(self) -> Any:
        import torch

        with torch.cuda.device(self._device):
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.default_stream(self._device))
        return event
