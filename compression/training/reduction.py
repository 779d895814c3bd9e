"""Students with fewer layers than their teacher, and Conv1D of transformers as linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...utils.arguments import wrong
from ...utils.errors import UsageError
from .config import LayerReduction


@torch.no_grad()
def copy_layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Layer i of the student gets the values of the teacher's layer teacher_layer[i]; other modules are copied.

    Values are matched by name. Raises UsageError, and nothing has changed: a name or a shape does not fit.
    """
    prefix = section.module_name_prefix
    names = [(f"{prefix}.{i}", f"{prefix}.{t}") for i, t in enumerate(section.teacher_layer)]
    names += [(name, name) for name in section.other_module_name]
    pairs = [pair for to, source in names for pair in _pairs(student, teacher, to, source)]
    for target, value in pairs:
        target.copy_(value)


def _pairs(
    student: nn.Module, teacher: nn.Module, to: str, source: str
) -> Iterator[tuple[Tensor, Tensor]]:
    ours, theirs = _states(student, to, "student"), _states(teacher, source, "teacher")
    for name, value in ours.items():
        other = theirs.get(name)
        if other is None or other.shape != value.shape:
            has = "does not have it" if other is None else f"has {list(other.shape)}"
            raise UsageError(
                f"layer_reduction: {to}.{name} of the student is {list(value.shape)}, and {source} of the "
                f"teacher {has}; give the student layers like the teacher's"
            )
        yield value, other


def _states(model: nn.Module, name: str, whose: str) -> dict[str, Tensor]:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise UsageError(
            f"layer_reduction: the {whose} has no module {name}; correct module_name_prefix, teacher_layer or "
            "other_module_name"
        ) from None
    found: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


def convert_conv1d_to_linear(model: nn.Module, convert_type: type) -> nn.Module:
    """Replace each layer of class `convert_type` (Conv1D of transformers) by an nn.Linear, in place.

    Its weight [inputs, outputs] is stored as [outputs, inputs]. Compressed training takes Conv1D as it is, so
    this is for scripts of DeepSpeed and for exports.

    Raises UsageError: `convert_type` is no class.
    """
    if not isinstance(convert_type, type):
        raise wrong("convert_conv1d_to_linear: convert_type", convert_type, "a class")
    inner: Any = getattr(model, "module", model)
    for name, module in list(inner.named_modules()):
        if not isinstance(module, convert_type):
            continue
        old: Any = module
        inputs, outputs = old.weight.shape
        linear = nn.Linear(inputs, outputs, bias=old.bias is not None, device="meta")
        linear.weight = nn.Parameter(old.weight.detach().t().contiguous(), old.weight.requires_grad)
        if old.bias is not None:
            linear.bias = old.bias
        linear.train(old.training)
        parent, _, last = name.rpartition(".")
        setattr(inner.get_submodule(parent), last, linear)
    return model


__all__ = ["convert_conv1d_to_linear", "copy_layers"]
