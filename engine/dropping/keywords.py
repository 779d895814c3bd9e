"""Keywords that a model's forward gets in training: `pld_theta`, `curriculum_seqlen`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

PLD = ("progressive_layer_drop", "pld_theta")
SEQLEN = "curriculum_seqlen"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes(model: nn.Module, *names: str) -> bool:
    """The model's forward can be called with these keywords."""
    params = _params(model)
    has_rest = any(param.kind is inspect.Parameter.VAR_KEYWORD for param in params.values())
    return all(name in params and params[name].kind in _NAMED or has_rest for name in names)


def reads(model: nn.Module, name: str) -> bool:
    """The model does something with this keyword.

    Its forward has a parameter of that name. Or it takes any keyword, as a wrapper does, and the forward of it
    or of a module in it has such a parameter or reads the name from its keywords, `kwargs["pld_theta"]`.
    """
    if not takes(model, name):
        return False
    if name in _params(model):
        return True
    return any(name in _names_in(module) for module in model.modules())


def _params(module: nn.Module) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # of a callable without a signature
        return {}


def _names_in(module: nn.Module) -> set[str]:
    """The parameters of its forward, and the texts in its code."""
    function: Any = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    found = set(_params(module))
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        found.update(_texts(code))
    return found


def _texts(code: CodeType) -> Iterator[str]:
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, CodeType):
            yield from _texts(value)


__all__ = ["PLD", "SEQLEN", "reads", "takes"]
