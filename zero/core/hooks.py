"""Hooks on the modules and the graph: they see each use of a unit, and call the gatherer and the backward pass.

    forward    pre_forward  -> gather this unit, start the next one     post_forward -> drop
    backward   pre_backward -> gather this unit, start the previous one  gradients complete -> drop
               the inputs of a call have gradients -> those of the unit that are missing will not arrive

- A call begins with a module of the unit, or with an inner module when user code calls that one directly.
- pre_backward is a hook on the autograd nodes of a module's outputs.
- A forward during backward is a recompute (activation checkpointing), which may end early: it gathers units
  and never drops them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...ops.torch_internals import in_functorch, outside_of_functorch, tree_leaves, tree_map
from ...utils.replaying import is_replaying
from .backward_pass import BackwardPass
from .gather import Gatherer
from .unit import Unit

_PLAIN = (type(None), str, bytes, int, float, complex, type, nn.Module)


@final
class UnitHooks:
    """Owns the hooks on modules, and those that each forward puts on its outputs and inputs."""

    def __init__(
        self,
        units: Sequence[Unit],
        gatherer: Gatherer,
        backward: BackwardPass,
        *,
        gathers_all: bool,
    ) -> None:
        """Hook every module of `units` (root last).

        gathers_all: at the end of forward all units are gathered, also those that it did not call.
        """
        self._units = list(units)
        self._gatherer = gatherer
        self._backward = backward
        self._gathers_all = gathers_all
        # called without a graph, as inside of a checkpoint, which calls them again in backward
        self._without_graph: set[Unit] = set()
        self._pending_drop: Unit | None = None  # one of its modules returned, others may follow
        self._hooked: list[tuple[Unit, nn.Module, Any, RemovableHandle]] = []
        self._is_excluded = False
        self._hook_all()
        self.exclude_from_compile()

    def exclude_from_compile(self) -> None:
        """Keep torch.compile from tracing into the hooks, if it is loaded. Cheap; call before a forward.

        - torch.compile is not loaded here: that takes more than a second.
        - Code compiled for a module without these hooks must not run for one with them: guards are enabled.
        - Code that was compiled earlier has no such guard: torch._dynamo is reset. With a GPU a reset loads
          inductor, which takes a second, so there is none where nothing was compiled.
        - Ranks may load it at different times. So every hook keeps its place among those of a module: tensor
          slices send in hooks as well, and the order of messages must be the same on all ranks.
        """
        if self._is_excluded or "torch._dynamo" not in sys.modules:
            return
        self._is_excluded = True
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            if getattr(torch._dynamo.convert_frame, "FRAME_COUNTER", 1):
                torch._dynamo.reset()
        for unit, module, hook, handle in self._hooked:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks[handle.id] = _excluded_from_compile(unit, module, hook)

    def _hook_all(self) -> None:
        for unit in self._units:
            for module in unit.modules:
                self._hook(unit, module)
            for module in unit.inner_modules:
                self._hook_inner(unit, module)

    def _register(self, unit: Unit, module: nn.Module, before: Any, after: Any) -> None:
        first = module.register_forward_pre_hook(before, with_kwargs=True)
        last = module.register_forward_hook(after)
        self._hooked += [(unit, module, before, first), (unit, module, after, last)]

    def _hook_inner(self, unit: Unit, module: nn.Module) -> None:
        """Hook a submodule of a unit; the hooks act only when user code calls it directly."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._skips_hooks:
                return
            if unit.is_running:
                if unit.entry is module:
                    unit.depth += 1
            elif self._gatherer.in_backward:
                if not is_replaying():
                    unit.num_recomputes += 1
                self._gatherer.gather(unit)
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

        self._register(unit, module, before, after)

    def _hook(self, unit: Unit, module: nn.Module) -> None:
        is_last = module is unit.modules[-1]

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._pre_forward(unit, module, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return self._post_forward(unit, module, is_last, output)

        self._register(unit, module, before, after)

    def remove(self) -> None:
        """Remove the hooks on modules."""
        for *_, handle in self._hooked:
            handle.remove()
        self._hooked = []

    # -- forward ----------------------------------------------------------------------------------------

    @property
    def _skips_hooks(self) -> bool:
        """All units are gathered, and no backward follows: hooks have nothing to do."""
        return self._gatherer.holds_all and not torch.is_grad_enabled()

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        gatherer = self._gatherer
        if self._skips_hooks:
            return
        if in_functorch():
            # hooks see no gradients of a transform's tensors, and a gather writes to tensors it does not have
            unit.is_kept_until_update |= torch.is_grad_enabled()
            with outside_of_functorch():
                return self._pre_forward(unit, module, (), {})
        if not gatherer.in_backward:
            if (
                unit.is_root and module is unit.modules[0]
            ):  # the whole model; others are run inside of it
                gatherer.begin_forward()
                self._without_graph.clear()
            gatherer.note_use(unit)
            self._drop_pending(unit)
        gatherer.gather(unit)
        if unit.is_entry(module):
            gatherer.begin_call(unit)
            if gatherer.in_backward and not is_replaying():
                unit.num_recomputes += 1
        if not gatherer.in_backward:
            gatherer.start_next_of_forward(unit)
        if not unit.is_root:  # calls of the root end with the backward itself
            self._follow_inputs(unit, (args, kwargs))

    def _post_forward(self, unit: Unit, module: nn.Module, is_last: bool, output: Any) -> Any:
        """Drop what the call no longer needs. Returns the output with views of parameters copied."""
        if self._skips_hooks:
            return self._without_views(unit, output)
        if unit.is_entry(module):
            self._gatherer.end_call(unit)
        output = self._without_views(unit, output)
        needs_backward = torch.is_grad_enabled() and self._hook_outputs(unit, output)
        if self._gatherer.in_backward:
            return output
        if unit.is_root:
            if module is unit.modules[0] and not needs_backward:
                self._gatherer.drop_all()
            if module is unit.modules[0] and self._gathers_all:
                # in one order on every rank, before the messages of backward
                for other in self._units:
                    other.unshard()
        elif not (unit.is_kept_until_backward and needs_backward):
            if is_last:
                self._gatherer.drop(unit)
            else:
                self._pending_drop = unit
        return output

    def _drop_pending(self, entered: Unit) -> None:
        """Drop a unit whose last modules the pass skipped: ranks that called them have dropped it."""
        if not entered.is_root:
            if self._pending_drop is not None and self._pending_drop is not entered:
                self._gatherer.drop(self._pending_drop)
            self._pending_drop = None

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
            unit.is_kept_until_update = True
        return output

    # -- backward ---------------------------------------------------------------------------------------

    def _hook_outputs(self, unit: Unit, output: Any) -> bool:
        """Gather `unit` again when a gradient of `output` arrives. False: `output` gets no gradient."""
        tensors = tensors_in(output)
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn}
        if not tensors and not self._gatherer.in_backward and not unit.is_root:
            unit.is_kept_until_update = (
                True  # its results, and their gradients, do not pass through its output
            )

        def before_node(_: Any) -> None:
            self._pre_backward(unit)

        for node in nodes:
            node.register_prehook(before_node)
        return bool(nodes)

    def _pre_backward(self, unit: Unit) -> None:
        self._backward.on_output_grad()
        for needed in (self._units[-1], unit, *unit.used_units):  # any unit may use root parameters
            self._gatherer.gather(needed)
        self._gatherer.start_next_of_backward(unit)

    def _follow_inputs(self, unit: Unit, inputs: Any) -> None:
        """Hook the inputs of a call: backward has finished the call when all of them have gradients.

        Only then is it known that parameters which this rank did not use get no gradient. This must
        not wait for the end of backward: reductions on other ranks wait for it, and gathers on this rank wait
        for those ranks.
        """
        if not torch.is_grad_enabled():
            if not self._gatherer.in_backward:
                self._without_graph.add(unit)
            return
        tensors = [
            leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

        # a reentrant checkpoint runs nested graphs: neither shows the gradients that the other produces
        is_whole_graph = not self._gatherer.in_backward and unit not in self._without_graph
        arrived = [0, 0]  # in which backward, how many

        # one hook for each tensor: torch's multi-tensor hook keeps the nodes alive for ever
        def one_arrived(_: Tensor) -> None:
            if is_whole_graph:
                self._backward.on_call_done(unit)
            if arrived[0] != self._gatherer.num_backwards:
                arrived[:] = [self._gatherer.num_backwards, 0]
            arrived[1] += 1
            passed = arrived[1] == count and unit.is_complete
            if passed and unit.has_frozen and not unit.is_used_by_others:
                self._gatherer.drop(unit)

        count = len(tensors)
        for tensor in tensors:
            handle = tensor.register_hook(one_arrived)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # a parameter of another unit, or a tensor that user code keeps
                self._gatherer.remove_after_backward(handle)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in `value`, without the tensors inside modules and classes.

    Torch's pytree supports only registered containers. A tensor in another container would get no hook, and
    backward would use parameters that are not gathered. So this also looks into other objects.
    """
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    seen: set[int] = set()  # an object may refer to itself
    waiting = [value]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting += _values(leaf)
    return tensors


def _values(holder: Any) -> list[Any]:
    """The contents of a container that is not registered with pytree."""
    if isinstance(holder, Mapping):
        return list(holder.values())
    if isinstance(holder, list | tuple | set | frozenset):  # subclasses of them
        return list(holder)
    if is_dataclass(holder):  # with slots it has no __dict__
        return [getattr(holder, field.name, None) for field in fields(holder)]
    return list(getattr(holder, "__dict__", {}).values())


def _storage_of(tensor: Tensor) -> int:
    """The address of its storage; 0 for tensors without an ordinary storage (sparse, of vmap, ...)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _excluded_from_compile(unit: Unit, module: nn.Module, hook: Any) -> Any:
    """Wrap `hook` for torch.compile: it runs outside of every graph.

    A submodule of a gathered unit has nothing to gather. Its graph contains guards on that instead of a call;
    otherwise the graph would break at each such module. A recomputation in backward, where the unit is gathered
    and no call of it runs, takes the same graph.
    """
    outside = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    if unit.is_entry(module):
        return outside

    def inside(*args: Any) -> None:
        if not (torch.compiler.is_compiling() and unit.is_unsharded):
            outside(*args)

    return inside


__all__ = ["UnitHooks", "tensors_in"]
