"""The factor of a step's gradients: of the host; or of a device, which also says whether to step."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class Scale:
    """What optimizers multiply gradients with.

    A device that has computed it (`Decision`) knows it before the host. Then `value` has none, and where
    `found_inf` is 1 the step must change nothing.
    """

    def __init__(self, value: float | None, numbers: Tensor | None = None) -> None:
        """
        Args:
            value: None where only the device knows it.
            numbers: fp32 [4] on the device, the result of the op `decide`.
        """
        self._value, self._numbers = value, numbers
        self._made: dict[tuple[float, torch.device], Tensor] = {}

    @property
    def value(self) -> float:
        """The factor on the host, which must know it."""
        assert self._value is not None, "only the device knows the factor of this step"
        return self._value

    @property
    def is_one(self) -> bool:
        """Known to be 1."""
        return self._value == 1.0

    @property
    def found_inf(self) -> Tensor | None:
        """fp32 []: not 0 where the step must change nothing; None: it changes."""
        return None if self._numbers is None else self._numbers[2]

    @property
    def steps_taken(self) -> Tensor | int:
        """What this step adds to the number of steps."""
        return 1 if self._numbers is None else self._numbers[3]

    def on(self, device: torch.device) -> Tensor | None:
        """The factor as ops of kernels/ take it: fp32 []; None is 1."""
        return self._filled(self._value, device) if self._numbers is None else self._numbers[0]

    def inverse_on(self, device: torch.device) -> Tensor | None:
        """The inverse of it, as torch's fused kernels take it."""
        if self._numbers is not None:
            return self._numbers[1]
        return None if self._value is None else self._filled(1.0 / self._value, device)

    def _filled(self, value: float | None, device: torch.device) -> Tensor | None:
        """On a device one launch for all updates of a step. Threads of the host each make their own."""
        if value is None or value == 1.0:
            return None
        if device.type == "cpu":
            return torch.full((), value, dtype=torch.float32)
        key = (value, device)
        if key not in self._made:
            self._made[key] = torch.full((), value, dtype=torch.float32, device=device)
        return self._made[key]


__all__ = ["Scale"]
