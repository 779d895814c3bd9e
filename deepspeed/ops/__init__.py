"""`deepspeed.ops`: the optimizers, and the builders of native ops."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = ("adagrad", "adam", "lamb", "lion", "op_builder")


def _compatible_ops() -> dict[str, bool]:
    """Whether each op of DeepSpeed works on this machine, by the op's name. Scripts may change the dict."""
    from .op_builder.builder import compatible_ops

    return compatible_ops()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name == "__compatible_ops__":
        globals()[name] = _compatible_ops()  # one dict, so changes to it stay
        return globals()[name]
    from ..missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
