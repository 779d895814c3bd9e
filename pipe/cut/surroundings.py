"""What a model has around its block list, and on which side of the blocks each module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.torch_internals import tree_leaves
from ...utils.errors import UsageError
from .meta_copies import ShapesOnly, meta_copy

FIRST, LAST = "first", "last"


@final
@dataclass(frozen=True)
class OuterModules:
    """The modules outside of the blocks.

    Args:
        ancestors: the model and the modules between it and the blocks, by name.
        modules: children of ancestors that have parameters, by name, in the order of registration.
        sides: name of one of `modules` -> "first", "last", or both.
        head: name of the one that is called right after the blocks, where that is known.
    """

    ancestors: dict[str, nn.Module]
    modules: dict[str, nn.Module]
    sides: dict[str, frozenset[str]]
    head: str | None


def find_surroundings(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    first_globs: Sequence[str] = (),
    last_globs: Sequence[str] = (),
) -> OuterModules:
    """The modules around the blocks. Their sides are found from a forward on the meta device where the model
    has `dummy_inputs` (transformers), else from the order of registration.

    Args:
        first_globs: names of modules that run before the blocks; decides instead of what is found.
        last_globs: names of modules that run after the blocks; a module may be in both.

    Raises:
        UsageError: a glob matches no module.
    """
    block_ids = {id(module) for _, module in blocks}
    ancestors = {
        name: module
        for name, module in model.named_modules()
        if id(module) not in block_ids and any(id(m) in block_ids for m in module.modules())
    }
    modules: dict[str, nn.Module] = {}
    order: list[str] = []  # of modules and, as "", of the blocks
    ancestor_ids = {id(module) for module in ancestors.values()}
    for name, child in _children_in_order(model, "", ancestor_ids):
        if id(child) in block_ids:
            order.append("")
        elif any(True for _ in child.parameters()):
            modules[name] = child
            order.append(name)
    blocks_at = order.index("")
    sides = {
        name: frozenset({FIRST if order.index(name) < blocks_at else LAST}) for name in modules
    }
    calls = _observed_calls(model, blocks, modules)
    if calls is not None:
        sides.update({name: frozenset(calls.sides[name] or {LAST}) for name in modules})
    sides.update(_named_sides(modules, first_globs, last_globs))
    head = calls.head if calls is not None else None
    is_last = head is not None and sides[head] == {LAST}
    return OuterModules(ancestors, modules, sides, head if is_last else None)


def _children_in_order(
    module: nn.Module, prefix: str, ancestors: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if id(child) in ancestors:
            yield from _children_in_order(child, f"{prefix}{name}.", ancestors)
        else:
            yield prefix + name, child


def _named_sides(
    modules: dict[str, nn.Module], first_globs: Sequence[str], last_globs: Sequence[str]
) -> dict[str, frozenset[str]]:
    sides: dict[str, frozenset[str]] = {}
    for side, globs in ((FIRST, first_globs), (LAST, last_globs)):
        for glob in globs:
            hits = [name for name in modules if fnmatchcase(name, glob)]
            if not hits:
                raise UsageError(
                    f'pipeline.{side}_stage_modules: "{glob}" matches no module outside of the blocks; those '
                    f"with parameters are {', '.join(modules) or 'none'}"
                )
            for name in hits:
                sides[name] = sides.get(name, frozenset()) | {side}
    return sides


@final
class _Stub(nn.Module):
    """Stands for a block in the forward on the meta device: returns the first floating argument."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self._called = called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._called()
        return next(
            x
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor) and x.is_floating_point()
        )


@final
class _Calls:
    """The calls of modules outside of the blocks in one forward.

    Attributes:
        sides: name of a module -> before or after the first call of a block; empty: it was not called.
        has_begun: a block was called.
        head: the module that was the first one to be called after the blocks; a part of one does not count.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.sides: dict[str, set[str]] = {name: set() for name in names}
        self.has_begun = False
        self.head: str | None = None
        self._is_over = False

    def of_block(self) -> None:
        self.has_begun, self.head, self._is_over = True, None, False

    def of_module(self, name: str, *, is_whole: bool) -> None:
        self.sides[name].add(LAST if self.has_begun else FIRST)
        if self.has_begun and not self._is_over:
            self._is_over, self.head = True, name if is_whole else None


def _observed_calls(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], modules: dict[str, nn.Module]
) -> _Calls | None:
    """Those of a forward of the model's `dummy_inputs` on the meta device, as far as it gets.

    Once the blocks are reached, modules that did not run before them run after them, if at all.
    """
    for inputs in _dummy_inputs(model):
        calls = _Calls(modules)
        _run_outline(model, blocks, calls, inputs)
        if calls.has_begun:
            return calls
    return None


def _dummy_inputs(model: nn.Module) -> list[dict[str, Tensor]]:
    try:
        dummy: Any = getattr(model, "dummy_inputs", None)
    except Exception:
        return []
    if not isinstance(dummy, dict) or not all(isinstance(x, Tensor) for x in dummy.values()):
        return []
    inputs = {str(name): value.to("meta") for name, value in dummy.items()}
    masked = dict(inputs)
    if "input_ids" in inputs:
        masked["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return [inputs, masked]


def _run_outline(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    calls: _Calls,
    inputs: dict[str, Tensor],
) -> None:
    memo: dict[int, Any] = {id(block): _Stub(calls.of_block) for _, block in blocks}
    outline = meta_copy(model, memo, skip={id(p) for _, b in blocks for p in b.parameters()})

    def watch(name: str, *, is_whole: bool) -> Callable[..., None]:
        return lambda *_: calls.of_module(name, is_whole=is_whole)

    for name in calls.sides:
        whole = outline.get_submodule(name)
        for inner in whole.modules():
            inner.register_forward_pre_hook(watch(name, is_whole=inner is whole))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), ShapesOnly():
            outline(**inputs)
    except Exception:  # after the blocks the stub's outputs may not fit; what was seen counts
        return


__all__ = ["FIRST", "LAST", "OuterModules", "find_surroundings"]
