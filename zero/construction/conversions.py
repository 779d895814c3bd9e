"""Weights whose names or layouts are older than the model's, read through transformers' own table.

    in the files                       the table               in the model
    experts.{0..7}.w1.weight [F, H]    stack, join with w3     experts.gate_up_proj [8, 2F, H]
    embed_out.weight                   rename                  lm_head.weight

`from_pretrained` reads files by this table, and `save_pretrained` writes by it. Here it is applied to one
tensor of the model at a time. A rank that needs some experts of a stacked tensor reads these alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.flat import numel_of
from .sources import WeightSource

_LIBRARY_MODEL = ("transformers.modeling_utils", "PreTrainedModel")


@final
@dataclass(frozen=True, eq=False)
class _Conversion:
    """One conversion of the table, for the tensors that it makes together.

    first: the name that the table gives to it. sources: pattern -> names in the files, in order.
    """

    transform: Any
    first: str
    sources: Mapping[str, Sequence[str]]

    def run(self, tensors: Mapping[str, list[Tensor]], whole: Any) -> dict[str, Tensor]:
        """The tensors by their names in the model. tensors: by pattern. whole: the model on meta."""
        transform = deepcopy(self.transform)
        for pattern, values in tensors.items():
            for name, value in zip(self.sources[pattern], values, strict=False):
                transform.add_tensor(self.first, name, pattern, value)
        made = transform.convert(self.first, model=whole, config=whole.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


@final
@dataclass(frozen=True, eq=False)
class _Made:
    """A tensor that a conversion makes. by_row: row i of it is made of source i of each pattern."""

    conversion: _Conversion
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    by_row: bool


@final
class Converted(WeightSource):
    """`weights` under the names and in the layout of a model of transformers.

    Holds the last converted part: the experts of one tensor that this rank reads, or one tensor.
    """

    def __init__(self, weights: WeightSource, whole: Any) -> None:
        """whole: the model on the meta device."""
        self.source = weights.source
        self._weights, self._whole = weights, whole
        self._renamed: dict[str, str] = {}
        self._made: dict[str, _Made] = {}
        self._last: tuple[tuple[str, int, int], Tensor] | None = None
        for conversion in self._planned():
            self._try(conversion)

    def _planned(self) -> list[_Conversion]:
        """Fills the names that are only renamed; returns all other conversions."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        whole = self._whole
        table = get_model_conversion_mapping(whole)
        converters = [each for each in table if isinstance(each, WeightConverter)]
        renamings = [each for each in table if each not in converters]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, names = whole.base_model_prefix, whole.state_dict()
        planned: dict[str, _Conversion] = {}
        for stored in sorted(self._weights.names(), key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, names)
            if name not in names:
                kept, _ = rename_source_key(stored, [], [], prefix, names)
                name, pattern = (kept, None) if kept in names else (name, pattern)
            if name not in names or pattern is None:
                self._renamed.setdefault(name if name in names else stored, stored)
                continue
            fresh = _Conversion(by_pattern[pattern], name, {})
            sources: Any = planned.setdefault(name, fresh).sources
            sources.setdefault(pattern, []).append(stored)
        return list(planned.values())

    def _try(self, conversion: _Conversion) -> None:
        """Find by tensors on meta what a conversion makes. One that fails leaves the names of the files."""
        tensors = {
            pattern: [self._on_meta(name) for name in names]
            for pattern, names in conversion.sources.items()
        }
        try:
            made = conversion.run(tensors, self._whole)
        except Exception:  # the table's own; names are compared afterwards
            self._renamed |= {name: name for names in conversion.sources.values() for name in names}
            return
        for name, value in made.items():
            shape = tuple(value.shape)
            by_row = self._is_by_row(conversion, tensors, name, shape)
            self._made[name] = _Made(conversion, name, shape, value.dtype, by_row)

    def _is_by_row(
        self,
        conversion: _Conversion,
        tensors: Mapping[str, list[Tensor]],
        name: str,
        shape: tuple[int, ...],
    ) -> bool:
        if not shape or any(len(values) != shape[0] for values in tensors.values()):
            return False
        try:
            one = conversion.run({key: values[:1] for key, values in tensors.items()}, self._whole)
        except Exception:
            return False
        return name in one and tuple(one[name].shape) == (1, *shape[1:])

    def _on_meta(self, name: str) -> Tensor:
        dtype = self._weights.read(name, 0, 0).dtype
        return torch.empty(self._weights.shape(name), dtype=dtype, device="meta")

    # -- the interface of WeightSource -----------------------------------------------------------------------

    def names(self) -> Sequence[str]:
        return [*self._renamed, *self._made]

    def shape(self, name: str) -> tuple[int, ...]:
        made = self._made.get(name)
        return self._weights.shape(self._renamed[name]) if made is None else made.shape

    def read(self, name: str, start: int, stop: int) -> Tensor:
        made = self._made.get(name)
        if made is None:
            return self._weights.read(self._renamed[name], start, stop)
        if start >= stop:
            return torch.empty(0, dtype=made.dtype)
        row_numel = numel_of(made.shape[1:]) if made.by_row else numel_of(made.shape)
        first, last = start // row_numel, -(-stop // row_numel)
        part = self._part(made, first, last)
        return part[start - first * row_numel : stop - first * row_numel]

    def _part(self, made: _Made, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor that is made by row, or all of another, 1-D."""
        key = made.name, first, last
        if self._last is None or self._last[0] != key:
            self._last = None  # freed before the next one is made
            self._last = key, self._converted(made, first, last)
        return self._last[1]

    def _converted(self, made: _Made, first: int, last: int) -> Tensor:
        if not made.by_row:
            return self._run(made, slice(None)).reshape(-1)
        rows = torch.empty(last - first, numel_of(made.shape[1:]), dtype=made.dtype)
        for number in range(first, last):
            rows[number - first] = self._run(made, slice(number, number + 1)).view(-1)
        return rows.view(-1)

    def _run(self, made: _Made, which: slice) -> Tensor:
        weights = self._weights
        tensors = {
            pattern: [
                weights.read(name, 0, numel_of(weights.shape(name))).view(weights.shape(name))
                for name in names[which]
            ]
            for pattern, names in made.conversion.sources.items()
        }
        return made.conversion.run(tensors, self._whole)[made.name]


def converted(weights: WeightSource, model: nn.Module) -> WeightSource | None:
    """`weights` as transformers would read them into `model`; None: it is not a model of transformers 5."""
    if not any(_LIBRARY_MODEL == (kind.__module__, kind.__name__) for kind in type(model).__mro__):
        return None
    try:
        import transformers.conversion_mapping  # noqa: F401
    except ImportError:  # before 5.0
        return None
    with torch.device("meta"):
        whole = type(model)(deepcopy(model.config))
    return Converted(weights, whole)


__all__ = ["converted"]
