"""Whether a device gets through what was queued on it: there a collective's wait returns before it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch


@final
class Probe:
    """An event behind everything that is on the device's default stream; another one when it has been passed.

    Used by one thread, not the training's, which pays nothing for it. Work on streams that the default one
    does not wait for is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None
        self.count = 0

    def is_stuck(self) -> bool:
        """Since the last look the device did not pass the event. `count` tells which one."""
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
