"""`set_z3_leaf_modules` and others: marks on modules, without effect, because xds gathers whole units."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from ....utils.errors import UsageError
from ....zero.layout.discover import found_blocks
from ..errors import raises_theirs

log = logging.getLogger("xds")


MARK = "_z3_leaf"  # DeepSpeed's attribute of a marked module, which other libraries read


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether `set_z3_leaf_modules` has marked the module."""
    return bool(getattr(model, MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All modules inside `model` that `set_z3_leaf_modules` has marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


@raises_theirs
def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Remove the mark from modules of these classes. Units are not changed.

    Raises:
        UsageError: there is no such module, unless `raise_if_not_found` is False.
    """
    found = list(_find(model, leaf_module_classes, raise_if_not_found).values())
    for module in found:
        setattr(module, MARK, False)
    return found


@raises_theirs
def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark the modules of these classes, of classes derived from them, or of these class names.

    They are gathered whole, as every block is.
    Blocks are found by their structure (zero/layout/discover.py). Where this divides a leaf module into several
    units, a warning names the setting that keeps it whole.
    Raises:
        UsageError: there is no such module, unless `raise_if_not_found` is False.
    """
    found = _find(model, leaf_module_classes, raise_if_not_found)
    _mark(model, found)
    return list(found.values())


def _mark(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Mark modules, by name. A warning names those that the engine would cut into several units."""
    for module in found.values():
        setattr(module, MARK, True)
    blocks = [name for name, _ in found_blocks(model)]
    cut = [name for name in found if any(block.startswith(f"{name}.") for block in blocks)]
    if cut:
        kind = type(found[cut[0]]).__name__
        log.warning(
            "set_z3_leaf_modules: %s (%s) would be divided into several units; keep it whole with "
            '"zero_optimization": {"units": ["%s"]} in the config',
            cut[0],
            kind,
            kind,
        )


def _find(
    model: nn.Module, wanted_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool
) -> dict[str, nn.Module]:
    classes = tuple(kind for kind in wanted_classes if not isinstance(kind, str))
    names = {kind for kind in wanted_classes if isinstance(kind, str)}
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, classes) or _names(module) & names
    }
    if not found and raise_if_not_found:
        wanted = sorted(names | {f"{kind.__module__}.{kind.__qualname__}" for kind in classes})
        raise UsageError(
            f"set_z3_leaf_modules: the model has no module of class {', '.join(wanted)}; its classes "
            f"are {', '.join(sorted({type(module).__name__ for module in model.modules()}))}"
        )
    return found


def _names(module: nn.Module) -> set[str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
