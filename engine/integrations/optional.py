"""Imports optional packages; a missing package is an error with the install command."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from ...utils.errors import UsageError


def need(package: str, who: str, extra: str) -> ModuleType:
    """The package `package`, which `who` needs and the extra `extra` installs.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec(package) is None:
        raise UsageError(
            f"{who} needs the package {package}, which is not installed; run "
            f'pip install -e ".[{extra}]" in the xds checkout (or pip install {package})'
        )
    return import_module(package)
