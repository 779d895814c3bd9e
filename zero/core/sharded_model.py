"""The sharded model: builds and hooks the units, and drives them through forward, backward and step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ...compression.reducer import GradientReducer
from ...ops.comm.collectives import Collectives
from ...ops.comm.pool import BufferPool
from ...utils.errors import UsageError
from ..config import ZeroConfig
from .building import Builder
from .flat_grads import FlatGrads
from .flat_params import FlatParams
from .gather import Gatherer
from .memory import Memory
from .outside import CHECKED_FORWARDS, OutsideUse
from .policy import Policy
from .reduction import REDUCTIONS_IN_FLIGHT, Reduction
from .unit import Unit


@final
class ShardedModel:
    """Owns the model states of `model` that are parameters or gradients, and every hook on it."""

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[int, int],
        policy: Policy,
        config: ZeroConfig,
        collectives: Collectives,
        reducer: GradientReducer,
    ) -> None:
        """Move the parameters of `model`, which passed `check_model`, into flat buffers and hook them.

        Args:
            groups: id(parameter) -> index of its hyperparameter group, for every trainable parameter that
                the optimizer is to update. Parameters that are not in it are treated as frozen.
        """
        self.policy = policy
        self.collectives = collectives
        self._pool = BufferPool()
        self.units = Builder(groups, policy, collectives, reducer, self._pool).build(model, config)
        self.trainable = [
            (unit, params, grads)
            for unit in self.units
            for params, grads in zip(unit.params, unit.grads, strict=False)
        ]
        # backward reaches the last block first; the root, which holds the embeddings, is complete last
        blocks_last_first = [entry for entry in self.trainable if not entry[0].is_root][::-1]
        roots = [entry for entry in self.trainable if entry[0].is_root]
        self._reduction = Reduction(
            [entry[2] for entry in blocks_last_first + roots],
            collectives,
            in_flight=REDUCTIONS_IN_FLIGHT if config.overlap_comm else 0,
            gathers=not policy.shards_optimizer,
        )
        self.memory = Memory(self.units, self._reduction.order, self._pool, collectives)
        self._in_backward = False
        self._has_factor = True  # the factor on this backward's gradients is known
        self._had_seen_backward = False  # before the backward that is running
        self._script_backward_begins: Callable[[], bool] = lambda: policy.shards_grads
        self._script_factor: Callable[[], float] = lambda: 1.0
        self._has_seen_backward = False  # since `clear_seen_backward`
        self._in_other_backward = False  # a backward runs that leaves no gradients in parameters
        self._hooks: list[tuple[Node, RemovableHandle]] = []
        self._num_checked = {True: 0, False: 0}  # forwards, of training and of evaluation
        self._unit_of = {
            id(param): unit for unit in self.units for flat in unit.params for param in flat.params
        }
        self._gatherer = self._build_gatherer(config) if policy.shards_params else None
        self._diverges = config.divergent_graphs and self._gatherer is not None
        self._frozen = [
            (name, param, param.dtype)
            for name, param in model.named_parameters()
            if id(param) not in groups and not param.requires_grad
        ]
        self._hook_gradients()

    # -- hooks ------------------------------------------------------------------------------------------

    def _build_gatherer(self, config: ZeroConfig) -> Gatherer:
        for unit in self.units:
            if unit.full_numel <= config.param_persistence_threshold:
                for flat in unit.params:
                    flat.keep_gathered()
                    flat.unshard()
        blocks = [unit for unit in self.units if not unit.is_root]
        kept = 0  # elements; the units used last in forward are used first in backward
        for unit in reversed(blocks):
            if 2 * kept > config.max_reuse_distance or kept > config.max_live_parameters:
                break
            unit.keep_until_backward()
            kept += unit.full_numel
        return Gatherer(
            self.units,
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
            max_live_numel=config.max_live_parameters,
            collectives=self.collectives,
            on_backward=self._on_output_grad,
            on_call_done=self._call_done,
        )

    def _hook_gradients(self) -> None:
        for unit, _, grads in self.trainable:
            for position in range(len(grads.params)):
                self._hook_gradient(unit, grads, position)

    def _hook_gradient(self, unit: Unit, grads: FlatGrads, position: int) -> None:
        """Take the gradient in slot `position` after the script's own hooks have run.

        The hook is on the autograd node, not on the tensor: hooks of tensors always run before it.
        """
        this = weakref.ref(self)

        def arrived(*_: Any) -> None:
            model = this()
            if model is not None:
                model._on_grad(unit, grads, position)

        # keep a reference to the node: torch drops the hooks of a node without references
        node = get_gradient_edge(grads.params[position]).node
        self._hooks.append((node, node.register_hook(arrived)))

    def _on_grad(self, unit: Unit, grads: FlatGrads, position: int) -> None:
        if not (self._in_backward and self._has_factor):
            self._on_first_grad(grads.params[position])
        if grads.is_sent:  # late: it must not be written into a buffer that is being sent
            self._reduction.settle(grads)
        if grads.add_grad(position):
            self._completed(unit)

    # -- forward and backward ---------------------------------------------------------------------------

    def forward_context(
        self, *, is_training: bool, is_compiled: bool
    ) -> AbstractContextManager[Any]:
        """Around a call of the module. The first ones look for parameters used outside of their unit."""
        self.end_script_backward()
        self._check_unchanged()
        context = ExitStack()
        if self._gatherer is None:
            return context
        self._gatherer.exclude_from_compile()
        if self._diverges:
            context.enter_context(self.uneven_forwards())
        if self._num_checked[is_training] < CHECKED_FORWARDS and not (
            is_compiled or self._user_compiled
        ):
            self._num_checked[is_training] += 1
            context.enter_context(OutsideUse(self._gatherer, self._unit_of, self.units[-1]))
        return context

    def _check_unchanged(self) -> None:
        """Check that the script has not changed dtypes or unfrozen parameters after `initialize`.

        Raises:
            UsageError: a dtype was changed, or a parameter that no optimizer updates was unfrozen.
        """
        flats = [(unit, flat) for unit in self.units for flat in unit.params]
        changed = [(unit, flat, at) for unit, flat in flats for at in flat.other_dtypes()]
        if changed:
            for unit, flat, _ in changed:
                self._restore_hooks(unit, flat)
            for _, param, dtype in self._frozen:
                param.data = param.data.to(dtype)
            _, flat, at = changed[0]
            raise UsageError(
                f"{flat.layout.slots[at].name} and {len(changed) - 1} more parameters changed their dtype "
                f"after xds.initialize (module.float(), .half(), .to(dtype)): the engine computes in "
                f"{flat.dtype}, and they are {flat.dtype} again; choose the precision by fp16, bf16 or "
                "torch_autocast in the config"
            )
        for name, param, _ in self._frozen:
            if param.requires_grad:
                raise UsageError(
                    f"{name}.requires_grad_(True) after xds.initialize: it was frozen there, so the engine "
                    "keeps no gradient and no optimizer state for it; leave it trainable in xds.initialize and "
                    "freeze it afterwards (that may be undone), or engine.destroy() and initialize again"
                )

    def _restore_hooks(self, unit: Unit, flat: FlatParams) -> None:
        """Hook the new autograd nodes that torch makes for parameters whose dtype has changed."""
        for grads in unit.grads:
            if grads.index == flat.index:
                held = {id(node) for node, _ in self._hooks}
                for position, param in enumerate(grads.params):
                    if param.requires_grad and id(get_gradient_edge(param).node) not in held:
                        self._hook_gradient(unit, grads, position)

    @property
    def _user_compiled(self) -> bool:
        """The script compiled the model or a part of it: torch would compile a mode around it as well."""
        return any(
            type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
            for module in self.units[-1].modules[0].modules()
        )

    def register_use(self, param: nn.Parameter, module: nn.Module) -> bool:
        """Gather `param` for calls of `module` as well. False: `module` is not part of this model."""
        users = [unit for unit in self.units if any(module in m.modules() for m in unit.modules)]
        if users and self._gatherer is not None:
            self._gatherer.register_use(self._unit_of[id(param)], users[0])
        return bool(users)

    @contextmanager
    def uneven_forwards(self) -> Iterator[None]:
        """Inside, ranks may run unequal numbers of forwards, without backward. For all ranks."""
        if self._gatherer is None or self._gatherer.is_uneven:
            yield
            return
        self._gatherer.begin_uneven()
        try:
            yield
        finally:
            self._gatherer.end_uneven()

    def begin_backward(self, *, reduces: bool) -> None:
        """A backward is about to start. With `reduces` its gradients are reduced before it ends."""
        if self._gatherer is not None and self._gatherer.is_uneven:
            raise UsageError(
                "backward inside uneven_forwards(): ranks that run unequal numbers of forwards cannot reduce "
                "gradients together; leave the context first"
            )
        self.end_script_backward()
        self._reduction.begin_backward(reduces=reduces)
        self._in_backward = True
        self._has_factor = True
        self._has_seen_backward = True
        if self._gatherer is not None:
            if self._diverges:
                self._gatherer.begin_uneven()
            self._gatherer.begin_backward(is_own=True)

    def _on_output_grad(self) -> None:
        """A gradient has arrived at an output of the model, possibly of a backward that the script started.

        - The gradients of a loss.backward() are reduced; those of torch.autograd.grad are not.
        - With create_graph the new graph needs full parameters until the next update.
        """
        assert self._gatherer is not None
        if self._in_backward or self._in_other_backward:
            return
        if torch.is_grad_enabled():
            self._gatherer.keep_all()
        elif self._brings_gradients():
            self._begin_script_backward()
            return
        self._in_other_backward = True
        self._gatherer.begin_backward(is_own=False)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_other_backward)

    def _brings_gradients(self) -> bool:
        """The running backward leaves gradients in parameters."""
        try:
            return any(torch._C._will_engine_execute_node(node) for node, _ in self._hooks)
        except RuntimeError:  # torch raises it if torch.autograd.grad computes some of them
            return False

    def _end_other_backward(self) -> None:
        assert self._gatherer is not None
        self._in_other_backward = False
        self.end_backward()
        self._gatherer.end_backward()

    def end_script_backward(self) -> None:
        """End a backward that the script started, unless it is still running (a checkpoint's recompute)."""
        if torch._C._current_graph_task_id() != -1 or not (
            self._in_backward or self._in_other_backward
        ):
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # buffers outlive an evaluation that ends it
            if self._in_other_backward:  # it raised
                self._end_other_backward()
            self.end_backward()

    def set_script_backward_callbacks(
        self, begins: Callable[[], bool], factor: Callable[[], float]
    ) -> None:
        """For loss.backward() by the script: its argument of `begin_backward`, and the gradient factor.

        `factor` is called at the first gradient. If it raises, no gradient is taken.
        """
        self._script_backward_begins, self._script_factor = begins, factor

    def _begin_script_backward(self) -> None:
        """The script called loss.backward() itself. The next call of the engine ends this backward.

        Callbacks of autograd cannot end it: they run at the end of the innermost backward, and a reentrant
        checkpoint runs a nested one for each call. At stage 3 they can: the hook on the model's output has
        already run in the outermost backward.
        """
        before = self._has_seen_backward
        self.begin_backward(reduces=self._script_backward_begins())
        self._has_factor, self._had_seen_backward = False, before
        if self._gatherer is not None and not self._in_other_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _on_first_grad(self, param: nn.Parameter) -> None:
        """The first gradient has arrived: begin the script's backward if none runs, and set the factor."""
        try:
            if not self._in_backward:
                self._begin_script_backward()
            factor = self._script_factor()
        except BaseException:
            param.grad = None
            if self._in_backward:  # no gradient of this backward is taken
                self._close(self._reduction.end_without_reducing)
                self._has_seen_backward = self._had_seen_backward
            raise
        self._has_factor = True
        self._reduction.scale_by(factor)

    def _completed(self, unit: Unit) -> None:
        if self._gatherer is not None and unit.is_complete:
            self._gatherer.after_grads(unit)
        if not self._diverges:  # there no rank waits for a reduction while others gather
            self._reduction.start_complete()

    def _call_done(self, unit: Unit) -> None:
        """Backward has finished a call of `unit`: gradients that cannot arrive any more are complete."""
        if not self._in_backward:  # torch.autograd.grad leaves no gradients
            return
        missing = [grads for grads in unit.grads if not grads.is_complete]
        if missing and not any(grads.expects_more() for grads in missing):
            for grads in missing:
                grads.expect_no_more()
            self._completed(unit)

    def end_backward(self) -> None:
        """Backward is over: reduce the rest, with zeros for parameters that it did not use."""
        if self._in_backward:
            self._close(self._reduction.end_backward)

    def abandon_backward(self) -> None:
        """Backward raised: drop its gradients, so that the next one starts from zero."""
        self._close(self._reduction.settle)
        if self._gatherer is not None:
            self._gatherer.begin_update()
        self.reset()

    def _close(self, end: Callable[[], None]) -> None:
        """End the running backward; `end` reduces or drops its gradients."""
        self._in_backward = False
        if self._diverges and self._gatherer is not None:
            self._gatherer.end_uneven()  # first: this rank serves those whose backward goes on
        end()
        if self._gatherer is not None:
            self._gatherer.end_backward()

    # -- step -------------------------------------------------------------------------------------------

    def finish_reduction(self) -> float:
        """Every gradient is summed over the ranks on return. See `Reduction.finish`."""
        self.end_backward()  # a loss.backward() of the script's own
        return self._reduction.finish()

    def drop_gradients(self) -> None:
        """Drop all gradients, at any time outside of a backward."""
        if self._in_backward:
            self.abandon_backward()
        self.settle_reductions()
        self.reset()
        self._has_seen_backward = False

    def reduce_rest(self, *, also_held: bool) -> bool:
        """Reduce all gradients into the totals. False: some are held back without reduction.

        also_held: reduce gradients that were held back as well: the step will get no others.
        """
        self.end_backward()
        if also_held:
            self._reduction.reduce_held()
        self._reduction.settle()
        if self._reduction.holds:
            return False
        self._reduction.reduce_late()
        return True

    def settle_reductions(self) -> None:
        """Wait for all reductions in flight."""
        self._reduction.settle()

    def before_update(self) -> None:
        """Gathered parameters are about to become stale."""
        if self._gatherer is not None:
            self._gatherer.begin_update()
        self.take_edits()

    def take_edits(self) -> None:
        """Make the script's writes to parameters since the last update their values."""
        for unit in self.units:
            for flat in unit.params:
                flat.take_edits()

    def wait_published(self) -> None:
        """Wait until the parameters that stay gathered are gathered again."""
        for unit in self.units:
            for flat in unit.params:
                flat.wait()

    def reset(self) -> None:
        """Drop all gradients: the step is done, or skipped."""
        self._reduction.reset()

    def detach(self) -> None:
        """Remove every hook from the user's model; its parameters stay in the flat buffers, gathered."""
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._gatherer is not None:
            self._gatherer.remove()
            for unit in self.units:
                unit.unshard()

    @property
    def has_seen_backward(self) -> bool:
        """A backward has run since `clear_seen_backward`."""
        return self._has_seen_backward

    def clear_seen_backward(self) -> None:
        """The engine has counted the backward passes until now."""
        self._has_seen_backward = False

    @property
    def has_gradients(self) -> bool:
        """Some gradients have not been used by a step yet."""
        self.settle_reductions()
        return any(g.has_local or g.reduced() is not None for g in self._reduction.order)
