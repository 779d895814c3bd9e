"""Completes a plan of the whole model: weights that several modules use, and the head of the vocabulary.

An embedding and a head that share a weight are cut together: the embedding by rows and the head by columns have
the same slice. Any other weight that several modules use stays whole, and so do the layers beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..utils.errors import UsageError
from .plan import ParallelPlan, check_module
from .styles import (
    BY_HEADS,
    CUTS_COLUMNS,
    KEEPS_WHOLE,
    ParallelStyle,
    StyleName,
    is_linear,
    is_transposed,
)

HEADS = frozenset({StyleName.COLWISE_GATHER, StyleName.VOCABULARY})


def with_head(styles: ParallelPlan, model: nn.Module, blocks: Collection[str]) -> ParallelPlan:
    """`styles` with a head whose logits stay cut, for vocab_parallel_lm_head. `blocks`: their names.

    Raises:
        UsageError: no module or several look like the head.
    """
    names = [
        name
        for name, module in model.named_modules()
        if _is_head(name, module, model, blocks, styles)
    ]
    if len(names) != 1:
        raise UsageError(
            "tensor_parallel.vocab_parallel_lm_head = true: "
            f"{' and '.join(names) if names else f'no layer of {type(model).__name__}'} may be the head; "
            'write the one in tensor_parallel.plan as "colwise_gather_output", or set it to false'
        )
    return styles | {names[0]: ParallelStyle(StyleName.VOCABULARY)}


def with_heads(styles: ParallelPlan) -> ParallelPlan:
    """As `with_head` for a list of layers: each layer whose outputs would be gathered is a head."""
    return {
        name: ParallelStyle(StyleName.VOCABULARY)
        if style.name is StyleName.COLWISE_GATHER
        else style
        for name, style in styles.items()
    }


def cut_names(styles: ParallelPlan, aliases: Mapping[str, str]) -> frozenset[str]:
    """First names of the parameters of a whole model that are cut. `aliases`: every name -> first name."""
    params = set()
    for name, style in styles.items():
        if style.name not in KEEPS_WHOLE:
            params.add(f"{name}.weight")
            if style.name in CUTS_COLUMNS:
                params.add(f"{name}.bias")
    return frozenset(aliases[name] for name in params if name in aliases)


def _is_head(
    name: str, module: nn.Module, model: Any, blocks: Collection[str], styles: ParallelPlan
) -> bool:
    if not is_linear(module) or any(name.startswith(f"{block}.") for block in blocks):
        return False
    known = getattr(model, "get_output_embeddings", lambda: None)()
    if known is not None:
        return module is known
    planned = [
        other
        for other, style in styles.items()
        if style.name is StyleName.COLWISE_GATHER
        and not any(other.startswith(f"{b}.") for b in blocks)
    ]
    if planned:
        return name in planned
    sizes = {inner.num_embeddings for inner in model.modules() if isinstance(inner, nn.Embedding)}
    return isinstance(module, nn.Linear) and module.out_features in sizes


def with_ties(styles: ParallelPlan, model: nn.Module) -> ParallelPlan:
    """`styles` in which the modules of every weight that several use are cut alike, or are all whole."""
    users: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                users.setdefault(id(param), {})[name] = module
    changed = dict(styles)
    for modules in users.values():
        if len(modules) < 2 or not any(_cuts(styles, name) for name in modules):
            continue
        alike = _alike(styles, modules)
        for name in modules:
            changed.pop(name, None)
            if not alike and name in styles and styles[name].name in BY_HEADS:
                _keep_whole(changed, name.rpartition(".")[0])
        changed |= alike
    return changed


def _keep_whole(styles: ParallelPlan, parent: str) -> None:
    """Take out the layers of `parent`: activations between them are whole if one of them is."""
    for name, style in list(styles.items()):
        between = style.name in BY_HEADS | {StyleName.PARTIAL}
        if between and name.rpartition(".")[0] == parent:
            del styles[name]


def _cuts(styles: ParallelPlan, name: str) -> bool:
    return name in styles and styles[name].name not in KEEPS_WHOLE


def _alike(styles: ParallelPlan, modules: dict[str, nn.Module]) -> ParallelPlan:
    """The styles for embeddings and heads with one weight; {}: it stays whole."""
    names = {name: styles[name].name for name in modules if name in styles}
    if not {StyleName.EMBEDDING, StyleName.VOCABULARY} & set(names.values()):
        return {}
    alike: ParallelPlan = {}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            check_module(name, module, StyleName.EMBEDDING)
            alike[name] = ParallelStyle(StyleName.EMBEDDING)
        elif (
            is_linear(module)
            and not is_transposed(module)
            and names.get(name, StyleName.COLWISE_GATHER) in HEADS
        ):
            alike[name] = ParallelStyle(names.get(name, StyleName.COLWISE_GATHER))
        else:
            return {}
    return alike


__all__ = ["cut_names", "with_head", "with_heads", "with_ties"]
