"""Where the sum of one flat buffer's gradients is stored until the update: on the device, or on the host.

    device: sum of one reduction ──to_host──> host sum of the step [n] ──> update on the host

The first sum of a step is copied in its own dtype, so one reduction of 16-bit gradients takes 2 bytes an
element. Later ones are added in the dtype of sums. A sum never has more bits than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from .lanes import Done, Lanes, Outbox, Ticket
from .pinned import host_memory
from .rotation import Rotation


class SumHome(ABC):
    """Stores the sum over ranks of one flat buffer's gradients since the last step."""

    is_on_host: bool

    @abstractmethod
    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        """Start to add `source` [n], on the device; `give_back` is called when it may be overwritten."""

    @abstractmethod
    def put(self, total: Tensor) -> None:
        """Replace the sum by `total` [n] of any device; returns when it is copied."""

    @abstractmethod
    def replace(self, total: Tensor) -> None:
        """Start to replace the sum by `total` [n], on the device, which is written after `order` only."""

    @abstractmethod
    def order(self) -> None:
        """Let work that is started on the device from now on come after the copy of `replace`."""

    @abstractmethod
    def total(self) -> Tensor | None:
        """The sum [n] in host memory; None if nothing was added since `reset`."""

    @abstractmethod
    def arriving(self) -> tuple[Tensor, Ticket]:
        """The sum [n], and when it will have its values. `total` still waits for them as well."""

    @abstractmethod
    def widened(self) -> Tensor:
        """The same in the dtype of sums: user code may write to it."""

    @abstractmethod
    def lend(self, ticket: Ticket) -> None:
        """The sum is read until `ticket` is done: its memory is not written before."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the sum."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory; nothing is added any more."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of host memory in use."""


class OnDevice(SumHome):
    """The sum stays in the buffers of the reduction."""

    is_on_host = False

    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        raise AssertionError("the sum stays on the device")

    def put(self, total: Tensor) -> None:
        raise AssertionError("the sum stays on the device")

    def replace(self, total: Tensor) -> None:
        raise AssertionError("the sum stays on the device")

    def order(self) -> None:
        return

    def total(self) -> Tensor | None:
        return None

    def arriving(self) -> tuple[Tensor, Ticket]:
        raise AssertionError("the sum stays on the device")

    def widened(self) -> Tensor:
        raise AssertionError("the sum stays on the device")

    def lend(self, ticket: Ticket) -> None:
        raise AssertionError("the sum stays on the device")

    def reset(self) -> None:
        return

    def release(self) -> None:
        return

    @property
    def host_bytes(self) -> int:
        return 0


@final
class OnHost(SumHome):
    """The sum is in host memory, pinned if `pin`. Its memory is allocated once."""

    is_on_host = True

    def __init__(
        self,
        lanes: Lanes,
        outbox: Outbox,
        stages: Rotation,
        sum_dtype: torch.dtype,
        *,
        adds: bool,
        pin: bool,
    ) -> None:
        """
        Args:
            stages: buffers for copies that are converted or added on the host afterwards.
            adds: a step usually has several reductions, so the sum has `sum_dtype` from the start.
        """
        self._lanes = lanes
        self._outbox = outbox
        self._stages = stages
        self._sum_dtype = sum_dtype
        self._adds = adds
        self._pin = pin
        self._memory: Tensor | None = None
        self._sum: Tensor | None = None
        self._writer: Ticket = Done()  # the last one of the memory
        self._adder: Ticket = Done()  # the last one that is work of the host
        self._reader: Ticket = Done()
        self._replacing: Ticket = Done()

    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        if self._sum is None:
            is_wider = source.dtype.itemsize > self._sum_dtype.itemsize
            dtype = self._sum_dtype if self._adds or is_wider else source.dtype
            self._sum = self._allocate(source.numel(), dtype)
            self._copy(self._sum, source, give_back)
        else:
            if self._sum.dtype != self._sum_dtype:
                self.widened()
            self._add(self._sum, source, give_back)

    def _copy(self, target: Tensor, source: Tensor, give_back: Callable[[], None]) -> None:
        if target.dtype == source.dtype or source.device.type == "cpu":
            self._directly(lambda: target.copy_(source, non_blocking=True), give_back)
        else:
            self._staged(source, target.copy_, give_back)

    def _add(self, target: Tensor, source: Tensor, give_back: Callable[[], None]) -> None:
        if source.device.type == "cpu":
            self._directly(lambda: target.add_(source), give_back)
        else:
            self._staged(source, target.add_, give_back)

    def _directly(self, copy: Callable[[], Tensor], give_back: Callable[[], None]) -> None:
        self._writer = self._lanes.to_host.run(copy)
        self._outbox.add(self._writer, give_back)

    def _staged(
        self, source: Tensor, then: Callable[[Tensor], Tensor], give_back: Callable[[], None]
    ) -> None:
        """Copy `source` to host memory of its dtype first: a copy between devices must not convert.

        Waits for the host only if all stages hold values that are not added yet.
        """
        stage = self._stages.take(source.numel(), source.dtype)
        copied = self._lanes.to_host.run(lambda: stage.copy_(source, non_blocking=True))
        earlier = self._writer

        def work() -> None:
            earlier.wait()
            copied.wait()
            then(stage)

        self._writer = self._adder = self._lanes.updates.run(work)
        self._stages.lend(self._writer)
        self._outbox.add(copied, give_back)

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        # copies of the lane come after each other, but not after work of the host
        for ticket in (self._reader, self._adder):
            ticket.wait()
        self._reader = self._adder = Done()
        need_bytes = numel * dtype.itemsize
        if self._memory is None or self._memory.numel() < need_bytes:
            self._memory = host_memory(need_bytes, pin=self._pin)
        return self._memory[:need_bytes].view(dtype)

    def widened(self) -> Tensor:
        narrow = self.total()
        assert narrow is not None and self._sum is not None
        if narrow.dtype != self._sum_dtype:  # until `reset`; later copies need the pinned memory
            self._sum = narrow.to(self._sum_dtype)
        return self._sum

    def put(self, total: Tensor) -> None:
        self.total()
        self._sum = self._allocate(total.numel(), total.dtype)
        self._sum.copy_(total)

    def replace(self, total: Tensor) -> None:
        target = self._sum = self._allocate(total.numel(), total.dtype)
        self._writer = self._lanes.to_host.run(lambda: target.copy_(total, non_blocking=True))
        self._replacing = self._writer

    def order(self) -> None:
        self._replacing.order()
        self._replacing = Done()

    def total(self) -> Tensor | None:
        writer, self._writer = self._writer, Done()
        writer.wait()
        return self._sum

    def arriving(self) -> tuple[Tensor, Ticket]:
        assert self._sum is not None
        return self._sum, self._writer

    def lend(self, ticket: Ticket) -> None:
        self._reader = ticket

    def reset(self) -> None:
        self.order()
        self._sum = None

    def release(self) -> None:
        self._sum = self._memory = None

    @property
    def host_bytes(self) -> int:
        kept = 0 if self._memory is None else self._memory.numel()
        is_wider = self._sum is not None and self._sum.nbytes > kept
        return kept + (self._sum.nbytes if is_wider and self._sum is not None else 0)


__all__ = ["OnDevice", "OnHost", "SumHome"]
