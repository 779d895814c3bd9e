"""Modules that stay fp32 while the rest of a model trains in 16 bits: data_types.keep_in_fp32_modules.

    x (bf16) ──to fp32──> module, parameters in fp32 ──to the dtype of x──> y (bf16)

- "auto": what the model's class names, as `from_pretrained` of transformers reads it. Such a module casts its
  inputs in its own code, so nothing is cast here.
- Names: the inputs and outputs of the outermost modules that stay fp32 as a whole are cast here. The cast
  replaces the module's forward, so it is inside of graphs and recomputed blocks, and needs no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import all_gather_json
from ...ops.torch_internals import tree_leaves, tree_map
from ...utils.errors import UsageError
from ...utils.module_buffers import Key
from ...utils.patterns import matching
from ...utils.quoting import quoted
from ..config.config import Config
from ..config.sections import AUTO_MODULES
from .forwards import Forward, replace_forwards
from .precision import Fp32Tensors, compute_dtype

KEY = "data_types.keep_in_fp32_modules"
OUTPUTS = "data_types.fp32_outputs"
STRICT, FOR_FP16 = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"  # of transformers


def find_fp32(
    model: nn.Module, config: Config, names: Mapping[int, str] | None = None
) -> Fp32Tensors:
    """What stays fp32 of `model`, which trains in 16 bits.

    names: id of a parameter -> its name in the whole model, where `model` is a part with other names.

    Raises:
        UsageError: a module of torch would have parameters of two dtypes.
    """
    low, section = compute_dtype(config), config.data_types
    assert low is not None
    tensors = list(_tensors(model, names or {}))
    named = AUTO_MODULES in section.keep_in_fp32_modules
    of_model = _named_by_classes(model, tensors, low) if named else set()
    of_config, unused = _matched(KEY, section.fp32_patterns, model, tensors)
    cast = frozenset(id(tensors[i].tensor) for i in of_config if tensors[i].is_param)
    params = cast.union(id(tensors[i].tensor) for i in of_model if tensors[i].is_param)
    buffers = {tensors[i].key for i in of_model | of_config if not tensors[i].is_param}
    kept = [each for each in tensors if id(each.tensor) in cast]
    hits, unused_outputs = _matched(OUTPUTS, section.fp32_outputs, model, kept)
    for module in model.modules():  # statistics of a norm are as wide as its weight
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        if own and all(id(param) in params for param in own):
            buffers.update((module, name) for name, _ in module.named_buffers(recurse=False))
    with_outputs = {id(kept[i].tensor) for i in hits}
    borders = {  # what leaves the whole model is of no 16-bit module's concern
        module: (module is model and names is None)
        or all(id(param) in with_outputs for param in _floating(module).values())
        for module in _outermost(model, "", cast)
    }
    return Fp32Tensors(params, frozenset(buffers), borders, unused | unused_outputs)


@dataclass(frozen=True, eq=False)
class _Named:
    """A tensor of a model. key: its module, and its name there. name: in the whole model."""

    name: str
    key: Key
    tensor: Tensor
    is_param: bool


def _tensors(model: nn.Module, names: Mapping[int, str]) -> Iterator[_Named]:
    """The parameters and buffers of 16 bits or more under all their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for is_param, tensors in ((True, module._parameters), (False, module._buffers)):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point() and tensor.itemsize > 1:
                    name = f"{prefix}.{key}" if prefix else key
                    shown = names.get(id(tensor), name)
                    yield _Named(shown, (module, key), tensor, is_param)


def _named_by_classes(model: nn.Module, tensors: Sequence[_Named], low: torch.dtype) -> set[int]:
    """Indices of the tensors that classes of modules name; see `transformers.PreTrainedModel`."""
    lists = (STRICT, FOR_FP16) if low == torch.float16 else (STRICT,)
    found: set[int] = set()
    for prefix, module in model.named_modules():
        patterns = {name for each in lists for name in getattr(module, each, None) or ()}
        if not patterns:
            continue
        inner = set(module.modules())
        start = f"{prefix}." if prefix else ""
        own = [i for i, each in enumerate(tensors) if each.key[0] in inner]
        within = [tensors[i].name.removeprefix(start) for i in own]
        for pattern in sorted(patterns):
            found.update(i for i, hit in zip(own, _search(pattern, within), strict=True) if hit)
    return found


def _matched(
    key: str, patterns: Sequence[str], model: nn.Module, tensors: Sequence[_Named]
) -> tuple[set[int], dict[str, list[str]]]:
    """Indices of the tensors that patterns of the config match, and under `key` the patterns that match none.

    A pattern matches a part of the name, or is the class of a module that the tensor is in.
    """
    names = [each.name for each in tensors]
    found: set[int] = set()
    unused = []
    for pattern in patterns:
        of_class = (module for module in model.modules() if type(module).__name__ == pattern)
        inside = {inner for module in of_class for inner in module.modules()}
        by_name = _search(pattern, names)
        hits = {i for i, each in enumerate(tensors) if by_name[i] or each.key[0] in inside}
        found |= hits
        if not hits:
            unused.append(pattern)
    return found, {key: unused} if unused else {}


def _search(pattern: str, names: Sequence[str]) -> list[bool]:
    """As transformers and DeepSpeed match it: * is any text, and a match may be anywhere in the name."""
    try:
        return matching(pattern.replace("*", ".*"), names, anywhere=True)
    except ValueError as error:
        raise UsageError(f"{KEY}: {quoted(pattern)} {error}") from None


def refuse_unused(found: Fp32Tensors, model: nn.Module) -> None:
    """
    Raises:
        UsageError: a pattern of the config matches nothing in `model`, the whole of it.
    """
    kinds = sorted({type(module).__name__ for module in model.modules()})
    for key, patterns in found.unused.items():
        raise UsageError(
            f"{_nothing_matches(key, patterns)} (the model's classes are {', '.join(kinds)})"
        )


def refuse_unused_in_parts(found: Fp32Tensors, world: Collectives) -> None:
    """The same where each rank has built its own part. A collective.

    Raises:
        UsageError: on every rank.
    """
    by_rank = all_gather_json(world, {key: list(each) for key, each in found.unused.items()}, KEY)
    for key in (KEY, OUTPUTS):
        unused = set(found.unused.get(key, ())).intersection(
            *(rank.get(key, ()) for rank in by_rank)
        )
        if unused:
            raise UsageError(_nothing_matches(key, sorted(unused)))


def _nothing_matches(key: str, patterns: Sequence[str]) -> str:
    what = "parameter or buffer" if key == KEY else f"parameter that {KEY} names"
    return (
        f"{key} = {list(patterns)}: no {what} has a name with this in it, or is in a module of this class; "
        "correct the name, or remove it"
    )


# -- casts around modules ---------------------------------------------------------------------------------


def cast_borders(borders: Mapping[nn.Module, bool], low: torch.dtype) -> Callable[[], None]:
    """Cast the inputs and outputs of modules from now on, until the result is called.

    borders: module -> its outputs stay fp32. low: the dtype of the rest of the model.
    """
    undos = [
        replace_forwards(
            [module for module, has_outputs in borders.items() if has_outputs is keeps],
            partial(_cast, low=low, keeps=keeps),
        )
        for keeps in (False, True)
    ]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _outermost(module: nn.Module, name: str, params: frozenset[int]) -> Iterator[nn.Module]:
    """The outermost modules with a forward all of whose floating-point parameters are in `params`."""
    own = _floating(module)
    kept = [key for key, param in own.items() if id(param) in params]
    if not kept:
        return
    if len(kept) == len(own) and type(module).forward is not nn.Module.forward:
        yield module
        return
    is_torchs = type(module).__module__.startswith("torch.nn.")
    if len(kept) < len(own) and is_torchs and any(True for _ in module.parameters(recurse=False)):
        other = next(key for key in own if key not in kept)
        raise UsageError(
            f"{KEY}: {name}.{kept[0]} stays fp32 and {name}.{other} does not, and torch's "
            f"{type(module).__name__} needs one dtype; name the whole module, e.g. {quoted(name)}"
        )
    for key, child in module.named_children():
        yield from _outermost(child, f"{name}.{key}" if name else key, params)


def _floating(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: p for key, p in module.named_parameters() if p.is_floating_point()}


def _cast(forward: Forward, *, low: torch.dtype, keeps: bool) -> Forward:
    """`forward` in fp32. Outputs have the dtype of the inputs, and `low` where no input is a floating tensor.

    keeps: outputs stay fp32.
    """

    def in_fp32(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = {t.dtype for t in tree_leaves((args, kwargs)) if _is_floating(t)}
        if low in inputs:
            args, kwargs = tree_map(widened, (args, kwargs))
        outputs = forward(module, *args, **kwargs)
        if keeps or (inputs and low not in inputs):
            return outputs
        return tree_map(narrowed, outputs)

    def widened(value: Any) -> Any:
        return value.float() if _is_floating(value) and value.dtype == low else value

    def narrowed(value: Any) -> Any:
        return value.to(low) if _is_floating(value) and value.dtype == torch.float32 else value

    return in_fp32


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


__all__ = ["cast_borders", "find_fp32", "refuse_unused", "refuse_unused_in_parts"]
