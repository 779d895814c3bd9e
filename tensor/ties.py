"""Completes a plan of the whole model: weights that several modules use, and the head of the vocabulary.

An embedding and a head that share a weight are cut together: the embedding by rows and the head by columns have
the same slice. Any other weight that several modules use stays whole, and so do the layers beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..utils.errors import UsageError
from .plan import Ways, check_module
from .words import BY_HEADS, CUTS_COLUMNS, KEEPS_WHOLE, Way, Word, is_linear, is_transposed

HEADS = frozenset({Word.COLWISE_GATHER, Word.VOCABULARY})


def with_head(ways: Ways, model: nn.Module, blocks: Collection[str]) -> Ways:
    """`ways` with a head whose logits stay cut, for vocab_parallel_lm_head. `blocks`: their names.

    Raises:
        UsageError: no module or several look like the head.
    """
    names = [
        name
        for name, module in model.named_modules()
        if _is_head(name, module, model, blocks, ways)
    ]
    if len(names) != 1:
        raise UsageError(
            "tensor_parallel.vocab_parallel_lm_head = true: "
            f"{' and '.join(names) if names else f'no layer of {type(model).__name__}'} may be the head; "
            'write the one in tensor_parallel.plan as "colwise_gather_output", or set it to false'
        )
    return ways | {names[0]: Way(Word.VOCABULARY)}


def with_heads(ways: Ways) -> Ways:
    """As `with_head` for a list of layers: each layer whose outputs would be gathered is a head."""
    return {
        name: Way(Word.VOCABULARY) if way.word is Word.COLWISE_GATHER else way
        for name, way in ways.items()
    }


def cut_names(ways: Ways, aliases: Mapping[str, str]) -> frozenset[str]:
    """First names of the parameters of a whole model that are cut. `aliases`: every name -> first name."""
    found = set()
    for name, way in ways.items():
        if way.word not in KEEPS_WHOLE:
            found.add(f"{name}.weight")
            if way.word in CUTS_COLUMNS:
                found.add(f"{name}.bias")
    return frozenset(aliases[name] for name in found if name in aliases)


def _is_head(name: str, module: nn.Module, model: Any, blocks: Collection[str], ways: Ways) -> bool:
    if not is_linear(module) or any(name.startswith(f"{block}.") for block in blocks):
        return False
    known = getattr(model, "get_output_embeddings", lambda: None)()
    if known is not None:
        return module is known
    planned = [
        other
        for other, way in ways.items()
        if way.word is Word.COLWISE_GATHER and not any(other.startswith(f"{b}.") for b in blocks)
    ]
    if planned:
        return name in planned
    sizes = {inner.num_embeddings for inner in model.modules() if isinstance(inner, nn.Embedding)}
    return isinstance(module, nn.Linear) and module.out_features in sizes


def with_ties(ways: Ways, model: nn.Module) -> Ways:
    """`ways` in which the modules of every weight that several use are cut alike, or are all whole."""
    users: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                users.setdefault(id(param), {})[name] = module
    found = dict(ways)
    for modules in users.values():
        if len(modules) < 2 or not any(_cuts(ways, name) for name in modules):
            continue
        alike = _alike(ways, modules)
        for name in modules:
            found.pop(name, None)
            if not alike and name in ways and ways[name].word in BY_HEADS:
                _keep_whole(found, name.rpartition(".")[0])
        found |= alike
    return found


def _keep_whole(ways: Ways, parent: str) -> None:
    """Take out the layers of `parent`: activations between them are whole if one of them is."""
    for name, way in list(ways.items()):
        between = way.word in BY_HEADS | {Word.PARTIAL}
        if between and name.rpartition(".")[0] == parent:
            del ways[name]


def _cuts(ways: Ways, name: str) -> bool:
    return name in ways and ways[name].word not in KEEPS_WHOLE


def _alike(ways: Ways, modules: dict[str, nn.Module]) -> Ways:
    """The words for embeddings and heads with one weight; {}: it stays whole."""
    words = {name: ways[name].word for name in modules if name in ways}
    if not {Word.EMBEDDING, Word.VOCABULARY} & set(words.values()):
        return {}
    found: Ways = {}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            check_module(name, module, Word.EMBEDDING)
            found[name] = Way(Word.EMBEDDING)
        elif (
            is_linear(module)
            and not is_transposed(module)
            and words.get(name, Word.COLWISE_GATHER) in HEADS
        ):
            found[name] = Way(words.get(name, Word.COLWISE_GATHER))
        else:
            return {}
    return found


__all__ = ["cut_names", "with_head", "with_heads", "with_ties"]
