"""Finds the units of a model: which parameters are gathered, reduced and updated together.

A block is a child of the outermost nn.ModuleList or nn.Sequential in which at least two children share a
class (the layers of a transformer, the stages of a network), or a module that the config names. Blocks
smaller than `unit_min_numel` are merged with their neighbours. Parameters outside of all blocks, or in more
than one unit (tied weights), belong to the root unit. Units depend only on the module tree and on
sizes that all ranks know, so every rank finds the same units in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ...utils.errors import UsageError

CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class UnitPlan:
    """One unit: its name, the modules whose calls need it, its parameters by global name."""

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[tuple[str, nn.Parameter], ...]

    @property
    def numel(self) -> int:
        return sum(param.numel() for _, param in self.params)


def find_units(
    model: nn.Module, named: Sequence[str] = (), min_numel: int = 0
) -> tuple[list[UnitPlan], UnitPlan]:
    """The model's blocks in construction order, and the root unit with the rest.

    Args:
        named: class names or dotted-name globs of the unit modules; empty: found from the module tree.
        min_numel: consecutive blocks of one container are merged until they have this many elements.

    Raises:
        UsageError: a name in `named` matches no module.
    """
    return plan_units(model, [found_blocks(model, named)], min_numel)


def plan_units(
    model: nn.Module,
    runs: Sequence[Sequence[tuple[str, nn.Module]]],
    min_numel: int,
    in_root: Collection[int] = (),
    numel_of: Callable[[nn.Parameter], int] = nn.Parameter.numel,
) -> tuple[list[UnitPlan], UnitPlan]:
    """The same for blocks that are known: `found_blocks`, possibly of a model that was cut since.

    Args:
        runs: blocks by name; those of different runs are never merged.
        in_root: id of parameters that belong to the root unit in any case.
        numel_of: the elements of a parameter; the same on all ranks.
    """
    merged = [group for blocks in runs for group in _merge_small(blocks, min_numel, numel_of)]
    names = {id(param): name for name, param in model.named_parameters()}
    owners: Counter[int] = Counter()
    for group in merged:
        owners.update({id(param) for _, module in group for param in module.parameters()})
    outside = {id(p) for p in _params_outside(model, [m for g in merged for _, m in g])}
    outside.update(in_root)
    units = []
    for group in merged:
        params = {id(p): p for _, module in group for p in module.parameters()}
        own = tuple(
            (names[key], param)
            for key, param in params.items()
            if owners[key] == 1 and key not in outside and numel_of(param)
        )
        if own:
            units.append(UnitPlan(_joint_name(group), tuple(m for _, m in group), own))
    taken = {id(param) for unit in units for _, param in unit.params}
    rest = tuple(
        (name, param)
        for name, param in model.named_parameters()
        if id(param) not in taken and numel_of(param)
    )
    return units, UnitPlan("", _modules_of(model, rest), rest)


def found_blocks(model: nn.Module, named: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """The blocks before merging; activation checkpointing wraps each of them."""
    return named_blocks(model, named) if named else list(_repeated_blocks(model, ""))


def _repeated_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = list(module.named_children())
    if isinstance(module, CONTAINERS):
        classes = Counter(type(child) for _, child in children if _has_params(child))
        if classes and max(classes.values()) >= 2:
            for name, child in children:
                if _has_params(child):
                    yield prefix + name, child
            return
    for name, child in children:
        yield from _repeated_blocks(child, f"{prefix}{name}.")


def named_blocks(
    model: nn.Module, patterns: Sequence[str], key: str = "zero_optimization.units"
) -> list[tuple[str, nn.Module]]:
    """The outermost modules that match: a unit inside a unit would be gathered twice.

    Raises:
        UsageError: a pattern of the config's `key` matches no module.
    """
    unused = set(patterns)
    blocks: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = prefix + child_name
            hits = {p for p in patterns if type(child).__name__ == p or fnmatchcase(name, p)}
            unused.difference_update(hits)
            if hits and _has_params(child):
                blocks.append((name, child))
            else:
                visit(child, name + ".")

    visit(model, "")
    if unused:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(
            f"{key} = {sorted(unused)}: no module of the model has this class name or "
            f"matches this dotted-name pattern; the model's classes are {', '.join(kinds)}"
        )
    return blocks


def _merge_small(
    blocks: Sequence[tuple[str, nn.Module]],
    min_numel: int,
    numel_of: Callable[[nn.Parameter], int],
) -> list[list[tuple[str, nn.Module]]]:
    """Consecutive blocks of one container, joined until each group has `min_numel` elements."""
    groups: list[list[tuple[str, nn.Module]]] = []
    size, container = 0, ""
    for name, module in blocks:
        parent = name.rpartition(".")[0]
        numel = sum(map(numel_of, module.parameters()))
        if groups and parent == container and size < min_numel and numel < min_numel:
            groups[-1].append((name, module))
            size += numel
        else:
            groups.append([(name, module)])
            size, container = numel, parent
    return groups


def _joint_name(group: Sequence[tuple[str, nn.Module]]) -> str:
    first, last = group[0][0], group[-1][0]
    return first if first == last else f"{first}..{last.rpartition('.')[2]}"


def _has_params(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _params_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that a module outside of every block holds directly: they belong to the root unit."""
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            yield from module.parameters(recurse=False)


def _modules_of(
    model: nn.Module, params: Sequence[tuple[str, nn.Parameter]]
) -> tuple[nn.Module, ...]:
    """The model, then every module that holds one of `params` directly: user code may call each of them."""
    keys = {id(param) for _, param in params}
    owners = [
        module
        for module in model.modules()
        if module is not model and any(id(p) in keys for p in module.parameters(recurse=False))
    ]
    return (model, *owners)
