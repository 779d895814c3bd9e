"""`set_z3_leaf_modules` and others: marks on modules, without effect, because xds gathers whole units."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

from torch import nn

from ...utils.errors import UsageError
from ...zero.core.discover import found_blocks
from ..errors import raises_theirs

log = logging.getLogger("xds")


MARK = "_z3_leaf"  # DeepSpeed's attribute of a marked module, which other libraries read
_once_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


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
    Blocks are found by their structure (zero/core/discover.py). Where this divides a leaf module into several
    units, a warning names the setting that keeps it whole.
    Raises:
        UsageError: there is no such module, unless `raise_if_not_found` is False.
    """
    found = _find(model, leaf_module_classes, raise_if_not_found)
    _mark(model, found)
    return list(found.values())


@raises_theirs
def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark, or unmark, modules by their dotted names. Returns them, and the names that the model lacks.

    Raises:
        UsageError: a name is not there, unless `raise_if_not_found` is False.
    """
    return _set_by(
        model, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found
    )


@raises_theirs
def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """The same for modules whose dotted names end with one of the suffixes."""
    return _set_by(
        model,
        module_name_suffixes,
        lambda name, wanted: name.endswith(wanted),
        flag,
        raise_if_not_found,
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark, or unmark, `model` itself."""
    _mark(model, {"": model}, flag=flag)


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a module that `set_z3_leaf_modules` has marked holds the parameter."""
    marked = filter(z3_leaf_module, list(_once_marked))
    return any(model is one for module in marked for one in module.parameters())


def _set_by(
    model: nn.Module,
    wanted: Sequence[str],
    matches: Callable[[str, str], bool],
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    hits = {one: [name for name in modules if matches(name, one)] for one in wanted}
    missing = [one for one, names in hits.items() if not names]
    if missing and raise_if_not_found:
        raise UsageError(
            f"the model has no module named {', '.join(missing)}; see model.named_modules(), or pass "
            "raise_if_not_found=False"
        )
    found = {name: modules[name] for names in hits.values() for name in names}
    _mark(model, found, flag=flag)
    return list(found.values()), missing


def _mark(model: nn.Module, found: dict[str, nn.Module], *, flag: bool = True) -> None:
    """Mark modules, by name. A warning names those that the engine would cut into several units."""
    for module in found.values():
        setattr(module, MARK, flag)
    if not flag:
        return
    _once_marked.update(found.values())
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
