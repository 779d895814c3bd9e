"""Names of the whole model's parameters, and which of them several pipeline ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from .part import Names


def names_of(whole: nn.Module) -> Names:
    """The names of a model before it is cut, or of its outline on the meta device."""
    first = {id(param): name for name, param in whole.named_parameters()}
    everywhere = whole.named_parameters(remove_duplicate=False)
    aliases = {name: first[id(param)] for name, param in everywhere}
    shapes = {name: tuple(param.shape) for name, param in whole.named_parameters()}
    return Names(first, {}, shapes, aliases)


def names_of_part(whole: Names, module: nn.Module, holders: Mapping[str, Iterable[int]]) -> Names:
    """The names of this rank's part.

    Args:
        whole: the names before the cut.
        module: this rank's part; its parameters have names of the whole model.
        holders: name -> the pipeline ranks that hold the parameter.
    """
    everywhere = module.named_parameters(remove_duplicate=False)
    own = {id(param): whole.aliases[name] for name, param in everywhere}
    ranks_of: dict[str, set[int]] = {}
    for name, ranks in holders.items():
        ranks_of.setdefault(whole.aliases[name], set()).update(ranks)
    shared = {name: tuple(sorted(ranks)) for name, ranks in ranks_of.items() if len(ranks) > 1}
    return replace(whole, own=own, shared=shared)


__all__ = ["names_of", "names_of_part"]
