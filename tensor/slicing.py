"""Cuts the layers of a model: each tensor rank keeps its slice of a weight as a plain local tensor.

- Parameters stay the same objects. What is not cut is whole on every rank.
- Heads stay whole: where the parent has `head_dim`, its layers are cut by heads of keys and values.
- Fewer heads of keys and values than ranks: neighbouring ranks have copies of one, and share its queries.
- An embedding and a head with one weight have one slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final
from weakref import WeakSet

import torch
from torch import nn

from ..ops.boxes import Box, Boxes, Range, ranks_with_copies, taken
from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError
from .draws import CommonDraws, OwnDraws
from .exchange import Exchange
from .heads import check_copies, even_ranges, heads_of, ranges_of_layer, set_counts
from .layers import Region, class_of_embedding, class_of_head, class_of_layer
from .plan import ParallelPlan
from .same_batches import SameBatches
from .styles import CUTS_COLUMNS, CUTS_ROWS, StyleName, cut_dim, length_of
from .token_blocks import TokenBlocks, cut_tokens
from .vocabulary import LossOfModel, Vocabulary

# modules of scripts: their parameters stay slices, also after `undo` and the end of the engine
_sliced_modules: WeakSet[nn.Module] = WeakSet()


def was_sliced(module: nn.Module) -> bool:
    """`module` is a layer of which this rank has a slice."""
    return module in _sliced_modules


@final
@dataclass
class Sliced:
    """What cutting a model has made.

    slices: id(parameter) -> the boxes of all tensor ranks. `undo` gives the modules their classes back.
    whole: id of every other parameter, which all tensor ranks hold.
    partial: id of those of them whose gradient on a rank is a part of the sum.
    names: of a pipeline, the first names of what is cut on any stage.
    tokens: the blocks whose activations are cut along the sequence.
    columns: id of a layer whose outputs are gathered or are logits -> the columns of each rank.
    """

    slices: dict[int, Boxes] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    check: SameBatches | None = None
    losses: list[LossOfModel] = field(default_factory=list)
    columns: dict[int, Vocabulary] = field(default_factory=dict)
    tokens: TokenBlocks = field(default_factory=TokenBlocks)

    def copies(self, key: int, rank: int) -> tuple[int, ...]:
        """The tensor ranks that hold the same part of a parameter as `rank`; `key`: its id."""
        return ranks_with_copies(self.slices[key], rank)

    def undo(self) -> None:
        """Parameters stay slices."""
        for module, base in reversed(self.classes):
            module.__class__ = base
        self.classes = []
        if self.check is not None:
            self.check.remove()
        self.tokens.undo()
        for loss in self.losses:
            loss.undo()
        self.losses = []


def slice_model(
    model: nn.Module,
    styles: ParallelPlan,
    group: Collectives,
    *,
    overlaps: bool = False,
    blocks: Sequence[Sequence[tuple[str, nn.Module]]] = (),
) -> Sliced:
    """Keep this rank's slices of the layers in `styles`.

    overlaps: sums of gradients travel while the gradients of weights are computed.
    blocks: those of this rank in order, by run of consecutive ones.

    Raises:
        UsageError: a layer cannot be cut over so many ranks.
    """
    modules = dict(model.named_modules())
    by_parent: dict[tuple[str, int], ParallelPlan] = {}
    sliced = Sliced()
    draws = OwnDraws(group.rank)
    sliced.tokens = cut_tokens(styles, blocks, group, sliced.partial)
    ends = {_place(name) for name, style in styles.items() if style.name in CUTS_ROWS}
    for name, style in styles.items():
        if style.name is StyleName.PARTIAL:
            sliced.partial.update(id(param) for param in modules[name].parameters())
        elif style.name is StyleName.VOCABULARY:
            _slice_head(sliced, name, modules[name], model, group, overlaps=overlaps)
        elif style.name not in (StyleName.EMBEDDING, StyleName.TOKENS):
            by_parent.setdefault((name.rpartition(".")[0], style.units), {})[name] = style
    for (parent, _), own in by_parent.items():
        own_draws = draws if any(_place(name) in ends for name in own) else CommonDraws()
        exchange = Exchange(group, parent or "the model", sliced.tokens.of(parent))
        is_gathered = sliced.tokens.has_inside(parent)
        region = Region(exchange, own_draws, overlaps=overlaps, is_gathered=is_gathered)
        if is_gathered:
            sliced.tokens.gather_input(parent, modules[parent], region)
        _slice_parent(sliced, modules, parent, own, region)
    # last: the width of a head with the same weight is that of its tensor
    for name, style in styles.items():
        if style.name is StyleName.EMBEDDING:
            _slice_embedding(sliced, name, modules[name], group)
    _leave_fast_path(model)
    sliced.whole = {id(param) for param in model.parameters()}.difference(sliced.slices)
    sliced.check = SameBatches(model, group)
    return sliced


def _leave_fast_path(model: nn.Module) -> None:
    """In evaluation mode torch's encoder reads the weights of its linear layers, and does not call them."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


def _place(name: str) -> str:
    """The block that has the layer `name`; its parent where no part of the name is a number.

    >>> _place("encoder.layer.3.attention.self.query")
    'encoder.layer.3'
    """
    parts = name.split(".")
    last = max((at for at, part in enumerate(parts[:-1]) if part.isdigit()), default=len(parts) - 2)
    return ".".join(parts[: last + 1])


def _slice_embedding(sliced: Sliced, name: str, module: nn.Module, group: Collectives) -> None:
    assert isinstance(module, nn.Embedding)
    size, rank = module.num_embeddings, group.rank
    by_rank = even_ranges(name, size, group.world_size)
    _keep(sliced, module._parameters["weight"], 0, by_rank, rank)
    own = by_rank[rank][0]
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - own[0] if own[0] <= padding < own[1] else None
    module.num_embeddings = own[1] - own[0]
    exchange = Exchange(group, name)
    _set_class(sliced, module, class_of_embedding(type(module), exchange, own, size))


def _slice_head(
    sliced: Sliced,
    name: str,
    module: nn.Module,
    model: nn.Module,
    group: Collectives,
    *,
    overlaps: bool,
) -> None:
    by_rank = even_ranges(name, length_of(module, StyleName.VOCABULARY), group.world_size)
    _keep_layer(sliced, module, StyleName.VOCABULARY, by_rank, group.rank)
    exchange = Exchange(group, name)
    vocabulary = Vocabulary(exchange, _widths(by_rank))
    sliced.losses.append(LossOfModel(model, vocabulary, module))
    sliced.columns[id(module)] = vocabulary
    region = Region(exchange, CommonDraws(), overlaps=overlaps)
    region.add(module)
    _set_class(sliced, module, class_of_head(type(module), region, vocabulary))


def _slice_parent(
    sliced: Sliced,
    modules: Mapping[str, nn.Module],
    parent: str,
    styles: ParallelPlan,
    region: Region,
) -> None:
    """Cut the layers under one parent, all by the same units."""
    group = region.exchange.collectives
    layers = {name: (modules[name], style) for name, style in styles.items()}
    heads = heads_of(modules[parent], layers)
    ranges = {
        name: ranges_of_layer(name, module, style, heads, group.world_size)
        for name, (module, style) in layers.items()
    }
    if heads is not None:
        check_copies(parent, heads, layers, ranges)
    for name, (module, style) in layers.items():
        _keep_layer(sliced, module, style.name, ranges[name], group.rank)
        if style.name in CUTS_COLUMNS:
            region.add(module)
        if style.name is StyleName.COLWISE_GATHER:
            sliced.columns[id(module)] = Vocabulary(region.exchange, _widths(ranges[name]))
        base = type(module)
        found = class_of_layer(base, style.name, region, _widths(ranges[name]))
        _set_class(sliced, module, found)
    if heads is not None:
        set_counts(modules[parent], heads, group.world_size, group.rank)


def _keep_layer(
    sliced: Sliced,
    module: nn.Module,
    style_name: StyleName,
    by_rank: Sequence[tuple[Range, ...]],
    rank: int,
) -> None:
    """Keep the slices of the parameters of a linear layer."""
    dim = cut_dim(module, style_name)
    _keep(sliced, module._parameters["weight"], dim, by_rank, rank)
    bias = module._parameters.get("bias")
    if style_name in CUTS_COLUMNS and bias is not None:
        _keep(sliced, bias, 0, by_rank, rank)
    _set_features(module, style_name in CUTS_COLUMNS, _widths(by_rank)[rank])


def _keep(
    sliced: Sliced,
    param: nn.Parameter | None,
    dim: int,
    by_rank: Sequence[tuple[Range, ...]],
    rank: int,
) -> None:
    assert param is not None
    before = sliced.slices.get(id(param))
    if before is not None:  # the weight of an embedding and a head
        assert [(box.dim, box.ranges) for box in before] == [(dim, ranges) for ranges in by_rank]
        return
    boxes = tuple(Box(tuple(param.shape), dim, ranges) for ranges in by_rank)
    sliced.slices[id(param)] = boxes
    param.data = taken(param.data, boxes[rank])


def _widths(by_rank: Sequence[tuple[Range, ...]]) -> list[int]:
    return [sum(stop - start for start, stop in ranges) for ranges in by_rank]


def _set_class(sliced: Sliced, module: nn.Module, found: type[nn.Module]) -> None:
    sliced.classes.append((module, type(module)))
    _sliced_modules.add(module)
    weight = module._parameters["weight"]
    assert weight is not None
    found.forward = _of_slice(found.forward, weight.shape)
    module.__class__ = found


def _of_slice(forward: Callable[..., Any], shape: torch.Size) -> Callable[..., Any]:
    """`forward`, where the weight is the slice of shape `shape`."""

    def checked(self: nn.Module, *args: Any) -> Any:
        weight = self._parameters["weight"]
        if weight is not None and weight.shape != shape:
            raise UsageError(
                f"forward of a {type(self).__name__} inside xds.zero.GatheredParameters, with "
                "tensor_parallel.tp_size > 1: it has its full weight there, and forward needs the slice; leave "
                "the context first"
            )
        return forward(self, *args)

    return checked


def _set_features(module: nn.Module, cuts_columns: bool, width: int) -> None:
    if isinstance(module, nn.Linear):
        setattr(module, "out_features" if cuts_columns else "in_features", width)
    elif cuts_columns:
        module.nf = width  # type: ignore[assignment]
    else:
        module.nx = width  # type: ignore[assignment]


__all__ = ["Sliced", "slice_model", "was_sliced"]
