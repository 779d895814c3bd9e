"""Turns compressed layers into plain ones with the same results, and cuts what was pruned out of the weights.

    rows      W1[keep, :], b1[keep]       of the pruned layer;   W2[:, keep]             of a related one
    heads     O[:, columns of keep]       of the pruned layer;   Q, K, V[rows of keep]   of related ones
    channels  K1[keep], b1[keep]          of the pruned layer;   K2[:, keep], or features of a BatchNorm2d

Weights are as nn.Linear and nn.Conv2d have them, outputs first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from .config import CompressionTraining
from .layers import RANGE, SEED, STATES, CompressedLayer, is_conv1d, plain_class
from .prepare import KINDS, compressed_layers, matching

log = logging.getLogger("xds")

END = 1 << 40  # a number of steps after which every schedule has ended
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead")
HEAD_SIZES = ("all_head_size", "split_size")
RELATED = {"channel_pruning": (nn.Conv2d, nn.BatchNorm2d)}  # of other techniques: linear layers


@final
@dataclass(frozen=True)
class _Cut:
    """Elements `keep` of one dimension of a layer's weight: 0 outputs, with the bias, 1 inputs."""

    name: str
    layer: Any
    dim: int
    keep: Tensor


@torch.no_grad()
def clean(model: nn.Module, section: CompressionTraining) -> None:
    """Make the compressed layers of `model` plain, in the state in which the whole schedule leaves them.

    Raises UsageError, and nothing has changed: a related module does not fit.
    """
    layers = dict(compressed_layers(model))
    if not layers:
        raise UsageError(
            "redundancy_clean: no layer of this model is compressed; call it with the trained model, or with "
            "one that init_compression has prepared and that has loaded the trained state dict"
        )
    for layer in layers.values():
        layer.advance(END)
    cuts = [cut for name in section.enabled for cut in _cuts(model, name, section)]
    heads = _head_owners(model, section, cuts)
    _bake(model, layers)
    for cut in cuts:
        _apply(cut)
    for owner, (before, after) in heads.items():
        _set_heads(owner, before, after)


def _bake(model: nn.Module, layers: dict[str, CompressedLayer]) -> None:
    """Write what forwards compute with to the parameters, and restore the classes."""
    shared = Counter(
        id(param)
        for module in model.modules()
        for param in module._parameters.values()
        if param is not None
    )
    for name, layer in layers.items():
        bias = getattr(layer, "bias", None)
        weight, new_bias = layer.compressed(layer.weight, bias)
        is_tied = shared[id(layer.weight)] > 1
        if is_tied:
            log.warning(
                "redundancy_clean: %s has its own weight now: another layer shares the whole one",
                name,
            )
            layer.weight = nn.Parameter(layer.weight.clone(), layer.weight.requires_grad)
        layer.weight.copy_(layer.matrix(weight))
        if bias is not None and new_bias is not None:
            bias.copy_(new_bias)
        for state in (RANGE, SEED, *(each for pair in STATES.values() for each in pair)):
            layer._buffers.pop(state, None)
            layer._parameters.pop(state, None)
            layer._non_persistent_buffers_set.discard(state)
        for each in ("settings", "active", "weight_bits", "whole_share"):
            layer.__dict__.pop(each, None)
        layer.__class__ = plain_class(layer)


def _cuts(model: nn.Module, technique: str, section: CompressionTraining) -> Iterator[_Cut]:
    """What a pruning technique with related modules cuts."""
    modules = dict(model.named_modules())
    for group in section.groups(technique):
        for pattern, related in zip(group.modules, group.related, strict=False):
            names = matching(model, pattern, KINDS[technique])
            if not related:
                continue
            others = {
                each: matching(model, each, RELATED.get(technique, (nn.Linear,)))
                for each in related
            }
            for each, found in others.items():
                if len(found) != len(names):
                    raise UsageError(
                        f'compression_training.{technique}: "{pattern}" matches {len(names)} layers and its '
                        f'related "{each}" {len(found)}: each layer needs one related module'
                    )
            for number, name in enumerate(names):
                layer: Any = modules[name]
                keep = layer.mask_of(technique).detach().flatten().bool()
                outputs = technique != "head_pruning"
                yield _checked(name, layer, 0 if outputs else 1, keep)
                for found in others.values():
                    other = found[number]
                    yield _checked(other, modules[other], 1 if outputs else 0, keep)


def _checked(name: str, layer: Any, dim: int, keep: Tensor) -> _Cut:
    """The cut, with an element of `keep` for each of the layer's outputs or inputs.

    Where there are more of these, an element stands for a whole head; fused projections follow one another.
    """
    if isinstance(layer, nn.BatchNorm2d):
        size = layer.num_features
    elif isinstance(layer, CompressedLayer):
        size = layer.matrix_shape[dim]
    else:
        shape = layer.weight.shape
        size = shape[1 - dim] if is_conv1d(type(layer)) else shape[dim]
    num = keep.numel()
    grouped = getattr(layer, "groups", 1) != 1
    if size == num and not grouped:
        return _Cut(name, layer, dim, keep)
    parts = 1
    if dim == 0 and not isinstance(layer, nn.BatchNorm2d):
        inputs = layer.weight.numel() // size if size else 1
        parts = size // inputs if inputs and size % inputs == 0 and size > inputs else 1
    if size % (num * parts) or grouped or isinstance(layer, (nn.Conv2d, nn.BatchNorm2d)):
        raise UsageError(
            f"redundancy_clean: {name} has {size} {'inputs' if dim else 'outputs'}, which do not belong to the "
            f"{num} rows, heads or channels of the pruned layer; correct related_modules"
        )
    return _Cut(name, layer, dim, keep.repeat_interleave(size // num // parts).repeat(parts))


def _apply(cut: _Cut) -> None:
    layer, keep = cut.layer, cut.keep
    if isinstance(layer, nn.BatchNorm2d):
        for name in ("weight", "bias", "running_mean", "running_var"):
            _replace(layer, name, 0, keep)
        layer.num_features = int(keep.sum())
        return
    transposed = is_conv1d(type(layer))
    _replace(layer, "weight", 1 - cut.dim if transposed else cut.dim, keep)
    if cut.dim == 0:
        _replace(layer, "bias", 0, keep)
    kept = int(keep.sum())
    convolution = isinstance(layer, nn.Conv2d)
    if transposed:
        names = ("nf", "nx")
    else:
        names = ("out_channels", "in_channels") if convolution else ("out_features", "in_features")
    setattr(layer, names[cut.dim], kept)


def _replace(layer: nn.Module, name: str, dim: int, keep: Tensor) -> None:
    value = getattr(layer, name, None)
    if value is None:
        return
    part = value.index_select(dim, keep.nonzero().view(-1)).contiguous()
    if isinstance(value, nn.Parameter):
        part = nn.Parameter(part, value.requires_grad)
    setattr(layer, name, part)


def _head_owners(
    model: nn.Module, section: CompressionTraining, cuts: list[_Cut]
) -> dict[nn.Module, tuple[int, int]]:
    """Modules around the projections of cut heads -> (heads before, heads after)."""
    shared = section.head_pruning.shared_parameters
    if not shared.enabled or shared.num_heads is None:
        return {}
    pruned = {n: layer for n, layer in compressed_layers(model) if "head_pruning" in layer.settings}
    modules, found = dict(model.named_modules()), {}
    after = 0
    for cut in cuts:  # a pruned layer, then its related ones
        if cut.name in pruned and cut.dim == 1:
            after = int(pruned[cut.name].mask_of("head_pruning").sum())
        elif not after or cut.dim == 1:
            continue
        found[modules[cut.name.rpartition(".")[0]]] = (shared.num_heads, after)
    return found


def _set_heads(owner: nn.Module, before: int, after: int) -> None:
    """Tell an attention of transformers, or one written like it, how many heads it has."""
    for name in HEAD_COUNTS:
        if getattr(owner, name, None) == before:
            setattr(owner, name, after)
    for name in HEAD_SIZES:
        size = getattr(owner, name, None)
        if isinstance(size, int) and size % before == 0:
            setattr(owner, name, size // before * after)


__all__ = ["clean"]
