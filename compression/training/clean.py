"""Turns compressed layers into plain ones with the same results, and cuts out what was pruned."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from .config import CompressionTraining
from .cuts import Cut, cuts_of
from .layers import RANGE, SEED, STATES, CompressedLayer, is_transposed, plain_class
from .prepare import compressed_layers

log = logging.getLogger("xds")

END = 1 << 40  # a number of steps after which every schedule has ended
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead")
HEAD_SIZES = ("all_head_size", "split_size")


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
    cuts = cuts_of(model, section)
    if other := [cut.source for cut in cuts if cut.technique not in _settings(cut.source, layers)]:
        raise UsageError(
            f"redundancy_clean: {other[0]} is not pruned as this config says; pass the config of the training"
        )
    _end_schedules(layers)
    kept = [cut.keep(layers[cut.source].mask_of(cut.technique)) for cut in cuts]
    heads = _head_owners(model, section, cuts)
    _bake(model, layers)
    for cut, keep in zip(cuts, kept, strict=True):
        _apply(cut, keep)
    for owner, (before, after) in heads.items():
        _set_heads(owner, before, after)


def _end_schedules(layers: dict[str, CompressedLayer]) -> None:
    """Advance to the state of the whole schedule. Logs a warning if training ended before."""
    early: dict[int, list[str]] = {}
    for name, layer in layers.items():
        step, before = layer.step, (layer.active, layer.weight_bits, layer.whole_share)
        layer.advance(END)
        if step >= 0 and before != (layer.active, layer.weight_bits, layer.whole_share):
            early.setdefault(step, []).append(name)
    for step, names in early.items():
        log.warning(
            "redundancy_clean: %s and %d more layers change: training ended after step %d, before their "
            "schedule did. What is pruned later stays whole, and weights get their target_bits",
            names[0],
            len(names) - 1,
            step,
        )


def _settings(name: str, layers: dict[str, CompressedLayer]) -> Any:
    return layers[name].settings if name in layers else ()


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
        for each in ("settings", "active", "step", "weight_bits", "whole_share"):
            layer.__dict__.pop(each, None)
        layer.__class__ = plain_class(layer)


def _apply(cut: Cut, keep: Tensor) -> None:
    layer = cut.layer
    if isinstance(layer, nn.BatchNorm2d):
        for name in ("weight", "bias", "running_mean", "running_var"):
            _replace(layer, name, 0, keep)
        layer.num_features = int(keep.sum())
        return
    transposed = is_transposed(layer)
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
    model: nn.Module, section: CompressionTraining, cuts: list[Cut]
) -> dict[nn.Module, tuple[int, int]]:
    """Modules around the projections of cut heads -> (heads before, heads after)."""
    modules, found = dict(model.named_modules()), {}
    before = section.head_pruning.shared_parameters.num_heads or 0
    for cut in cuts:
        if cut.technique == "head_pruning":
            pruned: Any = modules[cut.source]
            after = int(pruned.mask_of("head_pruning").sum())
            found[modules[cut.name.rpartition(".")[0]]] = (before, after)
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
