"""Finds the experts of a model, and keeps this rank's experts of each layer.

A module of experts is called as `layer.py` says; transformers marks such classes. Its weights are in tensors
whose first dimension is the number of experts, or in the equal children of one nn.ModuleList. A block has a
router and such a list, and a forward of its own: `block.py`. What is cut stays the same parameter, with a
smaller tensor; an expert of another rank keeps no elements.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import gcd
from typing import Any, final
from weakref import WeakSet

from torch import Tensor, nn

from ..ops.boxes import Box, Boxes, taken
from ..utils.errors import UsageError
from .config import ExpertParallel
from .conventions import Block, Convention, is_matrix_of

# modules of experts, and blocks, of which this process has some experts only
_cut_modules: WeakSet[nn.Module] = WeakSet()
CONTRACT = ("hidden_states", "top_k_index", "top_k_weights")


@final
@dataclass(frozen=True, eq=False)
class Found:
    """A module of experts, or a block with a list of them: its name in the model, and how many experts it has.

    experts: the list of its experts; None: they are in stacked tensors. block: its parts; None: it is no block.
    convention: by which the block routes; None: it is no block, or is not proven yet.
    """

    name: str
    module: nn.Module
    num_experts: int
    experts: nn.ModuleList | None = None
    block: Block | None = None
    convention: Convention | None = None

    @property
    def experts_name(self) -> str:
        """The name of the module or list of experts, beside which the router is."""
        return self.name if self.block is None else _joined(self.name, self.block.experts)

    def params(self) -> Iterator[tuple[int | None, nn.Parameter]]:
        """The parameters of experts, and of which expert each is; None: of all."""
        if self.experts is None:
            for param in self.module.parameters(recurse=False):
                yield None, param
            return
        for number, expert in enumerate(self.experts):
            for param in expert.parameters():
                yield number, param


@final
@dataclass
class Cut:
    """What cutting has made.

    num_ranks: that share the experts. slices: id(parameter) -> the boxes of all of them.
    adapters: parameters of adapters of experts.
    """

    num_ranks: int
    found: Sequence[Found]
    slices: dict[int, Boxes] = field(default_factory=dict)
    adapters: list[nn.Parameter] = field(default_factory=list)

    def params(self) -> Iterator[nn.Parameter]:
        """All parameters of experts, each once: layers may share them."""
        own = [param for one in self.found for _, param in one.params()]
        yield from {id(param): param for param in [*own, *self.adapters]}.values()


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


# -- finding --------------------------------------------------------------------------------------------------


def find_experts(
    model: nn.Module, section: ExpertParallel, *, is_part: bool = False
) -> list[Found]:
    """The modules of experts of `model`, and its blocks with lists of experts, without those around others.

    is_part: the model has the layers of one pipeline stage only, so a pattern may match nothing.

    Raises:
        UsageError: a pattern matches nothing, or a module that cannot be cut.
    """
    found: list[Found] = []
    whys: list[str] = []
    for name, module in model.named_modules():
        is_named = section.moe_layer_pattern is not None and _names_block(section, name)
        candidate = _candidate(model, name, module, section, is_named=is_named)
        if isinstance(candidate, Found):
            found.append(candidate)
        elif is_named and list_in(module) is not None and list_in(module) is not module:
            raise UsageError(
                f"expert_parallel.moe_layer_pattern = {section.moe_layer_pattern!r}: {name} "
                f"({type(module).__name__}) {candidate}; give a pattern without this module"
            )
        elif is_named or (section.expert_pattern and _names(section.expert_pattern, name)):
            whys.append(f"{name} ({type(module).__name__}) {candidate}")
    around = {outer for f in found for outer in _names_around(f.name)}
    found = [f for f in found if f.name not in around]
    for key in ("moe_layer_pattern", "expert_pattern"):
        pattern = getattr(section, key)
        if pattern is not None and not (found or is_part):
            why = f"{whys[0]}" if whys else "it matches none of the model's experts"
            raise UsageError(
                f"expert_parallel.{key} = {pattern!r}: {why}; give a pattern of blocks with experts such as "
                '"*.mlp" (expert_pattern: of their experts, "*.mlp.experts"), or remove it'
            )
    return found


def check_found(model: nn.Module, found: Sequence[Found], setting: str) -> None:
    """
    Raises:
        UsageError: nothing was found; it names the module that is most like experts.
    """
    if not found:
        raise UsageError(f"{setting}: {_nearest(model)}; set expert_parallel.enabled to false")


def _nearest(model: nn.Module) -> str:
    """Why the module of `model` that is most like experts is not cut, as a clause."""
    modules = list(model.named_modules())
    named = [(name, m) for name, m in modules if "expert" in type(m).__name__.lower()]
    for name, module in [*named, *((name, m) for name, m in modules if _is_stack(m))]:
        why = why_not(module)
        if why:
            return f"{name} ({type(module).__name__}) {why}, and the model has no other experts"
    return (
        f"the model has no module of experts, which is called with ({', '.join(CONTRACT)}), and no block with "
        "a router and an nn.ModuleList of equal experts"
    )


def _is_stack(module: nn.Module) -> bool:
    """All its parameters have one first dimension, and some are stacks of matrices."""
    shapes = [param.shape for param in module.parameters(recurse=False)]
    is_own = not type(module).__module__.startswith("torch.nn.")
    return is_own and len({shape[:1] for shape in shapes}) == 1 and max(map(len, shapes)) > 2


def _names_around(name: str) -> Iterator[str]:
    """The names of all modules that have the module `name`.

    >>> list(_names_around("layers.0.mlp"))
    ['layers.0', 'layers', '']
    """
    while name:
        name = name.rpartition(".")[0]
        yield name


def _candidate(
    model: nn.Module, name: str, module: nn.Module, section: ExpertParallel, *, is_named: bool
) -> Found | str:
    """The experts of `module`, or why there are none, as a predicate. is_named: the config names this block."""
    parent = name.rpartition(".")[0]
    why = why_not(module)
    if not why:
        asked = section.moe_layer_pattern is None or _names_block(section, parent) or is_named
        if not asked or not _names(section.expert_pattern, name):
            return "is left out"
        experts = list_in(module)
        numbers = getattr(module, "num_experts", None) if experts is None else len(experts)
        return Found(name, module, int(numbers or 0), experts)
    if section.moe_layer_pattern is not None and not is_named:
        return why
    if isinstance(module, nn.ModuleList):
        return "is a list, and its experts are called by another module"
    block = _block(name, module, section)
    if isinstance(block, str):
        return f"{why}, and {block}"
    listed = module.get_submodule(block.experts)
    assert isinstance(listed, nn.ModuleList)
    key = section.num_experts_attr
    stated = getattr(getattr(model, "config", None), key, None) if key is not None else len(listed)
    if stated != len(listed):
        raise UsageError(
            f"expert_parallel.num_experts_attr = {key!r}: model.config has {stated} there, and {name} has "
            f"{len(listed)} experts; remove the key"
        )
    return Found(name, module, len(listed), listed, block)


def _names(pattern: str | None, name: str) -> bool:
    """`pattern` is a glob of the name in the model, or of its last part; None: of all."""
    last = name.rpartition(".")[2]
    return pattern is None or fnmatchcase(name, pattern) or fnmatchcase(last, pattern)


def _names_block(section: ExpertParallel, name: str) -> bool:
    pattern = section.moe_layer_pattern
    if pattern is None or fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def why_not(module: nn.Module) -> str:
    """Why `module` is no module of experts, as a predicate; "": it is one."""
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    is_marked = hasattr(module, "_is_expert_parallel")
    if names != CONTRACT and not is_marked:
        return f"is not called with ({', '.join(CONTRACT)})"
    if hasattr(module, "parametrizations"):
        return "has parametrizations of torch.nn.utils.parametrize, which compute its parameters"
    own = dict(module.named_parameters(recurse=False))
    if not own:
        experts = list_in(module)
        return (
            "has no parameters of its own, and no list of experts"
            if experts is None
            else unequal(experts)
        )
    num_experts = getattr(module, "num_experts", None)
    if not isinstance(num_experts, int) or num_experts < 1:
        return "has no attribute num_experts"
    others = [name for name, param in own.items() if param.shape[:1] != (num_experts,)]
    if others:
        return f"has the parameter {others[0]}, whose first dimension is not num_experts = {num_experts}"
    # of children: a vector is more likely as long as there are experts by chance
    rows = [
        name for name, b in module.named_buffers(recurse=False) if b.shape[:1] == (num_experts,)
    ]
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        is_child = "." in name and not name.startswith("parametrizations.")
        if is_child and value.dim() > 1 and len(value) == num_experts:
            rows.append(name)
    if rows:
        return f"has {rows[0]} with a row for each expert, which is no parameter of its own"
    return ""


def list_in(module: nn.Module, name: str = "", pattern: str | None = None) -> nn.ModuleList | None:
    """The only list of two or more modules with parameters: `module` itself, or its child.

    pattern: of the list, in a model where `module` has this name.
    """
    children = {"": module} if isinstance(module, nn.ModuleList) else dict(module.named_children())
    lists = [
        child
        for key, child in children.items()
        if isinstance(child, nn.ModuleList)
        and len(child) > 1
        and any(True for _ in child.parameters())
        and _names(pattern, _joined(name, key))
    ]
    return lists[0] if len(lists) == 1 else None


def unequal(experts: nn.ModuleList) -> str:
    """Why the modules of a list are no equal experts, as a predicate; "": they are."""
    kinds = [
        (type(one), [(name, p.shape, p.dtype) for name, p in one.named_parameters()])
        for one in experts
    ]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            return f"has experts that differ: 0 and {number} have other classes, names or shapes"
    scalars = [name for name, shape, _ in kinds[0][1] if not shape]
    if scalars:
        return (
            f"has experts with the parameter {scalars[0]} without dimensions; give it the shape [1]"
        )
    params = [id(param) for one in experts for param in one.parameters()]
    return "has experts that share parameters" if len(set(params)) < len(params) else ""


def _block(name: str, module: nn.Module, section: ExpertParallel) -> Block | str:
    """The parts of a block; or why it is none, as a predicate."""
    experts = list_in(module, name, section.expert_pattern)
    if experts is None:
        return "has no nn.ModuleList of two or more experts, or several"
    why = unequal(experts)
    if why:
        return why
    children = {key: child for key, child in module.named_children() if child is not experts}
    routers = [
        key
        for key, child in children.items()
        if _names(section.router_pattern, key)
        and any(is_matrix_of(param, len(experts)) for param in child.parameters())
    ]
    lines = [key for key in routers if isinstance(children[key], nn.Linear)]
    routers = lines if len(lines) == 1 else routers
    if len(routers) != 1:
        several = f"several of {', '.join(routers)}" if routers else "no child"
        return (
            f"has {several} with a matrix [{len(experts)}, H] that makes a number for each expert; set "
            "expert_parallel.router_pattern to the name of its router"
        )
    others = {
        key: child
        for key, child in children.items()
        if key != routers[0] and any(True for _ in child.parameters())
    }
    is_gate = section.shared_experts_gate_pattern
    gates = [
        key
        for key, child in others.items()
        if (_names(is_gate, key) if is_gate is not None else _has_one_output(child))
    ]
    shared = [
        key for key in others if key not in gates and _names(section.shared_experts_pattern, key)
    ]
    if section.has_shared_experts is False:
        gates, shared = [], []
    experts_name = next(key for key, child in module.named_children() if child is experts)
    router = routers[0]
    gate = gates[0] if gates and shared else None
    bias = _bias(module, router, len(experts))
    return Block(name, module, router, experts_name, tuple(shared), gate, bias)


def _has_one_output(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 1


def _bias(module: nn.Module, router: str, num_experts: int) -> tuple[str, str] | None:
    """See `Block.bias`."""
    for owner in ("", router):
        part = module.get_submodule(owner)
        tensors: dict[str, Any] = {**part._parameters, **part._buffers}
        for name, tensor in tensors.items() if not isinstance(part, nn.Linear) else ():
            is_one = isinstance(tensor, Tensor) and tensor.shape == (num_experts,)
            if is_one and tensor.is_floating_point():
                return owner, name
    return None


# -- sizes, and cutting ---------------------------------------------------------------------------------------


def fitting_size(found: Sequence[Found], num_ranks: int) -> int:
    """The most ranks that can share the experts of every layer, of the `num_ranks` ranks of a stage."""
    most = num_ranks
    for one in found:
        most = gcd(most, one.num_experts)
    return most


def check_size(found: Sequence[Found], size: int, num_ranks: int, setting: str) -> None:
    """
    Raises:
        UsageError: `size` ranks cannot share the experts.
    """
    for one in found:
        if one.num_experts % size:
            raise UsageError(
                f"{setting}: it must divide the experts of every layer, and {one.name} has "
                f"{one.num_experts}; set it to {fitting_size(found, num_ranks)}, or to 0 for as many as fit"
            )


def check_choices(model: nn.Module, found: Sequence[Found], setting: str) -> None:
    """
    Raises:
        UsageError: a router is to choose more experts than its layer has; the model's forward would fail.
    """
    for one in found:
        block = model.get_submodule(one.experts_name.rpartition(".")[0])
        for name, module in block.named_modules():
            choices = getattr(module, "top_k", None)
            if type(choices) is int and choices > one.num_experts:
                where = ".".join(
                    part for part in (one.experts_name.rpartition(".")[0], name) if part
                )
                raise UsageError(
                    f"{setting}: {where}.top_k = {choices} is more than the {one.num_experts} experts of "
                    f"{one.experts_name}; set the model's number of experts of a token (num_experts_per_tok) "
                    f"to at most {one.num_experts}"
                )


def plan_cut(found: Sequence[Found], size: int) -> Cut:
    """The parts of `size` ranks. Nothing is cut yet."""
    cut = Cut(size, found)
    for one in found:
        share = one.num_experts // size
        for number, param in one.params():
            whole = tuple(param.shape)
            if number is None:
                ranges = [(rank * share, (rank + 1) * share) for rank in range(size)]
            else:
                ranges = [(0, whole[0] if number // share == rank else 0) for rank in range(size)]
            cut.slices[id(param)] = tuple(Box(whole, 0, (each,)) for each in ranges)
    return cut


def check_shared(model: nn.Module, cut: Cut, setting: str) -> None:
    """
    Raises:
        UsageError: a parameter of experts is that of another module too, which would get this rank's part.
    """
    stacks = {f.experts or f.module for f in cut.found}
    within: dict[str, nn.Module | None] = {}  # in which of them a module is, by all names
    uses: dict[int, tuple[str, nn.Module | None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        within[name] = module if module in stacks else within.get(name.rpartition(".")[0])
        for key, param in module._parameters.items():
            if id(param) not in cut.slices:
                continue
            use = _joined(name, key), within[name]
            first = uses.setdefault(id(param), use)
            if use[1] is not first[1]:
                raise UsageError(
                    f"{setting}: {first[0]} and {use[0]} are one parameter, and experts share none with other "
                    "modules; give each its own, share the whole module of experts, or set "
                    "expert_parallel.enabled to false"
                )


def mark_cut(cut: Cut) -> None:
    """This rank is about to keep some of the experts."""
    _cut_modules.update(found.module for found in cut.found)


def was_cut(module: nn.Module) -> bool:
    """This rank has some experts of `module` only."""
    return module in _cut_modules


def keep_part(param: nn.Parameter, box: Box) -> None:
    """Keep the part in `box`. The parameter is whole."""
    if box.shape != box.whole:
        param.data = taken(param.data, box)


__all__ = [
    "Cut",
    "Found",
    "check_choices",
    "check_found",
    "check_shared",
    "check_size",
    "find_experts",
    "fitting_size",
    "keep_part",
    "mark_cut",
    "plan_cut",
    "was_cut",
]
