"""The way of a batch to the device: pinned by the loader, copied on a stream of its own.

    host      batch n+1 is read and pinned, its copy is started     no wait for the device
    copies          [copy n+1]                                      waits for nothing
    compute   [step n ..........][step n+1 ...]                     step n+1 waits for copy n+1

A copy on the stream of the computation would begin when step n ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from .nested import replaced

# on a tensor that a loader of xds has pinned: no stream writes to it, so its copy need not wait for any
_MARK = "_pinned_by_xds"


def pinned(batch: Any) -> Any:
    """`batch` with its tensors of the host in pinned memory; tensors on a device stay.

    Other objects are pinned if they have a method `pin_memory`, as in torch's DataLoader.
    """

    def one(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
            return tensor
        return _marked(tensor.pin_memory())

    def other(value: Any) -> Any:
        pins = getattr(value, "pin_memory", None)
        return pins() if callable(pins) else value

    return replaced(batch, one, other)


def pinned_by_torch(batch: Any) -> Any:
    """`batch` from worker processes, which a thread of torch's DataLoader has pinned."""
    return replaced(batch, lambda tensor: _marked(tensor) if tensor.is_pinned() else tensor, _same)


def not_pinned(batch: Any) -> Any:
    """`batch` as it is, where there is no GPU."""
    return batch


def _marked(tensor: Tensor) -> Tensor:
    setattr(tensor, _MARK, True)
    return tensor


def _same(value: Any) -> Any:
    return value


class Lane(ABC):
    """Copies to one device."""

    @abstractmethod
    def copies_of(self, batch: Any) -> Mapping[int, Tensor]:
        """Copies of those tensors in `batch` that need not wait for the computation, by id."""


@final
class SameStream(Lane):
    """Nothing is copied ahead: the device is the host, or has no streams."""

    def copies_of(self, batch: Any) -> Mapping[int, Tensor]:
        return {}


@final
class SideStream(Lane):
    """Copies to a GPU on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copies_of(self, batch: Any) -> Mapping[int, Tensor]:
        found: dict[int, Tensor] = {}

        def collect(tensor: Tensor) -> Tensor:
            if hasattr(tensor, _MARK):
                found[id(tensor)] = tensor
            return tensor

        replaced(batch, collect, _same)
        if not found:
            return found
        with torch.cuda.stream(self._stream):
            copies = {
                key: tensor.to(self._device, non_blocking=True) for key, tensor in found.items()
            }
        computation = torch.cuda.current_stream(self._device)
        computation.wait_stream(self._stream)
        for copied in copies.values():
            copied.record_stream(computation)  # its memory belongs to the other stream
        return copies


@cache
def lane_to(device: torch.device) -> Lane:
    """The one lane of this process to `device`."""
    return SideStream(device) if device.type == "cuda" else SameStream()


__all__ = ["Lane", "SameStream", "SideStream", "lane_to", "not_pinned", "pinned", "pinned_by_torch"]
