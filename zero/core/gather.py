"""Stage 3: gathers a unit's parameters before their use and drops them afterwards.

    forward    pre_forward  -> gather this unit, start the next one     post_forward -> drop
    backward   pre_backward -> gather this unit, start the previous one  gradients complete -> drop

- A unit is gathered when it is used. The order of the previous pass only decides which unit is started early.
- A call begins with a module of the unit, or with an inner module when a script calls that one directly.
- pre_backward is a hook on the autograd nodes of a module's outputs.
- A forward during backward is a recompute (activation checkpointing), which may end early: it gathers units
  and never drops them.
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
from ...utils.replaying import is_replaying
from .tensors import tensors_in
from .uneven import Rounds
from .unit import Unit

HookWrapper = Callable[[Unit, nn.Module, Any], Any]  # (unit, module, hook) -> hook


@final
class Gatherer:
    """Owns the hooks of stage 3. The owner of a backward pass calls `begin_backward` and `end_backward`."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        prefetch_numel: int,
        max_live_numel: int,
        collectives: Collectives,
        on_backward: Callable[[], None],
        on_call_done: Callable[[Unit], None],
        gathers_all: bool,
    ) -> None:
        """Hook every module of `units` (root last).

        Args:
            prefetch_numel: units of at most this many elements are gathered ahead of their use.
            max_live_numel: no unit is gathered ahead if more elements than this would be in memory.
            on_backward: called when the gradient of an output arrives, before anything is gathered.
            on_call_done: called when a unit's inputs have their gradients: backward has finished this call.
            gathers_all: at the end of forward all units are gathered, also those that it did not call.
        """
        self._in_backward = False
        self._num_backwards = 0  # how many of the engine have begun
        self._units = list(units)
        self._collectives = collectives
        self._rounds: Rounds | None = None
        self.running: list[Unit] = []  # units that are being called, the innermost last
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._on_backward = on_backward
        self._on_call_done = on_call_done
        self._gathers_all = gathers_all
        # called without a graph, as inside of a checkpoint, which calls them again in backward
        self._without_graph: set[Unit] = set()
        self._order: list[Unit] = []  # units in the order of first use, this pass
        self._previous: list[Unit] = []  # the same of the previous pass
        self._pending_drop: Unit | None = None  # one of its modules returned, others may follow
        self._put_off: set[Unit] = (
            set()
        )  # not started here, while other ranks may have started them
        self._keeps_all = False  # nothing is dropped: a graph of create_graph needs full parameters
        self._handles: list[RemovableHandle] = []
        self._leaf_handles: list[RemovableHandle] = []  # on tensors that outlive their step
        self._is_excluded = False
        self._hook_all(lambda unit, module, hook: hook)
        self.exclude_from_compile()

    def begin_backward(self, *, is_own: bool) -> None:
        """A backward pass runs through the model from now on.

        is_own: it leaves gradients in parameters; False for torch.autograd.grad.
        """
        self._in_backward = True
        self._num_backwards += is_own

    def keep_all(self) -> None:
        """Drop nothing until the next update."""
        self._keeps_all = True

    def exclude_from_compile(self) -> None:
        """Keep torch.compile from tracing into the hooks, if it is loaded. Cheap; call before a forward.

        - torch.compile is not loaded here: that takes more than a second.
        - Code compiled for a module without these hooks must not run for one with them: guards are enabled.
        - Code that was compiled earlier has no such guard: torch._dynamo is reset. With a GPU a reset loads
          inductor, which takes a second, so there is none where nothing was compiled.
        """
        if self._is_excluded or "torch._dynamo" not in sys.modules:
            return
        self._is_excluded = True
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            if getattr(torch._dynamo.convert_frame, "FRAME_COUNTER", 1):
                torch._dynamo.reset()
        self.remove()
        self._hook_all(_excluded_from_compile)

    def _hook_all(self, wrap: HookWrapper) -> None:
        for unit in self._units:
            for module in unit.modules:
                self._hook(unit, module, wrap)
            for module in unit.inner_modules:
                self._hook_inner(unit, module, wrap)

    def _hook_inner(self, unit: Unit, module: nn.Module, wrap: HookWrapper) -> None:
        """Hook a submodule of a unit; the hooks act only when a script calls it directly."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if unit.is_running:
                if unit.entry is module:
                    unit.begin_nested_call()
            elif self._in_backward:
                if not is_replaying():
                    unit.count_recompute()
                self._gather(unit)
            else:
                unit.set_entry(module)
                self._pre_forward(unit, module, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            if unit.entry is not module:
                return output
            if unit.depth:
                unit.end_nested_call()
                return output
            output = self._post_forward(unit, module, True, output)
            unit.set_entry(None)
            return output

        self._handles += [
            module.register_forward_pre_hook(wrap(unit, module, before), with_kwargs=True),
            module.register_forward_hook(wrap(unit, module, after)),
        ]

    def _hook(self, unit: Unit, module: nn.Module, wrap: HookWrapper) -> None:
        is_last = module is unit.modules[-1]

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._pre_forward(unit, module, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return self._post_forward(unit, module, is_last, output)

        self._handles += [
            module.register_forward_pre_hook(wrap(unit, module, before), with_kwargs=True),
            module.register_forward_hook(wrap(unit, module, after)),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def drop_all(self) -> None:
        """End the gathers in flight and drop every unit that may be dropped."""
        self.clear_calls()
        for unit in self._units:  # one that was not used after all: those that have started it wait
            if unit in self._put_off:
                unit.start_unshard()
        self._put_off.clear()
        for unit in self._units:
            self._drop(unit)

    def end_backward(self) -> None:
        """A backward is over. With retain_graph another one may run over the same graph."""
        self._in_backward = False
        for unit in self._units:
            unit.clear_recomputes()
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles = []
        self.drop_all()

    def begin_update(self) -> None:
        """Parameters are about to change: no existing graph needs a unit any more."""
        self._keeps_all = False
        for unit in self._units:
            unit.begin_update()
        self.end_backward()

    def _drop(self, unit: Unit) -> None:
        if not self._keeps_all:
            unit.reshard()

    @property
    def order(self) -> Sequence[Unit]:
        """Units in the order of the last forward: a new list for each forward."""
        return self._order

    # -- forward ----------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._in_backward:
            if unit.is_root and module is unit.modules[0]:
                self._previous, self._order = self._order, []
                self._without_graph.clear()
                self.clear_calls()
            if unit not in self._order:
                self._order.append(unit)
            self._drop_pending(unit)
        self._gather(unit)
        if _is_entry(unit, module):
            self._enter(unit)
            if self._in_backward and not is_replaying():
                unit.count_recompute()
        if not self._in_backward:
            self._start_next(self._previous, unit)
        if not unit.is_root:
            self._follow_inputs(unit, (args, kwargs))

    def _post_forward(self, unit: Unit, module: nn.Module, is_last: bool, output: Any) -> Any:
        """Drop what the call no longer needs. Returns the output with views of parameters copied."""
        if _is_entry(unit, module):
            self._leave(unit)
        output = self._without_views(unit, output)
        needs_backward = torch.is_grad_enabled() and self._hook_outputs(unit, output)
        if self._in_backward:
            return output
        if unit.is_root:
            if module is unit.modules[0] and not needs_backward:
                self.drop_all()
            if module is unit.modules[0] and self._gathers_all:
                for (
                    other
                ) in self._units:  # in one order on every rank, before the messages of backward
                    other.unshard()
        elif not (unit.stays_until_backward and needs_backward):
            if is_last:
                self._drop(unit)
            else:
                self._pending_drop = unit
        return output

    def _without_views(self, unit: Unit, output: Any) -> Any:
        """Copy views of parameters in the output: dropping `unit` frees the memory that they refer to.

        If a copy cannot be put into the output, `unit` stays gathered until the update.
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
            unit.keep_until_update()
        return output

    def _gather(self, unit: Unit) -> None:
        if self._rounds is not None:
            self._rounds.gather(unit)
        else:
            unit.unshard()
        self._put_off.discard(unit)

    def _enter(self, unit: Unit) -> None:
        unit.begin_call()
        self.running.append(unit)
        for used in unit.used_units:
            self._gather(used)
            used.add_running_user()

    def _leave(self, unit: Unit) -> None:
        unit.end_call()
        if unit in self.running:
            self.running.remove(unit)
        for used in unit.used_units:
            used.remove_running_user()
            if not self._in_backward and not used.is_running:
                self._drop(used)

    def clear_calls(self) -> None:
        self.running = []
        for unit in self._units:
            unit.clear_calls()

    def register_use(self, used: Unit, user: Unit) -> None:
        """Gather `used` for calls of `user` as well: for the running one and for all later ones."""
        if used is user or used in user.used_units:
            return
        user.add_used_unit(used)
        self._gather(used)
        if user in self.running:
            used.add_running_user()

    def begin_uneven(self) -> None:
        """From now on ranks may run unequal numbers of forwards. A collective; so is `end_uneven`."""
        self.drop_all()
        self._rounds = Rounds(self._units, self._collectives)

    def end_uneven(self) -> None:
        """Serve the other ranks until every rank is done."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.finish()
        self.drop_all()

    @property
    def is_uneven(self) -> bool:
        return self._rounds is not None

    def _drop_pending(self, entered: Unit) -> None:
        """Drop a unit whose last modules the pass skipped: ranks that called them have dropped it."""
        if not entered.is_root:
            if self._pending_drop is not None and self._pending_drop is not entered:
                self._drop(self._pending_drop)
            self._pending_drop = None

    def _start_next(self, order: Sequence[Unit], unit: Unit) -> None:
        """Start to gather the unit after `unit` in `order`, if the limits allow it."""
        if self._rounds is not None:
            return
        for at, candidate in enumerate(order[:-1]):
            if candidate is unit:
                following = order[at + 1]
                live = sum(
                    u.most_numel for u in self._units if any(f.is_unsharded for f in u.params)
                )
                if (
                    following.most_numel <= self._prefetch_numel
                    and live + following.most_numel <= self._max_live_numel
                ):
                    if following.may_start:
                        following.start_unshard()
                    else:
                        self._put_off.add(following)
                return

    # -- backward ---------------------------------------------------------------------------------------

    def _hook_outputs(self, unit: Unit, output: Any) -> bool:
        """Gather `unit` again when a gradient of `output` arrives. False: `output` gets no gradient."""
        tensors = tensors_in(output)
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn}
        if not tensors and not self._in_backward and not unit.is_root:
            unit.keep_until_update()  # its results, and their gradients, do not pass through its output

        def before_node(_: Any) -> None:
            self._pre_backward(unit)

        for node in nodes:
            node.register_prehook(before_node)
        return bool(nodes)

    def _pre_backward(self, unit: Unit) -> None:
        self._on_backward()
        for needed in (self._units[-1], unit, *unit.used_units):  # any unit may use root parameters
            self._gather(needed)
        self._start_next(self._order[::-1], unit)

    def after_grads(self, unit: Unit) -> None:
        """Drop `unit`: all its gradients have arrived, and backward has finished all its calls.

        Complete gradients do not show the end of its calls in two cases: the unit has frozen parameters, or
        reentrant checkpoints call it more than once in this backward. Then it is not dropped here.
        """
        if not unit.has_frozen and not unit.is_root and unit.num_recomputes < 2:
            self._drop(unit)

    def _follow_inputs(self, unit: Unit, inputs: Any) -> None:
        """Hook the inputs of a call: backward has finished the call when all of them have gradients.

        Only then is it known that parameters which this rank did not use get no gradient. This must
        not wait for the end of backward: reductions on other ranks wait for it, and gathers on this rank wait
        for those ranks.
        """
        if not torch.is_grad_enabled():
            if not self._in_backward:
                self._without_graph.add(unit)
            return
        tensors = [
            leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

        # a reentrant checkpoint runs nested graphs: neither shows the gradients that the other produces
        is_whole_graph = not self._in_backward and unit not in self._without_graph
        arrived = [0, 0]  # in which backward, how many

        # one hook for each tensor: torch's multi-tensor hook keeps the nodes alive for ever
        def one_arrived(_: Tensor) -> None:
            if is_whole_graph:
                self._on_call_done(unit)
            if arrived[0] != self._num_backwards:
                arrived[:] = [self._num_backwards, 0]
            arrived[1] += 1
            passed = arrived[1] == count and unit.is_complete
            if passed and unit.has_frozen and not unit.is_used_by_others:
                self._drop(unit)

        count = len(tensors)
        for tensor in tensors:
            handle = tensor.register_hook(one_arrived)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # a parameter of another unit, or a tensor that the script keeps
                self._leaf_handles.append(handle)


def _storage_of(tensor: Tensor) -> int:
    """The address of its storage; 0 for tensors without an ordinary storage (sparse, of vmap, ...)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _is_entry(unit: Unit, module: nn.Module) -> bool:
    """Calls of `unit` begin with this module; other modules of the root run inside the model's call."""
    return module is unit.entry or (
        module is unit.modules[0] if unit.is_root else module in unit.modules
    )


def _excluded_from_compile(unit: Unit, module: nn.Module, hook: Any) -> Any:
    """Wrap `hook` for torch.compile: it runs outside of every graph.

    A submodule of a gathered unit has nothing to gather. Its graph contains guards on that instead of a call;
    otherwise the graph would break at each such module. A recomputation in backward, where the unit is gathered
    and no call of it runs, takes the same graph.
    """
    outside = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    if _is_entry(unit, module):
        return outside

    def inside(*args: Any) -> None:
        if not (torch.compiler.is_compiling() and unit.is_unsharded):
            outside(*args)

    return inside
