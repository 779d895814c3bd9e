"""Stage 3: gathers a unit's parameters before they are used and drops them after.

    forward    pre_forward  -> gather this unit, start the next one     post_forward -> drop
    backward   pre_backward -> gather this unit, start the previous one  gradients complete -> drop

Use decides what is gathered; the order of the pass before is a hint for what to start early, nothing more.
A call begins with a module of the unit, or, when a script calls it directly, with one inside of them.
pre_backward is a hook on the autograd nodes of a module's outputs. During backward a forward is a recompute
(activation checkpointing), possibly left early: it gathers, and never drops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from ...ops.comm.collectives import Collectives
from .tensors import tensors_in
from .uneven import Rounds
from .unit import Unit

Shield = Callable[[Unit, nn.Module, Any], Any]  # (unit, module, hook) -> hook


@final
class Gatherer:
    """The hooks of stage 3. Whoever drives a backward pass calls `begin_backward`; `end_backward` ends it."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        prefetch_numel: int,
        max_live_numel: int,
        collectives: Collectives,
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
        self._in_backward = False
        self.backwards = 0  # how many have begun
        self._units = list(units)
        self._collectives = collectives
        self._rounds: Rounds | None = None
        self.running: list[Unit] = []  # units that are being called, the innermost last
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._on_backward = on_backward
        self._on_passed = on_passed
        self._hidden: set[Unit] = set()  # called without a graph: a checkpoint will run it again
        self._order: list[Unit] = []  # units in the order of first use, this pass
        self._previous: list[Unit] = []  # the same, the pass before
        self._left: Unit | None = None  # one of its modules returned, others may follow
        self.keeps_all = False  # nothing is dropped: a graph of create_graph needs whole parameters
        self._handles: list[RemovableHandle] = []
        self._leaf_handles: list[RemovableHandle] = []  # on tensors that outlive their step
        self._is_shielded = False
        self._hook_all(lambda unit, module, hook: hook)
        self.shield()

    def begin_backward(self) -> None:
        """A backward pass runs through the model from now on."""
        self._in_backward = True

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
            for module in unit.inner_modules:
                self._hook_inner(unit, module, shielded)

    def _hook_inner(self, unit: Unit, module: nn.Module, shielded: Shield) -> None:
        """A module inside of a unit: it has nothing to do unless a script calls it directly."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if unit.is_running:
                unit.depth += unit.entry is module
            elif self._in_backward:
                unit.num_recalls += 1
                self._gather(unit)
            else:
                unit.entry = module
                self._pre_forward(unit, module, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            if unit.entry is not module:
                return output
            if unit.depth:
                unit.depth -= 1
                return output
            output = self._post_forward(unit, module, True, output)
            unit.entry = None
            return output

        self._handles += [
            module.register_forward_pre_hook(shielded(unit, module, before), with_kwargs=True),
            module.register_forward_hook(shielded(unit, module, after)),
        ]

    def _hook(self, unit: Unit, module: nn.Module, shielded: Shield) -> None:
        is_last = module is unit.modules[-1]

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._pre_forward(unit, module, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return self._post_forward(unit, module, is_last, output)

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
        self.forget_calls()
        for unit in self._units:
            self._drop(unit)

    def end_backward(self) -> None:
        """A backward is over. With retain_graph another one may come over the same graph."""
        self._in_backward = False
        for unit in self._units:
            unit.num_recalls = 0
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles = []
        self.drop_all()

    def begin_update(self) -> None:
        """Parameters are about to change: no graph that was made so far will need a unit."""
        self.keeps_all = False
        for unit in self._units:
            unit.awaits_backward = False
        self.end_backward()

    def _drop(self, unit: Unit) -> None:
        if not self.keeps_all:
            unit.reshard()

    # -- forward ----------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._in_backward:
            if unit.is_root and module is unit.modules[0]:
                self._previous, self._order = self._order, []
                self._hidden.clear()
                self.forget_calls()
            if unit not in self._order:
                self._order.append(unit)
            self._drop_left(unit)
        self._gather(unit)
        if _is_entry(unit, module):
            self._enter(unit)
            unit.num_recalls += self._in_backward
        if not self._in_backward:
            self._start_next(self._previous, unit)
        if not unit.is_root:
            self._follow_inputs(unit, (args, kwargs))

    def _post_forward(self, unit: Unit, module: nn.Module, is_last: bool, output: Any) -> Any:
        """Drop what the call no longer needs. Returns the output, with copies for views of parameters."""
        if _is_entry(unit, module):
            self._leave(unit)
        output = self._without_views(unit, output)
        needs_backward = torch.is_grad_enabled() and self._hook_outputs(unit, output)
        if self._in_backward:
            return output
        if unit.is_root:
            if module is unit.modules[0] and not needs_backward:
                self.drop_all()
        elif not (unit.outlives_forward and needs_backward):
            if is_last:
                self._drop(unit)
            else:
                self._left = unit
        return output

    def _without_views(self, unit: Unit, output: Any) -> Any:
        """A view of a parameter would show memory that is gone once `unit` is dropped: a copy instead.

        Where the copy cannot be put into the output, `unit` stays whole until the update.
        """
        held = {
            flat.raw.untyped_storage().data_ptr() for flat in unit.params if flat.may_be_resharded
        }
        held.discard(0)

        def is_view(value: Any) -> bool:
            return isinstance(value, Tensor) and _storage_of(value) in held

        if not any(is_view(tensor) for tensor in tensors_in(output)):
            return output
        output = tree_map(lambda leaf: leaf.clone() if is_view(leaf) else leaf, output)
        if any(is_view(tensor) for tensor in tensors_in(output)):
            unit.awaits_backward = True
        return output

    def _gather(self, unit: Unit) -> None:
        if self._rounds is not None:
            self._rounds.want(unit)
        else:
            unit.unshard()

    def _enter(self, unit: Unit) -> None:
        unit.is_running = True
        self.running.append(unit)
        for guest in unit.guests:
            self._gather(guest)
            guest.pins += 1

    def _leave(self, unit: Unit) -> None:
        unit.is_running = False
        if unit in self.running:
            self.running.remove(unit)
        for guest in unit.guests:
            guest.pins = max(guest.pins - 1, 0)
            if not self._in_backward and not guest.is_running:
                self._drop(guest)

    def forget_calls(self) -> None:
        self.running = []
        for unit in self._units:
            unit.forget_calls()

    def invite(self, guest: Unit, host: Unit) -> None:
        """Calls of `host` use parameters of `guest`: from now on, and for the one that is running."""
        if guest is host or guest in host.guests:
            return
        host.guests.append(guest)
        guest.is_guest = True
        self._gather(guest)
        if host in self.running:
            guest.pins += 1

    def begin_uneven(self) -> None:
        """From now on ranks may run unequal numbers of forwards. A collective, as is the end."""
        self.drop_all()
        self._rounds = Rounds(self._units, self._collectives)

    def end_uneven(self) -> None:
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.finish()
        self.drop_all()

    @property
    def is_uneven(self) -> bool:
        return self._rounds is not None

    def _drop_left(self, entered: Unit) -> None:
        """A pass may skip the last modules of a unit; ranks that did not skip them have dropped it."""
        if not entered.is_root:
            if self._left is not None and self._left is not entered:
                self._drop(self._left)
            self._left = None

    def _start_next(self, order: Sequence[Unit], unit: Unit) -> None:
        """Start the first unit after `unit` in `order` that is not there yet, if the limits allow it."""
        if self._rounds is not None:
            return
        for at, candidate in enumerate(order[:-1]):
            if candidate is unit:
                following = order[at + 1]
                live = sum(
                    u.full_numel for u in self._units if any(f.is_unsharded for f in u.params)
                )
                if (
                    following.full_numel <= self._prefetch_numel
                    and live + following.full_numel <= self._max_live_numel
                ):
                    following.start_unshard()
                return

    # -- backward ---------------------------------------------------------------------------------------

    def _hook_outputs(self, unit: Unit, output: Any) -> bool:
        """Gather `unit` again as soon as a gradient of `output` arrives. False: none ever will."""
        tensors = tensors_in(output)
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn}
        if not tensors and not self._in_backward and not unit.is_root:
            unit.awaits_backward = (
                True  # what it computed left by another way, and comes back by it
            )

        def before_node(_: Any) -> None:
            self._pre_backward(unit)

        for node in nodes:
            node.register_prehook(before_node)
        return bool(nodes)

    def _pre_backward(self, unit: Unit) -> None:
        self._on_backward()
        for needed in (self._units[-1], unit, *unit.guests):  # the root's may be inputs of any unit
            self._gather(needed)
        self._start_next(self._order[::-1], unit)

    def after_grads(self, unit: Unit) -> None:
        """All gradients of `unit` are there, and no call of it can be on its way back.

        With frozen parameters one may be; and where reentrant checkpoints call it more than once in this
        backward, for each of them knows its own call alone.
        """
        if not unit.has_frozen and not unit.is_root and unit.num_recalls < 2:
            self._drop(unit)

    def _follow_inputs(self, unit: Unit, inputs: Any) -> None:
        """Backward has passed a call of `unit` when the gradients of its inputs are all there.

        Only there can be known that parameters which this rank did not use get no gradient. Reductions of
        other ranks wait for it, and gathers of this one for them, so it must not wait for backward's end.
        """
        if not torch.is_grad_enabled():
            if not self._in_backward:
                self._hidden.add(unit)
            return
        tensors = [
            leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

        # a reentrant checkpoint runs graphs inside of graphs: neither knows what the other will bring
        is_whole_graph = not self._in_backward and unit not in self._hidden
        arrived = [0, 0]  # in which backward, how many

        # each tensor's own hook: torch's hook over several holds their nodes, which then never go away
        def one_arrived(_: Tensor) -> None:
            if is_whole_graph:
                self._on_passed(unit)
            if arrived[0] != self.backwards:
                arrived[:] = [self.backwards, 0]
            arrived[1] += 1
            passed = arrived[1] == count and unit.is_complete
            if passed and unit.has_frozen and not unit.is_guest:
                self._drop(unit)

        count = len(tensors)
        for tensor in tensors:
            handle = tensor.register_hook(one_arrived)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # a parameter of another unit, or a tensor that the script keeps
                self._leaf_handles.append(handle)


def _storage_of(tensor: Tensor) -> int:
    """Where its memory begins; 0 for tensors that have none of the usual kind (sparse, of vmap, ...)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _is_entry(unit: Unit, module: nn.Module) -> bool:
    """Calls of `unit` begin with this module; the root's others are called inside of the model."""
    return module is unit.entry or (
        module is unit.modules[0] if unit.is_root else module in unit.modules
    )


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
