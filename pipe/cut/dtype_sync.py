"""Keeps what stands for other stages in the dtypes and on the device of this rank's own parameters.

An engine casts parameters after the cut. Stand-ins' outputs decide the dtype of masks, so they follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.torch_internals import tree_leaves
from .zeros import ZeroOutputs


@final
class ZeroParameter:
    """A tensor of zeros without memory, in place of a parameter that a module of another stage holds."""

    def __init__(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self._module = module
        self._name = name
        self._shape = tuple(param.shape)
        self.dtype = param.dtype
        self.value = torch.zeros((), dtype=param.dtype)
        del module._parameters[name]
        self.put(self.value.device)

    def put(self, device: torch.device) -> None:
        """Make the zeros again, on `device` and in the current dtype."""
        self.value = torch.zeros((), dtype=self.dtype, device=device).expand(self._shape)
        setattr(self._module, self._name, self.value)


@final
class DtypeSync:
    """What stands for other stages, and the dtypes that it follows."""

    def __init__(self, own: Iterable[nn.Parameter]) -> None:
        """`own`: this rank's parameters, at the cut. One of each dtype is watched."""
        self._watched: dict[torch.dtype, nn.Parameter] = {}
        for param in own:
            self._watched.setdefault(param.dtype, param)
        self._dtypes = {dtype: dtype for dtype in self._watched}
        self.parameters: list[ZeroParameter] = []
        self.outputs: list[ZeroOutputs] = []
        self.device = torch.device("cpu")

    def follow(self, batch: Any) -> None:
        """Follow casts since the last call, and the device of `batch`."""
        dtypes = {before: param.dtype for before, param in self._watched.items()}
        device = next((x.device for x in tree_leaves(batch) if isinstance(x, Tensor)), self.device)
        if dtypes == self._dtypes and device == self.device:
            return
        casts = {self._dtypes[before]: after for before, after in dtypes.items()}
        for outputs in self.outputs:
            outputs.cast(casts)
        for zeros in self.parameters:
            zeros.dtype = casts.get(zeros.dtype, zeros.dtype)
            zeros.put(device)
        self._dtypes, self.device = dtypes, device


__all__ = ["DtypeSync", "ZeroParameter"]
