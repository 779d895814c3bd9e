"""Reads `injection_policy`: layer class -> names of its linear layers whose outputs are summed over ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...tensor.finding import find_plan
from ...tensor.plan import own_plan
from ...tensor.styles import CUTS_ROWS, StyleName, is_linear, is_transposed
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...zero.layout.discover import found_blocks

log = logging.getLogger("xds")
BIAS = "relative_attention_bias"


def plan_of_policy(model: nn.Module, policy: Any) -> dict[str, str] | None:
    """`tensor_parallel.plan` with the meaning of `policy`; None: the plan of the model, or one that is found.

    The named layers are cut by rows, and the other linear layers in the class by columns. Where the plan that
    is found has the same rows, it is taken, because it also knows what is packed in one layer.

    Raises:
        UsageError: a class or a name is not in the model.
    """
    if any(BIAS in name for name, _ in model.named_parameters()):
        return _without_attention(model)
    if not policy:
        return None
    rows: set[str] = set()
    others: set[str] = set()
    for kind, names in policy.items():
        ends = _names(names)
        if ends is not None:
            _add(model, kind, ends, rows, others)
    if not rows:
        return None
    found = own_plan(model) or find_plan(model, found_blocks(model))
    if rows <= {name for name, style in found.items() if style.name in CUTS_ROWS}:
        return None
    modules = dict(model.named_modules())
    plan = {name: StyleName.ROWWISE.value for name in rows}
    for name in others - rows:
        is_packed = is_transposed(modules[name]) and "attn" in name
        plan[name] = (StyleName.PACKED_COLWISE if is_packed else StyleName.COLWISE).value
    return plan


def _without_attention(model: nn.Module) -> dict[str, str]:
    """The first block of T5 computes a bias with a number for each head, and hands it to the others whole."""
    found = own_plan(model) or find_plan(model, found_blocks(model))
    log.info("%s: %s belongs to whole heads, so attention is not cut", type(model).__name__, BIAS)
    kept = {name: style for name, style in found.items() if "attention" not in name.lower()}
    return {name: style.name.value for name, style in kept.items()}


def _names(names: Any) -> Sequence[str] | None:
    """The ends of names; None: a class of DeepSpeed's, which stands for its own kernels."""
    if isinstance(names, str):
        names = [names]
    if isinstance(names, Sequence) and all(isinstance(name, str) for name in names):
        # DeepSpeed's names of direct children begin with a dot
        return [name.removeprefix(".") for name in names]
    if isinstance(names, type):
        return None
    raise wrong("injection_policy", names, "a name or a tuple of names of linear layers")


def _add(
    model: nn.Module, kind: Any, ends: Sequence[str], rows: set[str], others: set[str]
) -> None:
    matching = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(kind, type) and issubclass(type(layer), kind)
    ]
    layers = [
        (f"{name}.{inner}" if name else inner, inner)
        for name, layer in matching
        for inner, module in layer.named_modules()
        if is_linear(module)
    ]
    for end in ends:
        if not any(inner.endswith(end) for _, inner in layers):
            raise UsageError(
                f"injection_policy: {type(model).__name__} has no {getattr(kind, '__name__', kind)} with a "
                f"linear layer {end!r}; correct the class or the name"
            )
    for name, inner in layers:
        (rows if any(inner.endswith(end) for end in ends) else others).add(name)


__all__ = ["plan_of_policy"]
