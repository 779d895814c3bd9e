"""Chooses the linear layers that multiply in 8 bits, and gives them torchao's class.

A layer stays the same object, with its parameters, hooks and names. torchao's own function replaces the object,
which would lose hooks and references of the script.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...ops.device import nvidia_capability
from ...utils.patterns import matching

MULTIPLE = 16  # of sizes that the kernels of GPUs multiply
HEADS = ("lm_head", "head", "output", "embed_out", "score", "classifier")
SHOWN_NAMES = 8


class Layer(NamedTuple):
    """A linear layer: its name in the whole model, and why it multiplies in high precision; "": it does not."""

    name: str
    module: nn.Module
    reason: str


def linear_layers(
    model: nn.Module,
    recipe: str,
    chosen: str | Sequence[str],
    name_of: Callable[[nn.Parameter, str], str],
    apart: Collection[int],
) -> list[Layer]:
    """The linear layers of `model`, in its order.

    Args:
        chosen: "auto", or regular expressions.
        name_of: the name of a parameter in the whole model, from the one in `model`.
        apart: id of each parameter that other ranks use as well, or that an expert has.

    Raises:
        ValueError: an expression takes too long. The message completes "TEXT ...".
    """
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found = []
    for local_name, module in model.named_modules():
        if not _is_linear(module):
            continue
        weight, name = module._parameters.get("weight"), local_name
        if weight is not None:
            name = name_of(weight, f"{local_name}.weight").removesuffix(".weight")
        is_shared = weight is None or id(weight) in apart or uses[id(weight)] > 1
        found.append(Layer(name, module, _unfit(module, weight, is_shared=is_shared)))
    if isinstance(chosen, str):
        return [f if f.reason else f._replace(reason=_slow(f, recipe)) for f in found]
    names = [layer.name for layer in found]
    hits = [matching(text, names, anywhere=True) for text in chosen]
    return [
        layer
        if layer.reason and any(here)
        else layer._replace(reason="" if any(here) else "filter")
        for layer, *here in zip(found, *hits, strict=True)
    ]


def _is_linear(module: nn.Module) -> bool:
    """A linear layer of any class, or Conv1D of transformers."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_float8(module: nn.Module) -> bool:
    """The layer has torchao's class, from the script or from `convert`."""
    kind = type(module)
    return kind.__name__ == "Float8Linear" and kind.__module__.startswith("torchao.")


def _unfit(module: nn.Module, weight: Tensor | None, *, is_shared: bool) -> str:
    """Why torchao cannot compute this layer, or would not see its weight; "": it can."""
    if is_float8(module):
        return "the script has converted it"
    if type(module) is not nn.Linear:
        return f"its class is {type(module).__name__}"
    if "forward" in module.__dict__:
        return "its forward is replaced"
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.itemsize == 1:
        return "its weight is computed, or has few bits"
    if is_shared:
        return "its weight is that of another layer or an expert, or stays fp32"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"its sizes are no multiples of {MULTIPLE}"
    return ""


def _slow(layer: Layer, recipe: str) -> str:
    """Why "auto" leaves out a layer that could be converted.

    The bounds are those of torchao, measured on an H100, for bf16 and torch.compile.
    """
    if layer.name.rpartition(".")[2] in HEADS:
        return "it is a head"
    module = layer.module
    assert isinstance(module, nn.Linear)
    inputs, outputs = module.in_features, module.out_features
    if recipe == "tensorwise":
        is_small = inputs <= 4096 and outputs <= 1024
    else:
        is_small = outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
    return "too small to gain" if is_small else ""


def report_of(recipe: str, names: Sequence[tuple[str, str]]) -> str:
    """One line for the log. names: of every linear layer, with the reason where it is not converted."""
    left: dict[str, list[str]] = {}
    for name, reason in names:
        if reason:
            left.setdefault(reason, []).append(name)
    num_left = sum(map(len, left.values()))
    line = f"float8 ({recipe}): {len(names) - num_left} of {len(names)} linear layers multiply in 8 bits"
    parts = [f"{_shown(layers)} ({reason})" for reason, layers in left.items()]
    return f"{line}; in high precision: {'; '.join(parts)}" if parts else line


def _shown(names: Sequence[str]) -> str:
    """Names with * for numbers, each once."""
    found = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    more = f" and {len(found) - SHOWN_NAMES} more" if len(found) > SHOWN_NAMES else ""
    return ", ".join(found[:SHOWN_NAMES]) + more


def convert(model: nn.Module, modules: Sequence[nn.Module], recipe: str) -> Callable[[], None]:
    """Give linear layers in `model` torchao's class; returns what gives them their own back."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    before: list[tuple[nn.Module, list[str]]] = []
    for module in modules:
        other = convert_to_float8_training(module, config=config)
        added = {name: value for name, value in vars(other).items() if name not in vars(module)}
        module.__class__ = type(other)
        vars(module).update(added)
        before.append((module, list(added)))
    hooks = [
        module.register_forward_pre_hook(_slow_path)
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer) and any(map(is_float8, module.modules()))
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module, names in before:
            module.__class__ = nn.Linear
            for name in names:
                vars(module).pop(name, None)

    return undo


def _slow_path(module: nn.Module, args: object) -> None:
    """A hook turns off the path of torch's encoder layers that reads weights and calls no layer."""


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Inside, layers in `model` that multiply in 8 bits multiply in the precision of their parameters."""
    kinds = [(module, type(module)) for module in model.modules() if is_float8(module)]
    for module, _ in kinds:
        module.__class__ = nn.Linear
    try:
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def needs_gpu(device: torch.device, recipe: str) -> str:
    """What is missing on this device; completes "float8.recipe = ... needs"; "": nothing."""
    own = nvidia_capability(device)
    least = (8, 9) if recipe == "tensorwise" else (9, 0)
    if own is None or own >= least:
        return ""
    return f"a GPU of compute capability {least[0]}.{least[1]}, and this one has {own[0]}.{own[1]}"


__all__ = [
    "convert",
    "high_precision",
    "is_float8",
    "linear_layers",
    "needs_gpu",
    "report_of",
]
