"""What a second run of a function must find again: random numbers and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor

from ...ops.device import generators


@final
class ReplayState:
    """The state of the random generators, and the settings of autocast, when it was created.

    One state of the generators is enough for all tiles. They are run again in the same order, and so they draw
    the same numbers.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        """Read the state for the CPU and the devices of `tensors`."""
        found = [value for value in tensors if isinstance(value, Tensor)]
        kinds = sorted({"cpu", *(tensor.device.type for tensor in found)})
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        every = generators(*{tensor.device for tensor in found})
        self._states = [(generator, generator.get_state()) for generator in every]

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast as it was, without its cache.

        A weight that was cast without a graph must not be found by code that needs its gradient.
        """
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    context = torch.autocast(
                        kind, enabled=enabled, dtype=dtype, cache_enabled=False
                    )
                    stack.enter_context(context)
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Autocast and random numbers as they were. The generators' present states come back at the end."""
        present = [(generator, generator.get_state()) for generator, _ in self._states]
        try:
            _set(self._states)
            with self.autocast():
                yield
        finally:
            _set(present)


def _set(states: Iterable[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


__all__ = ["ReplayState"]
