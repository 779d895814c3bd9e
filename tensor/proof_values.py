"""The values with which a plan is proven: fp32, and large enough that a difference of two computations shows.

    parameters  their own, enlarged where a matrix is so small that its products hardly count; zeros are drawn
    inputs      those of the first forward, enlarged to a mean square of one
    noise       the same values, rounded otherwise: what that changes in a gradient is no difference

In 16 bits a wrong plan may differ by less than rounding. Models with fp64 compute some layers in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PROVEN_IN = torch.float32


def computed_in(tensor: Tensor) -> torch.dtype:
    """Its dtype, or that of autocast, whichever has fewer bits."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return tensor.dtype
    return max(
        tensor.dtype, torch.get_autocast_dtype(kind), key=lambda dtype: torch.finfo(dtype).eps
    )


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Inside, matrices of fp32 are multiplied in fp32."""
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:  # the script has used torch's other settings of it, and torch refuses both
        before = ""
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if before:
            torch.set_float32_matmul_precision(before)


def as_proven(value: Any) -> Any:
    """A tensor of floating point in the dtype of the proof, detached; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(PROVEN_IN).requires_grad_(value.requires_grad)


def enlarged_input(value: Any) -> Any:
    """Activations [samples, ..., width] of a root mean square of at least 1; anything else as it is.

    A mask or positions are multiplied for both computations, if at all.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return value
    size = _size(value)
    if not 0 < size < 1:
        return value
    return (value.detach() / size).to(value.dtype).requires_grad_(value.requires_grad)


def enlarged(value: Tensor) -> Tensor:
    """A parameter of which products count: a matrix [out, in] has a root mean square of at least in ** -0.5.

    Zeros hide what lies before them, as at the start of LoRA or of a gate: random numbers take their place.
    Equal on all ranks that have equal values.
    """
    if not value.is_floating_point() or not value.numel():
        return value
    least = (len(value) / value.numel()) ** 0.5 if value.dim() > 1 else 0.5
    size = _size(value)
    if size == 0:
        generator = torch.Generator().manual_seed(value.numel())
        return torch.randn(value.shape, generator=generator).mul_(least).to(value)
    return value * (least / size) if size < least and value.dim() > 1 else value


def _size(value: Tensor) -> float:
    """The root mean square."""
    numel = max(value.numel(), 1)
    norm = float(torch.linalg.vector_norm(value.detach(), dtype=torch.float32))
    return norm / math.sqrt(numel)


def rounded_otherwise(values: Tensor) -> Tensor:
    """`values`, of which each is one rounding larger or smaller. Zeros stay."""
    generator = torch.Generator(values.device).manual_seed(2)
    eps = torch.finfo(computed_in(values)).eps
    signs = torch.empty_like(values, dtype=torch.float32).bernoulli_(0.5, generator=generator)
    return values * signs.mul_(2 * eps).add_(1 - eps).to(values.dtype)


@contextmanager
def standing_in(
    module: nn.Module,
    params: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    change: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Iterator[None]:
    """Inside, `module` has copies of `params` and `buffers`, by name, instead of its own ones, without hooks.

    Parameters without a name there stay.

    change: makes the values of a parameter of floating point from those of `params`.
    """
    instead: dict[int, Any] = {}
    for name, param in module.named_parameters():
        if name in params:
            given = params[name].data
            values = change(given) if given.is_floating_point() else given
            instead[id(param)] = nn.Parameter(values, params[name].requires_grad)
    for name, buffer in module.named_buffers():
        instead[id(buffer)] = buffers[name].clone()
    tables: list[dict[str, Any]] = []
    for submodule in module.modules():
        tables += [submodule._parameters, submodule._buffers]
    kept = [(table, dict(table)) for table in tables]
    try:
        for table, before in kept:
            table.update({n: instead[id(t)] for n, t in before.items() if id(t) in instead})
        yield
    finally:
        for table, before in kept:
            table.update(before)


__all__ = [
    "as_proven",
    "computed_in",
    "enlarged",
    "enlarged_input",
    "exactly",
    "rounded_otherwise",
    "standing_in",
]
