"""Names that a package exports and loads on first use, so that reading a config does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(package: str, locations: Mapping[str, str], name: str) -> Any:
    """What the `__getattr__` of `package` returns for `name`.

    locations: name -> the module that has it, relative to the package or absolute.
    Raises AttributeError: no location has the name.
    """
    if name not in locations:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(locations[name], package), name)


def names(package: str, locations: Mapping[str, str]) -> list[str]:
    """What the `__dir__` of `package` returns: the public names alone."""
    return sorted({*sys.modules[package].__all__, *locations})


__all__ = ["load", "names"]
