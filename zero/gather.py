"""Stage 3: gathers a unit's parameters before they are used and drops them after.

    forward    pre_forward  -> gather this unit, start the next one     post_forward -> drop
    backward   pre_backward -> gather this unit, start the previous one  gradients complete -> drop

Use decides what is gathered; the order of the pass before is a hint for what to start early, nothing more.
pre_backward is a hook on the autograd nodes of a module's outputs. During backward a forward is a recompute
(activation checkpointing), possibly left early: it gathers, and never drops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .tensors import tensors_in
from .unit import Unit

Shield = Callable[[Unit, nn.Module, Any], Any]  # (unit, module, hook) -> hook


@final
class Gatherer:
    """The hooks of stage 3. `in_backward` is set by whoever drives the backward pass."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        prefetch_numel: int,
        max_live_numel: int,
        on_backward: Callable[[], None],
        on_passed: Callable[[Unit], None],
    ) -> None:
        """Hook every module of `units` (root last).

        Args:
            prefetch_numel: a unit of at most so many elements is gathered ahead of its use.
            max_live_numel: nothing is gathered ahead while more elements than this would be live.
            on_backward: called when an output's gradient arrives, before anything is gathered.
            on_passed: called when a unit's inputs have their gradients: backward is through with this call.
        """
        self.in_backward = False
        self._units = list(units)
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._on_backward = on_backward
        self._on_passed = on_passed
        self._hidden: set[Unit] = set()  # called without a graph: a checkpoint will run it again
        self._order: list[Unit] = []  # units in the order of first use, this pass
        self._previous: list[Unit] = []  # the same, the pass before
        self._left: Unit | None = None  # one of its modules returned, others may follow
        self._handles: list[RemovableHandle] = []
        self._is_shielded = False
        self._hook_all(lambda unit, module, hook: hook)
        self.shield()

    def shield(self) -> None:
        """Keep torch.compile from tracing into the hooks, once it is loaded. Cheap; call before a forward.

        Loading it costs more than a second, so nobody who does not compile pays for it. Code compiled for
        a module without these hooks must not serve one with them, hence the guard; what was compiled
        before has no such guard, hence the reset.
        """
        if self._is_shielded or "torch._dynamo" not in sys.modules:
            return
        self._is_shielded = True
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            torch._dynamo.reset()
        self.remove()
        self._hook_all(_shielded)

    def _hook_all(self, shielded: Shield) -> None:
        for unit in self._units:
            for module in unit.modules:
                self._hook(unit, module, shielded)

    def _hook(self, unit: Unit, module: nn.Module, shielded: Shield) -> None:
        is_last = module is unit.modules[-1]

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._pre_forward(unit, module, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> None:
            self._post_forward(unit, module, is_last, output)

        self._handles += [
            module.register_forward_pre_hook(shielded(unit, module, before), with_kwargs=True),
            module.register_forward_hook(shielded(unit, module, after)),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def drop_all(self) -> None:
        """End what is under way and drop everything that may be dropped."""
        for unit in self._units:
            unit.drop()

    # -- forward ----------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.in_backward:
            if unit.is_root and module is unit.modules[0]:
                self._previous, self._order = self._order, []
                self._hidden.clear()
            if unit not in self._order:
                self._order.append(unit)
            self._drop_left(unit)
        unit.gather()
        if _is_entry(unit, module):
            unit.is_running = True
        if not self.in_backward:
            self._start_next(self._previous, unit)
        if not unit.is_root:
            self._follow_inputs(unit, (args, kwargs))

    def _post_forward(self, unit: Unit, module: nn.Module, is_last: bool, output: Any) -> None:
        if _is_entry(unit, module):
            unit.is_running = False
        needs_backward = torch.is_grad_enabled() and self._hook_outputs(unit, output)
        if self.in_backward:
            return
        if unit.is_root:
            if module is unit.modules[0] and not needs_backward:
                self.drop_all()
        elif not (unit.outlives_forward and needs_backward):
            if is_last:
                unit.drop()
            else:
                self._left = unit

    def _drop_left(self, entered: Unit) -> None:
        """A pass may skip the last modules of a unit; ranks that did not skip them have dropped it."""
        if not entered.is_root:
            if self._left is not None and self._left is not entered:
                self._left.drop()
            self._left = None

    def _start_next(self, order: Sequence[Unit], unit: Unit) -> None:
        """Start the first unit after `unit` in `order` that is not there yet, if the limits allow it."""
        for at, candidate in enumerate(order[:-1]):
            if candidate is unit:
                following = order[at + 1]
                live = sum(
                    u.full_numel for u in self._units if any(f.is_gathered for f in u.params)
                )
                if (
                    following.full_numel <= self._prefetch_numel
                    and live + following.full_numel <= self._max_live_numel
                ):
                    following.start_gather()
                return

    # -- backward ---------------------------------------------------------------------------------------

    def _hook_outputs(self, unit: Unit, output: Any) -> bool:
        """Gather `unit` again as soon as a gradient of `output` arrives. False: none ever will."""
        nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn}

        def before_node(_: Any) -> None:
            self._pre_backward(unit)

        for node in nodes:
            node.register_prehook(before_node)
        return bool(nodes)

    def _pre_backward(self, unit: Unit) -> None:
        self._on_backward()
        unit.gather()
        self._start_next(self._order[::-1], unit)

    def after_grads(self, unit: Unit) -> None:
        """All gradients of `unit` are there: with frozen parameters some of it may still be in use."""
        if not unit.has_frozen and not unit.is_root:
            unit.drop()

    def _follow_inputs(self, unit: Unit, inputs: Any) -> None:
        """Backward has passed a call of `unit` when the gradients of its inputs are all there.

        Only there can be known that parameters which this rank did not use get no gradient. Reductions of
        other ranks wait for it, and gathers of this one for them, so it must not wait for backward's end.
        """
        if not torch.is_grad_enabled():
            if not self.in_backward:
                self._hidden.add(unit)
            return
        tensors = [
            leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

        # a reentrant checkpoint runs graphs inside of graphs: neither knows what the other will bring
        is_whole_graph = not self.in_backward and unit not in self._hidden

        def passed(_: Any) -> None:
            if is_whole_graph:
                self._on_passed(unit)
            if unit.has_frozen and unit.is_complete:
                unit.drop()

        if tensors:
            register_multi_grad_hook(tensors, passed)


def _is_entry(unit: Unit, module: nn.Module) -> bool:
    """Calls of `unit` begin with this module; the root's others are called inside of the model."""
    return not unit.is_root or module is unit.modules[0]


def _shielded(unit: Unit, module: nn.Module, hook: Any) -> Any:
    """`hook` as torch.compile may meet it: run outside of every graph.

    A module inside of a running unit has nothing to gather. There a graph holds a guard on that one flag
    and no call, or it would break at each such module.
    """
    outside = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    if _is_entry(unit, module):
        return outside

    def inside(*args: Any) -> None:
        if not (unit.is_running and torch.compiler.is_compiling()):
            outside(*args)

    return inside
