"""The states of the random generators that a training script uses, as tensors and JSON values."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Sequence
from typing import Any, final

import torch

from ...ops.device import device_of
from ...utils.errors import DamagedError

NUMPY_NAME, NUMPY_WORDS, NUMPY_MAX_POSITION = "MT19937", 624, 624
_NUMPY_BYTES = 4 * (NUMPY_WORDS + 1)  # words and position


def read_random_state(device: torch.device) -> dict[str, Any]:
    """The states of torch's CPU generator, that of `device`, Python's, and numpy's global one if imported."""
    return KeptRandom(device).state()


@final
class KeptRandom:
    """The same states as they are in this process, to go back to."""

    def __init__(self, device: torch.device, former: KeptRandom | None = None) -> None:
        """former: states of an earlier time, of which those that are the same are taken."""
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._generator = None if device.type == "cpu" else device_of(device).generator
        self._of_device = None if self._generator is None else self._generator.get_state()
        self._type = device.type
        self._numpy_words = _numpy_words()
        self._numpy: Any = None
        if former is not None and former._has_numpy(self._numpy_words):
            self._numpy = former._numpy
        elif "numpy" in sys.modules:
            self._numpy = sys.modules["numpy"].random.get_state()

    def _has_numpy(self, words: bytes) -> bool:
        """numpy's generator was the same. A second normal number does not change its words."""
        return bool(words) and words == self._numpy_words and not self._numpy[3]

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._generator is not None and self._of_device is not None:
            self._generator.set_state(self._of_device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def state(self) -> dict[str, Any]:
        """The states as tensors and JSON values."""
        version, words, gauss = self._python
        state: dict[str, Any] = {
            "torch": self._torch,
            "python": {"version": version, "words": _tensor_of(words), "gauss": gauss},
        }
        if self._of_device is not None:
            state["devices"] = {self._type: self._of_device}
        if self._numpy is not None:
            name, keys, position, has_gauss, cached = self._numpy
            words = _tensor_of(keys.tolist())
            state["numpy"] = {"name": name, "words": words, "rest": [position, has_gauss, cached]}
        return state


def _tensor_of(words: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", words), dtype=torch.int64)


def _numpy_words() -> bytes:
    """The memory of numpy's global generator, which is read in a hundredth of the time; b"": it has another."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return b""
    generator = numpy.random.get_bit_generator()
    if type(generator).__name__ != NUMPY_NAME:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _NUMPY_BYTES)


def check_random_state(state: dict[str, Any], source: str) -> None:
    """Raises DamagedError: a generator would refuse `state`; the message begins with `source`."""
    try:
        torch.Generator().set_state(state["torch"])
        python = state["python"]
        random.Random().setstate(_python_state(python))
        for of_device in _of_devices(state).values():
            if (of_device.dtype, of_device.ndim) != (torch.uint8, 1):
                raise ValueError("the state of the device's generator is not bytes")
        if "numpy" in state:
            _check_numpy(state["numpy"])
    except (ValueError, TypeError, RuntimeError, OverflowError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedError(
            f"{source} contradicts itself: its random generators have no such state: {reason}"
        ) from None


def _check_numpy(saved: dict[str, Any]) -> None:
    """Check numpy's state without numpy, which may not be imported."""
    words, (position, has_gauss, _) = saved["words"], saved["rest"]
    is_right = (
        saved["name"] == NUMPY_NAME
        and words.dtype == torch.int64
        and words.shape == (NUMPY_WORDS,)
        and 0 <= int(words.min()) <= int(words.max()) < 1 << 32
        and 0 <= position <= NUMPY_MAX_POSITION
        and has_gauss in (0, 1)
    )
    if not is_right:
        raise ValueError("numpy's words or position are not those of its generator")


def _python_state(saved: dict[str, Any]) -> tuple[Any, ...]:
    return saved["version"], tuple(saved["words"].tolist()), saved["gauss"]


def _of_devices(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By type of device."""
    found: dict[str, torch.Tensor] = state.get("devices", {})
    return found | ({"cuda": state["cuda"]} if "cuda" in state else {})  # of xds 0.2


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to `state`. Generators that it does not contain are not changed."""
    torch.set_rng_state(state["torch"])
    random.setstate(_python_state(state["python"]))
    of_device = _of_devices(state).get(device.type)
    if of_device is not None:
        device_of(device).generator.set_state(of_device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        saved = state["numpy"]
        words = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["name"], words, *saved["rest"]))
