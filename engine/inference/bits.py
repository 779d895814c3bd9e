"""Linear layers whose weight is stored in 8 or 4 bits and widened in each forward.

    weight [out, in]  ->  weight_bits, weight_scale, weight_zero     plain parameters, so they shard and stream
    forward           ->  widened to the dtype of the input, then an ordinary product

The arithmetic is torchao's. Two weights of 4 bits share a byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tensor.styles import is_linear, is_transposed
from ...utils.errors import UsageError
from ...zero.construction.sources import WeightSource
from .config import GroupQuant

BITS, SCALE, ZERO = "weight_bits", "weight_scale", "weight_zero"
SMALL_GROUP = 64  # of 4 bits, where the config names no size


@final
@dataclass(frozen=True)
class Packing:
    """How the weight of one layer is stored. shape: [out, in]; block: outputs and inputs that share a scale."""

    shape: tuple[int, int]
    block: tuple[int, int]
    num_bits: int
    symmetric: bool
    is_transposed: bool
    dtype: torch.dtype

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        """The stored tensors of `weight`, in the layout of the layer."""
        prim = _primitives()
        kind = prim.MappingType.SYMMETRIC if self.symmetric else prim.MappingType.ASYMMETRIC
        rows = (weight.t() if self.is_transposed else weight).float()
        low, high = self._range
        how: tuple[Any, ...] = (torch.int8, low, high)
        scale, zero = prim.choose_qparams_affine(
            rows, kind, self.block, *how, scale_dtype=torch.float32
        )
        bits = prim.quantize_affine(rows, self.block, scale, zero, *how)
        if self.num_bits == 4:
            pairs = (bits + 8).to(torch.uint8)
            bits = pairs[:, ::2] << 4 | pairs[:, 1::2]
        # as integers, because a precision of 16 bits would round floats
        found = {BITS: bits, SCALE: scale.view(self._groups).view(torch.int32)}
        return found if self.symmetric else {**found, ZERO: zero.view(self._groups).to(torch.int8)}

    def widened(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """The weight [out, in]."""
        prim = _primitives()
        params = layer._parameters
        bits, scale, zero = params[BITS], params[SCALE], params.get(ZERO)
        assert bits is not None and scale is not None
        values: Tensor = bits
        if self.num_bits == 4:
            values = torch.stack((bits >> 4, bits & 15), -1).view(self.shape).to(torch.int8) - 8
        widened: Tensor = prim.dequantize_affine(
            values,
            self.block,
            scale.view(torch.float32),
            zero,
            torch.int8,
            *self._range,
            output_dtype=dtype,
        )
        return widened

    def shapes(self) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """What `parts` returns, without values."""
        rows, columns = self.shape
        packed = ((rows, columns // 2), torch.uint8)
        found = {
            BITS: packed if self.num_bits == 4 else (self.shape, torch.int8),
            SCALE: (self._groups, torch.int32),
        }
        return found if self.symmetric else {**found, ZERO: (self._groups, torch.int8)}

    @property
    def stored_shape(self) -> tuple[int, int]:
        """The shape of the weight in files."""
        return self.shape[::-1] if self.is_transposed else self.shape

    @property
    def _groups(self) -> tuple[int, int]:
        return self.shape[0] // self.block[0], self.shape[1] // self.block[1]

    @property
    def _range(self) -> tuple[int, int]:
        half = 1 << (self.num_bits - 1)
        return (1 - half if self.symmetric else -half), half - 1


def _primitives() -> Any:
    from torchao.quantization import quant_primitives

    return quant_primitives


@final
class BitWeights(WeightSource):
    """Weights of a model whose layers are stored in few bits, made while they are read.

    packings: name of a layer -> how it is stored.
    """

    def __init__(self, inner: WeightSource, packings: Mapping[str, Packing]) -> None:
        self.source, self.remedy = inner.source, inner.remedy
        self._inner = inner
        there = set(inner.names())
        self._layers = {
            f"{name}.{part}": (name, packing)
            for name, packing in packings.items()
            if f"{name}.weight" in there
            for part in packing.shapes()
        }
        self._replaced = {f"{name}.weight" for name in packings}
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def names(self) -> Sequence[str]:
        own = [name for name in self._inner.names() if name not in self._replaced]
        return [*own, *self._layers]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._layers:
            return self._inner.shape(name)
        layer, packing = self._layers[name]
        found = self._inner.shape(f"{layer}.weight")
        fits = found == packing.stored_shape
        return packing.shapes()[name.rpartition(".")[2]][0] if fits else found

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._layers:
            return self._inner.read(name, start, stop)
        layer, packing = self._layers[name]
        if self._last[0] != layer:
            shape = packing.stored_shape
            whole = self._inner.read(f"{layer}.weight", 0, shape[0] * shape[1]).view(shape)
            self._last = layer, packing.parts(whole)
        return self._last[1][name.rpartition(".")[2]].reshape(-1)[start:stop]


def store_in_bits(model: nn.Module, by_name: Mapping[str, GroupQuant]) -> dict[str, Packing]:
    """Store the weights of linear layers in few bits. Layers on the meta device get no values.

    Args:
        by_name: part of a layer's name -> how; "" is every layer but the head.
    Returns:
        name of a layer -> how it is stored.
    Raises:
        UsageError: no layer has such a name, or its sizes do not fit.
    """
    layers = _layers(model)
    found: dict[str, Packing] = {}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, layer in layers.items():
        part = next((part for part in by_name if part and part in name), "")
        if part or ("" in by_name and layer is not head):
            found[name] = _packing(name, layer, by_name[part])
    unused = [part for part in by_name if part and not any(part in name for name in found)]
    what = f"{type(model).__name__} has no linear layer with a weight of its own"
    if unused:
        raise UsageError(
            f"quant.weight: {what} whose name has {unused[0]!r} in it; correct post_init_quant, or remove it"
        )
    if not found:
        raise UsageError(
            f"quant: {what} besides its head, or its weights are in few bits already; take a dtype of 16 or 32 "
            "bits, and leave quant out"
        )
    for name, packing in found.items():
        _replace(layers[name], packing)
    return found


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers whose weight no other module has. A row or a column alone stays as it is."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            holders[id(param)] = holders.get(id(param), 0) + 1
    found = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        is_own = weight is not None and holders[id(weight)] == 1 and min(weight.shape) > 1
        if is_linear(module) and is_own:
            found[name] = module
    return found


def _packing(name: str, layer: nn.Module, groups: GroupQuant) -> Packing:
    weight = layer._parameters["weight"]
    assert weight is not None
    rows, columns = weight.shape[::-1] if is_transposed(layer) else weight.shape
    along = rows if groups.group_dim == 0 else columns
    size = groups.group_size or along // (groups.num_groups or 1)
    if not (groups.group_size or groups.num_groups) and groups.num_bits == 4:
        size = next(
            length for length in range(min(SMALL_GROUP, along), 0, -1) if along % length == 0
        )
    sizes = f"quant.weight: {name} has {rows} outputs and {columns} inputs on this rank, and"
    if groups.num_bits == 4 and columns % 2:
        raise UsageError(
            f"{sizes} two weights of 4 bits share a byte; take num_bits 8, or name other layers in "
            "post_init_quant"
        )
    if size < 2 or along % size:
        raise UsageError(
            f"{sizes} groups of {size} weights do not divide them; take another group_size of at least 2, or "
            "leave it out"
        )
    block = (size, 1) if groups.group_dim == 0 else (1, size)
    return Packing(
        (rows, columns),
        block,
        groups.num_bits,
        groups.symmetric,
        is_transposed(layer),
        weight.dtype,
    )


def _replace(layer: nn.Module, packing: Packing) -> None:
    """Store the weight of `layer` as `packing` says, and widen it in forward."""
    weight = layer._parameters["weight"]
    assert weight is not None
    if weight.is_meta:
        parts = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in packing.shapes().items()
        }
    else:
        parts = packing.parts(weight.data)
    layer.register_parameter("weight", None)
    for name, value in parts.items():
        layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    base = type(layer)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    layer.__class__ = type(base.__name__, (base,), {**names, **_methods(base, packing)})


def _methods(base: type[nn.Module], packing: Packing) -> dict[str, Any]:
    def slice_product(self: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, packing.widened(self, x.dtype), bias)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return slice_product(self, x, self._parameters.get("bias"))

    def weight(self: nn.Module) -> Tensor:
        with torch.inference_mode():  # so that a write to it fails, rather than be lost
            widened = packing.widened(self, packing.dtype)
        return widened.t() if packing.is_transposed else widened

    # a layer in slices sends around its product; see tensor/layers.py
    is_sliced = hasattr(base, "slice_product")
    own = {"slice_product": slice_product} if is_sliced else {"forward": forward}
    return {**own, "weight": property(weight)}


__all__ = ["BitWeights", "Packing", "store_in_bits"]
