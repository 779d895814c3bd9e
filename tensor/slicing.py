"""Cuts the layers of a model: each tensor rank keeps its slice of a weight as a plain local tensor.

    x ──enter──┬─ q (columns) ─┐
               ├─ k (columns) ─┼─ attention of own heads ─ o (rows) ──leave── y
               └─ v (columns) ─┘

- Layers under one parent that are cut by columns and get the same input share one `enter`, so that their
  input gradients are summed once.
- Parameters stay the same objects. What is not cut is whole on every rank.
- Heads stay whole: where the parent has `head_dim`, its layers are cut by heads of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError
from .exchange import Exchange
from .plan import CUTS_COLUMNS, Word, is_transposed
from .same_batches import SameBatches
from .shares import Range, ranges_of, share_of

COUNTS = (
    "num_heads",
    "heads",
    "n_head",
    "n_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "nheads",
)
SIZES = ("split_size", "embed_dim", "inner_dim", "hidden_size_per_rank")


_sliced_modules: WeakSet[nn.Module] = WeakSet()  # their parameters stay slices, also after `undo`


def was_sliced(module: nn.Module) -> bool:
    """`module` is a layer of which this rank has a slice."""
    return module in _sliced_modules


@final
@dataclass(frozen=True)
class Slice:
    """A parameter that is cut: rank r has `by_rank[r]` of dimension `dim` of a tensor of shape `whole`."""

    name: str
    whole: tuple[int, ...]
    dim: int
    by_rank: tuple[tuple[Range, ...], ...]


@final
class Region:
    """The layers under one parent. Owns the input that they share, from the first to the last of them."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._input: Tensor | None = None
        self._had_grad = False
        self._entered: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """As `Exchange.enter`; once for all layers with the same input."""
        has_grad = torch.is_grad_enabled()
        if self._input is not x or self._entered is None or self._had_grad is not has_grad:
            self._input, self._entered, self._had_grad = x, self.exchange.enter(x), has_grad
        return self._entered

    def end(self) -> None:
        """Forget the input."""
        self._input = self._entered = None


@final
@dataclass
class Sliced:
    """What cutting a model has made.

    slices: id(parameter) -> the part that this rank has. `undo` gives the modules their classes back.
    whole: id of every other parameter, which all tensor ranks hold.
    partial: id of those of them whose gradient on a rank is a part of the sum.
    """

    slices: dict[int, Slice] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    check: SameBatches | None = None

    def undo(self) -> None:
        """Parameters stay slices."""
        for module, base in self.classes:
            module.__class__ = base
        self.classes = []
        if self.check is not None:
            self.check.remove()


def slice_model(model: nn.Module, plan: Mapping[str, Word], group: Collectives) -> Sliced:
    """Keep this rank's slices of the layers in `plan`.

    A layer whose parameter another module uses as well (a tied head) stays whole.

    Raises:
        UsageError: a layer cannot be cut over so many ranks.
    """
    modules = dict(model.named_modules())
    uses: dict[int, int] = {}
    for module in modules.values():
        for param in module._parameters.values():
            if param is not None:
                uses[id(param)] = uses.get(id(param), 0) + 1
    by_parent: dict[str, list[str]] = {}
    sliced = Sliced()
    for name, word in plan.items():
        if word is Word.PARTIAL:
            sliced.partial.update(id(param) for param in modules[name].parameters())
            continue
        params = [param for param in modules[name]._parameters.values() if param is not None]
        if all(uses[id(param)] == 1 for param in params):
            by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in by_parent.items():
        words = {name: plan[name] for name in names}
        _slice_parent(sliced, modules, parent, words, group)
    sliced.whole = {id(param) for param in model.parameters()}.difference(sliced.slices)
    sliced.check = SameBatches(model, group)
    return sliced


def _slice_parent(
    sliced: Sliced,
    modules: Mapping[str, nn.Module],
    parent: str,
    words: Mapping[str, Word],
    group: Collectives,
) -> None:
    """Cut the layers under one parent, all by the same units."""
    region = Region(Exchange(group, parent or "the model"))
    units = _units(modules[parent], {name: (modules[name], word) for name, word in words.items()})
    if units is not None and units < group.world_size:
        raise UsageError(
            f"tensor_parallel.tp_size = {group.world_size}: {parent} has {units} heads of keys and values, "
            "fewer than ranks; set it to that number at most"
        )
    for name, word in words.items():
        _slice_layer(sliced, name, modules[name], word, units, region)
    if units is not None:
        _set_counts(modules[parent], units, group)


def _features(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight = module._parameters["weight"]
    assert weight is not None
    inputs, outputs = weight.shape if is_transposed(module) else weight.shape[::-1]
    return inputs, outputs


def _units(parent: nn.Module, layers: Mapping[str, tuple[nn.Module, Word]]) -> int | None:
    """The number of units that stay whole: heads of keys and values; None: single columns."""
    head_dim = getattr(parent, "head_dim", None)
    if not isinstance(head_dim, int) or not head_dim:
        return None
    widths = [
        _features(module)[1] // (3 if word is Word.PACKED_COLWISE else 1)
        for module, word in layers.values()
        if word in CUTS_COLUMNS
    ]
    if not widths or any(width % head_dim for width in widths):
        return None
    return min(widths) // head_dim


def _slice_layer(
    sliced: Sliced, name: str, module: nn.Module, word: Word, units: int | None, region: Region
) -> None:
    group = region.exchange.collectives
    inputs, outputs = _features(module)
    cuts_columns = word in CUTS_COLUMNS
    length = outputs if cuts_columns else inputs
    num_parts = _num_parts(module, word)
    sizes = (length // num_parts,) * num_parts
    own_units = units if units is not None and not any(size % units for size in sizes) else sizes[0]
    if own_units < group.world_size:
        raise UsageError(
            f"tensor_parallel.tp_size = {group.world_size}: {name} has {own_units} columns or rows to cut, "
            "fewer than ranks; take it out of the plan"
        )
    by_rank = [ranges_of(sizes, own_units, group.world_size, r) for r in range(group.world_size)]
    dim = int(not cuts_columns) if not is_transposed(module) else int(cuts_columns)
    _keep(sliced, f"{name}.weight", module._parameters["weight"], dim, by_rank, group.rank)
    bias = module._parameters.get("bias")
    if cuts_columns and bias is not None:
        _keep(sliced, f"{name}.bias", bias, 0, by_rank, group.rank)
    widths = [sum(stop - start for start, stop in ranges) for ranges in by_rank]
    _set_features(module, cuts_columns, widths[group.rank])
    base = type(module)
    sliced.classes.append((module, base))
    _sliced_modules.add(module)
    weight = module._parameters["weight"]
    assert weight is not None
    module.__class__ = _class_for(base, word, region, widths, weight.shape)


def _num_parts(module: nn.Module, word: Word) -> int:
    if word is not Word.PACKED_COLWISE:
        return 1
    return 3 if is_transposed(module) else 2


def _keep(
    sliced: Sliced,
    name: str,
    param: nn.Parameter | None,
    dim: int,
    by_rank: Sequence[tuple[Range, ...]],
    rank: int,
) -> None:
    assert param is not None
    sliced.slices[id(param)] = Slice(name, tuple(param.shape), dim, tuple(by_rank))
    parts = [param.data.narrow(dim, start, stop - start) for start, stop in by_rank[rank]]
    param.data = torch.cat(parts, dim).contiguous()


def _set_features(module: nn.Module, cuts_columns: bool, width: int) -> None:
    if isinstance(module, nn.Linear):
        setattr(module, "out_features" if cuts_columns else "in_features", width)
    elif cuts_columns:
        module.nf = width  # type: ignore[assignment]
    else:
        module.nx = width  # type: ignore[assignment]


def _set_counts(parent: nn.Module, units: int, group: Collectives) -> None:
    """Numbers of heads and of features in the parent become those of this rank."""
    start, stop = share_of(units, group.world_size, group.rank)
    for name in (*COUNTS, *SIZES):
        value = parent.__dict__.get(name)
        if isinstance(value, int) and value % units == 0:
            setattr(parent, name, value // units * (stop - start))


def _class_for(
    base: type[nn.Module], word: Word, region: Region, widths: Sequence[int], shape: torch.Size
) -> type[nn.Module]:
    """A subclass of `base` with the same name that sends what `word` says. shape: of the weight's slice."""
    plain: Callable[..., Tensor] = base.forward

    def check(self: nn.Module) -> None:
        weight = self._parameters["weight"]
        if weight is not None and weight.shape != shape:
            raise UsageError(
                f"forward of a {base.__name__} inside xds.zero.GatheredParameters, with tensor_parallel.tp_size"
                " > 1: it has its full weight there, and forward needs the slice; leave the context first"
            )

    def colwise(self: nn.Module, x: Tensor) -> Tensor:
        check(self)
        return plain(self, region.enter(x))

    def gathered(self: nn.Module, x: Tensor) -> Tensor:
        check(self)
        y = region.exchange.gather(plain(self, region.enter(x)), widths)
        region.end()
        return y

    def split(self: nn.Module, x: Tensor) -> Tensor:
        rank = region.exchange.collectives.rank
        return rowwise(self, region.enter(x).narrow(-1, sum(widths[:rank]), widths[rank]))

    def rowwise(self: nn.Module, x: Tensor) -> Tensor:
        check(self)
        region.end()
        bias = self._parameters.get("bias")
        if bias is None:
            return region.exchange.leave(plain(self, x))
        weight = self._parameters["weight"]
        assert weight is not None
        matrix = weight if is_transposed(self) else weight.t()
        return region.exchange.leave(x @ matrix) + bias

    forwards = {
        Word.ROWWISE: rowwise,
        Word.ROWWISE_SPLIT: split,
        Word.COLWISE_GATHER: gathered,
    }
    forward = forwards.get(word, colwise)
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    methods: dict[str, Any] = {**names, "forward": forward}
    return type(base.__name__, (base,), methods)


__all__ = ["Region", "Slice", "Sliced", "slice_model", "was_sliced"]
