"""The engine's five moments on a sharded model: build, backward begins, backward ends, reduce, publish."""

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
from .outside import WATCHED_FORWARDS, OutsideUse
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
        # backward meets the last block first; what holds the embeddings is complete last
        blocks_last_first = [entry for entry in self.trainable if not entry[0].is_root][::-1]
        roots = [entry for entry in self.trainable if entry[0].is_root]
        self._reduction = Reduction(
            [entry[2] for entry in blocks_last_first + roots],
            collectives,
            in_flight=REDUCTIONS_IN_FLIGHT if config.overlap_comm else 0,
            gathers=not policy.shards_optimizer,
        )
        self.memory = Memory(self.units, self._reduction.order, self._pool, collectives)
        self._is_open = False
        self._is_admitted = True  # the factor on this backward's gradients is known
        self._had_seen_backward = False  # before the backward that is open
        self._own_backward_begins: Callable[[], bool] = lambda: policy.shards_grads
        self._own_factor: Callable[[], float] = lambda: 1.0
        self._has_seen_backward = False  # since the engine last asked
        self._is_visited = False  # a backward that is not ours runs through the model
        self._hooks: list[tuple[Node, RemovableHandle]] = []
        self._watched = {True: 0, False: 0}  # forwards, of training and of evaluation
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
        kept = 0  # elements; what is used last in forward is used first in backward
        for unit in reversed(blocks):
            if 2 * kept > config.max_reuse_distance or kept > config.max_live_parameters:
                break
            unit.outlives_forward = True
            kept += unit.full_numel
        return Gatherer(
            self.units,
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
            max_live_numel=config.max_live_parameters,
            collectives=self.collectives,
            on_backward=self._visit,
            on_passed=self._passed,
        )

    def _hook_gradients(self) -> None:
        for unit, _, grads in self.trainable:
            for position in range(len(grads.params)):
                self._hook_gradient(unit, grads, position)

    def _hook_gradient(self, unit: Unit, grads: FlatGrads, position: int) -> None:
        """Take the gradient in slot `position` when it is complete and the script's own hooks have seen it.

        The hook is on autograd's node, not on the tensor: hooks of tensors run before it, whoever is first.
        """
        this = weakref.ref(self)

        def arrived(*_: Any) -> None:
            model = this()
            if model is not None:
                model._arrived(unit, grads, position)

        node = get_gradient_edge(
            grads.params[position]
        ).node  # torch drops the hooks of one nobody holds
        self._hooks.append((node, node.register_hook(arrived)))

    def _arrived(self, unit: Unit, grads: FlatGrads, position: int) -> None:
        if not (self._is_open and self._is_admitted):
            self._admit(grads.params[position])
        if grads.is_sent:  # late: it must not go into a buffer that is under way
            self._reduction.settle(grads)
        if grads.take(position):
            self._completed(unit)

    # -- forward and backward ---------------------------------------------------------------------------

    def forward_context(
        self, *, is_training: bool, is_compiled: bool
    ) -> AbstractContextManager[Any]:
        """Around a call of the module. The first ones are watched for parameters used outside of their unit."""
        self.end_own()
        self._check_unchanged()
        context = ExitStack()
        if self._gatherer is None:
            return context
        self._gatherer.shield()
        if self._diverges:
            context.enter_context(self.uneven_forwards())
        if self._watched[is_training] < WATCHED_FORWARDS and not (
            is_compiled or self._user_compiled
        ):
            self._watched[is_training] += 1
            context.enter_context(OutsideUse(self._gatherer, self._unit_of, self.units[-1]))
        return context

    def _check_unchanged(self) -> None:
        """What a script may change of a parameter after `initialize`, it has changed no more than that.

        Raises:
            UsageError: a dtype was changed, or a parameter that no optimizer updates was unfrozen.
        """
        flats = [(unit, flat) for unit in self.units for flat in unit.params]
        changed = [(unit, flat, at) for unit, flat in flats for at in flat.other_dtypes()]
        if changed:
            for unit, flat, _ in changed:
                self._hook_again(unit, flat)
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

    def _hook_again(self, unit: Unit, flat: FlatParams) -> None:
        """torch makes new autograd nodes for parameters whose dtype has changed."""
        for grads in unit.grads:
            if grads.index == flat.index:
                held = {id(node) for node, _ in self._hooks}
                for position, param in enumerate(grads.params):
                    if param.requires_grad and id(get_gradient_edge(param).node) not in held:
                        self._hook_gradient(unit, grads, position)

    @property
    def _user_compiled(self) -> bool:
        """The script compiled the model or a part of it: a mode around it would be compiled in."""
        return any(
            type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
            for module in self.units[-1].modules[0].modules()
        )

    def invite(self, param: nn.Parameter, module: nn.Module) -> bool:
        """Calls of `module` use `param` as well. False: the module is not one of this model's."""
        hosts = [unit for unit in self.units if any(module in m.modules() for m in unit.modules)]
        if hosts and self._gatherer is not None:
            self._gatherer.invite(self._unit_of[id(param)], hosts[0])
        return bool(hosts)

    @contextmanager
    def uneven_forwards(self) -> Iterator[None]:
        """Ranks may run unequal numbers of forwards inside, without backward. For all ranks."""
        if self._gatherer is None or self._gatherer.is_uneven:
            yield
            return
        self._gatherer.begin_uneven()
        try:
            yield
        finally:
            self._gatherer.end_uneven()

    def begin_backward(self, *, reduces: bool) -> None:
        """A backward is about to start. With `reduces` its gradients travel before it ends."""
        if self._gatherer is not None and self._gatherer.is_uneven:
            raise UsageError(
                "backward inside uneven_forwards(): ranks that run unequal numbers of forwards cannot reduce "
                "gradients together; leave the context first"
            )
        self.end_own()
        self._reduction.begin_backward(reduces=reduces)
        self._is_open = True
        self._is_admitted = True
        self._has_seen_backward = True
        if self._gatherer is not None:
            if self._diverges:
                self._gatherer.begin_uneven()
            self._gatherer.begin_backward()
            self._gatherer.backwards += 1

    def _visit(self) -> None:
        """A gradient has come to an output of the model. Not by engine.backward: who asks for what?

        loss.backward() of the script's own is to be reduced; torch.autograd.grad is not. With create_graph
        the graph that it makes needs whole parameters until the next update.
        """
        assert self._gatherer is not None
        if self._is_open or self._is_visited:
            return
        if torch.is_grad_enabled():
            self._gatherer.keeps_all = True
        elif self._brings_gradients():
            self._open_own()
            return
        self._is_visited = True
        self._gatherer.begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_visit)

    def _brings_gradients(self) -> bool:
        """The backward that is running is to leave gradients in parameters."""
        try:
            return any(torch._C._will_engine_execute_node(node) for node, _ in self._hooks)
        except (
            RuntimeError
        ):  # how torch answers where torch.autograd.grad was asked for some of them
            return False

    def _end_visit(self) -> None:
        assert self._gatherer is not None
        self._is_visited = False
        self.end_backward()
        self._gatherer.end_backward()

    def end_own(self) -> None:
        """End what a backward of the script's own left open, unless it is running: a checkpoint calls again."""
        if torch._C._current_graph_task_id() != -1 or not (self._is_open or self._is_visited):
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # buffers outlive an evaluation that ends it
            if self._is_visited:  # it raised
                self._end_visit()
            self.end_backward()

    def watch_own_backwards(self, begins: Callable[[], bool], factor: Callable[[], float]) -> None:
        """For loss.backward() by the script: what `begin_backward` is told, and the factor on its gradients.

        `factor` is asked at the first gradient, and may raise: then none is taken.
        """
        self._own_backward_begins, self._own_factor = begins, factor

    def _open_own(self) -> None:
        """The script called loss.backward() itself. Its end is not told: the next call of the engine ends it.

        autograd's callbacks come at the end of the innermost backward, and a reentrant checkpoint runs one of
        its own for each call. At stage 3 a hook on the model's output was in the outermost before.
        """
        before = self._has_seen_backward
        self.begin_backward(reduces=self._own_backward_begins())
        self._is_admitted, self._had_seen_backward = False, before
        if self._gatherer is not None and not self._is_visited:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _admit(self, param: nn.Parameter) -> None:
        """A gradient has come: whose backward is it, and what is it to be multiplied with?"""
        try:
            if not self._is_open:
                self._open_own()
            factor = self._own_factor()
        except BaseException:
            param.grad = None
            if self._is_open:  # the backward that has begun brings nothing
                self._close(self._reduction.end_without_reducing)
                self._has_seen_backward = self._had_seen_backward
            raise
        self._is_admitted = True
        self._reduction.scale_by(factor)

    def _completed(self, unit: Unit) -> None:
        if self._gatherer is not None and unit.is_complete:
            self._gatherer.after_grads(unit)
        if not self._diverges:  # there nobody waits for a reduction while others gather
            self._reduction.start_complete()

    def _passed(self, unit: Unit) -> None:
        """Backward is through with a call of `unit`: what no path leads to any more counts as complete."""
        if not self._is_open:  # torch.autograd.grad brings none
            return
        missing = [grads for grads in unit.grads if not grads.is_complete]
        if missing and not any(grads.expects_more() for grads in missing):
            for grads in missing:
                grads.expect_no_more()
            self._completed(unit)

    def end_backward(self) -> None:
        """Backward is over: reduce what is left, with zeros for what it never touched."""
        if self._is_open:
            self._close(self._reduction.end_backward)

    def abandon_backward(self) -> None:
        """Backward raised: what it left behind is dropped, so that the next one starts clean."""
        self._close(self._reduction.settle)
        if self._gatherer is not None:
            self._gatherer.begin_update()
        self.reset()

    def _close(self, end: Callable[[], None]) -> None:
        """No backward is open on return. `end` decides about its gradients."""
        self._is_open = False
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
        if self._is_open:
            self.abandon_backward()
        self.settle_reductions()
        self.reset()
        self._has_seen_backward = False

    def reduce_rest(self, *, also_held: bool) -> bool:
        """The gradients are all in the totals on return. False: some are held back.

        also_held: what backward passes left on the ranks is all that the step will get: reduce it as well.
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
        """Nothing of the gradients is under way on return."""
        self._reduction.settle()

    def before_update(self) -> None:
        """Gathered parameters are about to become stale."""
        if self._gatherer is not None:
            self._gatherer.begin_update()
        self.take_edits()

    def take_edits(self) -> None:
        """What the script wrote to parameters since the last update is from now on their value."""
        for unit in self.units:
            for flat in unit.params:
                flat.take_edits()

    def wait_published(self) -> None:
        """Parameters that stay whole are whole again on return."""
        for unit in self.units:
            for flat in unit.params:
                flat.wait()

    def reset(self) -> None:
        """Drop all gradients: the step is done, or skipped."""
        self._reduction.reset()

    def detach(self) -> None:
        """Take every hook off the user's model; its parameters stay where they are, whole."""
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._gatherer is not None:
            self._gatherer.remove()
            for unit in self.units:
                unit.unshard()

    @property
    def has_seen_backward(self) -> bool:
        """A backward has run since `forget_backward`."""
        return self._has_seen_backward

    def forget_backward(self) -> None:
        """The engine has counted the backward passes so far."""
        self._has_seen_backward = False

    @property
    def has_gradients(self) -> bool:
        """Gradients wait for a step."""
        self.settle_reductions()
        return any(g.has_local or g.reduced() is not None for g in self._reduction.order)
