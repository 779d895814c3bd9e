"""Finds the parameters whose values a torch call needs, for use in a `TorchFunctionMode`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# attributes of a parameter that do not need its values
_ATTRIBUTES = (
    *("shape", "dtype", "device", "requires_grad", "grad_fn", "is_meta", "grad", "layout", "ndim"),
    *(
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
    ),
    *("is_mkldnn", "is_mps", "is_xla", "is_xpu", "names", "retains_grad", "_version", "output_nr"),
)
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.element_size),
    *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__, Tensor.is_same_size),
}


def touched_params(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[nn.Parameter]:
    """Parameters among the arguments, also in lists; none if `func` does not read values."""
    if func in _METADATA:
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, nn.Parameter):
                    yield item


__all__ = ["touched_params"]
