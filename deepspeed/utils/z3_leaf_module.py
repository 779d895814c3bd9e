"""`set_z3_leaf_modules`: xds gathers whole units, so a module inside a block needs no mark."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...ops.errors import UsageError
from ...zero.discover import found_blocks
from ..missing import stand_in

log = logging.getLogger("xds")


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """The modules of these classes (or class names). They are gathered whole, as every block is.

    A block is found by its shape (zero/discover.py). Where that cuts a leaf module into several units, a
    warning names the setting that keeps it whole.
    Raises:
        UsageError: there is no such module, unless `raise_if_not_found` is False.
    """
    wanted = {
        kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        for kind in leaf_module_classes
    }
    found = {name: module for name, module in model.named_modules() if _names(module) & wanted}
    if not found and raise_if_not_found:
        raise UsageError(
            f"set_z3_leaf_modules: the model has no module of class {', '.join(sorted(wanted))}; its classes "
            f"are {', '.join(sorted({type(module).__name__ for module in model.modules()}))}"
        )
    blocks = [name for name, _ in found_blocks(model)]
    cut = [name for name in found if any(block.startswith(f"{name}.") for block in blocks)]
    if cut:
        kind = type(found[cut[0]]).__name__
        log.warning(
            "set_z3_leaf_modules: %s (%s) would be cut into several units; keep it whole with "
            '"zero_optimization": {"units": ["%s"]} in the config',
            cut[0],
            kind,
            kind,
        )
    return list(found.values())


def _names(module: nn.Module) -> set[str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
