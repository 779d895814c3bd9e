"""Which weights a function uses, and their gradients without their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


def weights_of(function: Callable[..., Any]) -> list[Tensor] | None:
    """The parameters of the module that `function` is, or whose method it is; None for other functions."""
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return list(owner.parameters()) if isinstance(owner, nn.Module) else None


def trained(weights: Iterable[Tensor]) -> list[Tensor]:
    """Those that need a gradient, each once, in their order."""
    return list({id(weight): weight for weight in weights if weight.requires_grad}.values())


def leaves_of(outputs: Iterable[Any]) -> list[Tensor]:
    """The leaf tensors that the graph of `outputs` brings gradients to, each once."""
    waiting = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)  # only nodes of leaf tensors have it
        if isinstance(variable, Tensor):
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


@contextmanager
def without_hooks(weights: Sequence[Tensor]) -> Iterator[None]:
    """The hooks of `weights` are not called: they are for the whole gradient, not for that of each tile."""
    held = [(hooks, dict(hooks)) for weight in weights if (hooks := weight._backward_hooks)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


__all__ = ["leaves_of", "trained", "weights_of", "without_hooks"]
