"""The forwards of layers that are cut: what each sends before or after its own computation.

    x ──enter──┬─ q (columns) ─┐
               ├─ k (columns) ─┼─ attention of own heads ─ o (rows) ──leave── y
               └─ v (columns) ─┘

Layers under one parent that are cut by columns and get the same input share one `enter`, so that their input
gradients are summed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from ..ops.boxes import Range
from . import overlap
from .draws import Draws
from .exchange import Exchange
from .styles import StyleName, is_transposed
from .vocabulary import Vocabulary, own_rows


@final
class Region:
    """The layers under one parent. Owns the input that they share, from the first to the last of them."""

    def __init__(
        self,
        exchange: Exchange,
        draws: Draws,
        *,
        overlaps: bool = False,
        is_gathered: bool = False,
    ) -> None:
        """overlaps: sums of gradients travel while the gradients of weights are computed.
        is_gathered: the parent gets its input from `gather`, so its layers enter no more.
        """
        self.exchange = exchange
        self.draws = draws
        self._overlaps, self._is_gathered = overlaps, is_gathered
        self._layers: list[nn.Module] = []  # those that enter
        self._entry: overlap.RegionInput | None = None
        self._input: Tensor | None = None
        self._had_grad = False
        self._entered: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """As `Exchange.enter`; once for all layers with the same input."""
        has_grad = torch.is_grad_enabled()
        if self._input is not x or self._entered is None or self._had_grad is not has_grad:
            self._input, self._entered, self._had_grad = x, self._enter(x), has_grad
        return self._entered

    def _enter(self, x: Tensor) -> Tensor:
        return x if self._is_gathered else self.gather(x)

    def gather(self, x: Tensor) -> Tensor:
        """As `Exchange.enter`, of the input of the parent."""
        is_eager = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not (self._overlaps and is_eager):
            self._entry = None
            return self.exchange.enter(x)
        self._entry = overlap.enter(x, self.exchange, self._layers)
        return self._entry.x

    def add(self, layer: nn.Module) -> None:
        """`layer` will get the input of the region."""
        self._layers.append(layer)

    def product(self, layer: nn.Module, x: Tensor) -> Tensor:
        """x W^T + b of a layer that was added, from what `enter` returned."""
        uses = None if self._entry is None else self._entry.uses.get(id(layer))
        if uses is not None:
            return overlap.product(layer, x, *uses)
        bias = layer._parameters.get("bias")
        return cast(Tensor, cast(Any, layer).slice_product(x, bias))

    def end(self) -> None:
        """Forget the input."""
        self._input = self._entered = self._entry = None


def class_of_layer(
    base: type[nn.Module], style_name: StyleName, region: Region, widths: Sequence[int]
) -> type[nn.Module]:
    """A subclass of `base` with the same name that sends what `style_name` says.

    widths: of the slices, by rank.

    Its method `slice_product(x, bias)` is the only use of the weight. Pipelines replace it in plain layers.
    """

    def colwise(self: nn.Module, x: Tensor) -> Tensor:
        if self.training and not torch.compiler.is_compiling():
            region.draws.begin(x.device)
        return region.product(self, region.enter(x))

    def gathered(self: nn.Module, x: Tensor) -> Tensor:
        y = region.exchange.gather(region.product(self, region.enter(x)), widths)
        region.end()
        return y

    def split(self: nn.Module, x: Tensor) -> Tensor:
        rank = region.exchange.collectives.rank
        return rowwise(self, region.enter(x).narrow(-1, sum(widths[:rank]), widths[rank]))

    def rowwise(self: nn.Module, x: Tensor) -> Tensor:
        region.end()
        if not torch.compiler.is_compiling():
            region.draws.end()
        bias = self._parameters.get("bias")
        y = region.exchange.leave(cast(Any, self).slice_product(x, None))
        return y if bias is None else y + bias

    forwards = {
        StyleName.ROWWISE: rowwise,
        StyleName.PACKED_ROWWISE: rowwise,
        StyleName.ROWWISE_SPLIT: split,
        StyleName.COLWISE_GATHER: gathered,
    }
    return _subclass(base, forwards.get(style_name, colwise), _with_product(base))


def _with_product(base: type[nn.Module]) -> dict[str, Any]:
    """The method `slice_product`, and whether a layer of class `base` computes no more than it."""
    plain: Callable[..., Tensor] = base.forward

    def slice_product(self: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return plain(self, x) if bias is self._parameters.get("bias") else _without_bias(self, x)

    is_plain = plain is nn.Linear.forward or base.__name__ == "Conv1D"
    return {"slice_product": slice_product, "has_plain_product": is_plain}


def _without_bias(layer: nn.Module, x: Tensor) -> Tensor:
    """x W^T of `layer`."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return x @ (weight if is_transposed(layer) else weight.t())


def class_of_head(base: type[nn.Module], region: Region, vocabulary: Vocabulary) -> type[nn.Module]:
    """A subclass of the linear layer `base` whose outputs are the logits of own columns."""

    def head(self: nn.Module, x: Tensor) -> Tensor:
        own = region.product(self, region.enter(x))
        region.end()
        return vocabulary.logits(own, is_training=self.training)

    return _subclass(base, head, _with_product(base))


def class_of_embedding(
    base: type[nn.Module], exchange: Exchange, own: Range, size: int
) -> type[nn.Module]:
    """A subclass of the embedding `base` that has the rows `own` of a vocabulary of `size`."""
    plain: Callable[..., Tensor] = base.forward

    def embedding(self: nn.Module, ids: Tensor) -> Tensor:
        rows, mine = own_rows(ids, own, size)
        return exchange.leave(plain(self, rows) * mine.unsqueeze(-1))

    return _subclass(base, embedding)


def _subclass(
    base: type[nn.Module],
    forward: Callable[..., Tensor],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> type[nn.Module]:
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    methods: dict[str, Any] = {**names, **more, "forward": forward}
    return type(base.__name__, (base,), methods)


__all__ = ["Region", "class_of_embedding", "class_of_head", "class_of_layer"]
