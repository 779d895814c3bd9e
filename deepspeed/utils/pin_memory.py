"""`deepspeed.utils.pin_memory`: host tensors in page-locked memory, with DS_PIN_MEMORY_BACKEND=native."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..missing import placeholder


@final
class NativePinnedMemory:
    """Makes page-locked tensors, and knows which tensors are in page-locked memory.

    Memory is unlocked when it is given back, or with the last tensor that uses it.

    Raises:
        RuntimeError: the op pin_memory cannot be loaded.
    """

    def __init__(self) -> None:
        from ..ops import op_builder

        self._ranges: dict[int, int] = {}  # first address -> the address after the last
        try:
            self._handle: Any = op_builder.PinMemoryBuilder().load().pin_handle()
        except Exception as error:
            raise RuntimeError(
                f"DS_PIN_MEMORY_BACKEND=native needs the op pin_memory, which cannot be loaded: {error}"
            ) from error

    def pin(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """A page-locked tensor of the same dtype and shape.

        Args:
            make_copy: with the same values; else they are not set.
            match_shape: False: [n].
        """
        shape = tuple(tensor.shape) if match_shape else (tensor.numel(),)
        locked = self.pin_empty(tensor, shape)
        if make_copy:
            with torch.no_grad():
                locked.copy_(tensor.reshape(shape))
        return locked

    def pin_empty(self, example: Tensor, shape: Sequence[int]) -> Tensor:
        """A page-locked tensor of the example's dtype."""
        size = torch.Size(shape)
        base = self._handle.new_cpu_locked_tensor(size.numel(), example)
        begin = base.data_ptr()
        self._ranges[begin] = begin + size.numel() * example.element_size()
        weakref.finalize(base.untyped_storage(), self._give_back, begin)
        locked: Any = base.view(size)
        locked.ds_pinned, locked.ds_pin_base = True, begin
        return locked  # type: ignore[no-any-return]

    def _give_back(self, begin: int) -> bool:
        if self._ranges.pop(begin, None) is None:
            return False
        return bool(self._handle.free_cpu_locked_tensor_by_ptr(begin))

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the tensor, or what it is a view of, is page-locked by this object."""
        if getattr(tensor, "ds_pinned", False):
            return True
        if tensor.is_meta or torch._subclasses.fake_tensor.is_fake(tensor):
            return False
        return any(begin <= tensor.data_ptr() < end for begin, end in self._ranges.items())

    def unpin(self, tensor: Tensor) -> bool:
        """Unlock the tensor's memory. It stays valid; in DeepSpeed it must not be used any more."""
        begin = getattr(tensor, "ds_pin_base", None)
        freed = self._give_back(tensor.data_ptr() if begin is None else begin)
        if hasattr(tensor, "ds_pinned"):
            tensor.ds_pinned = False
        return freed


_shared_native_pins: NativePinnedMemory | None = None


def get_native_pinned_memory() -> NativePinnedMemory:
    """The object of this process."""
    global _shared_native_pins  # noqa: PLW0603 (DeepSpeed's name, which scripts replace)
    if _shared_native_pins is None:
        _shared_native_pins = NativePinnedMemory()
    return _shared_native_pins


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """The object of this process where DS_PIN_MEMORY_BACKEND=native; None: torch pins."""
    chosen = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower()
    return get_native_pinned_memory() if chosen == "native" else None


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "NativePinnedMemory",
    "get_active_native_pinned_memory",
    "get_native_pinned_memory",
]
