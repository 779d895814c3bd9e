"""Test helper: tensors of every dtype and memory layout, and a bitwise comparison of two tensors."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from xds.ops.weights.tensor_table import DTYPES, PAIRS


def values(dtype: torch.dtype, numel: int) -> Tensor:
    """`numel` different elements, as far as the dtype has so many."""
    if dtype.is_complex:
        count = torch.arange(numel).float()
        with warnings.catch_warnings():  # torch warns once that complex32 is experimental
            warnings.simplefilter("ignore")
            return torch.complex(count, -count - 1).to(dtype)
    if dtype == torch.bool:
        return torch.arange(numel) % 3 == 1
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return (torch.arange(numel) % 100 + 1).to(torch.uint8).view(dtype)
    return (torch.arange(numel) * 3 + 1).to(dtype)


def every_kind() -> dict[str, Tensor]:
    """The tensors by descriptive names."""
    found: dict[str, Tensor] = {}
    for dtype in (*DTYPES, *PAIRS):
        short = str(dtype).removeprefix("torch.")
        found |= {f"{short}_{name}": one for name, one in _ways(values(dtype, 24)).items()}
    found["complex64_conjugate"] = values(torch.complex64, 6).conj()
    found["float32_negative"] = values(torch.complex64, 6).conj().imag
    found["float32_nan"] = torch.tensor([float("nan"), float("-inf"), -0.0])
    return found


def _ways(flat: Tensor) -> dict[str, Tensor]:
    return {
        "plain": flat.view(4, 6),
        "alone": flat[5],
        "empty": flat[:0].view(0, 3),
        "uneven": flat[1:4],
        "every_second": flat[::2],
        "column": flat.view(6, 4)[:, 1],
        "narrow": flat.view(6, 4)[:, 1:2],
        "turned": flat.view(4, 6).t(),
        "expanded": flat[2:3].expand(7),
        "rows": flat[:3].expand(2, 3),
        "windows": flat.unfold(0, 4, 2),
        "inner": flat.view(2, 3, 4)[:, 1:, ::2],
    }


def bits(tensor: Tensor) -> bytes:
    """Its elements in order, byte by byte."""
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def differing(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of what is missing or another in dtype, shape or elements."""
    return [
        name
        for name, one in wanted.items()
        if name not in found
        or (found[name].dtype, found[name].shape) != (one.dtype, one.shape)
        or bits(found[name]) != bits(one)
    ]
