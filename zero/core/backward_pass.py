"""Backward passes: who started the running one, when it ends, and what happens to its gradients.

engine.backward(loss)    begin ──gradients──> end          all of it known beforehand
loss.backward()          the first gradient, or the gradient of an output, begins it; the next call of
                         the engine ends it (at stage 3 autograd does)
torch.autograd.grad      leaves no gradients in parameters: nothing is reduced
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ...ops.torch_internals import after_backward, in_backward, will_execute
from ...utils.errors import UsageError
from .arrivals import Added
from .gather import Gatherer
from .grad_bucket import GradBucket
from .reduction import Reduction, Scope
from .unit import Unit

IN_ROLLOUT = (
    "{} inside engine.generating(): its forwards have no gradients, and its parameters are those of before; "
    "leave the context first"
)


@final
class ManualGradGuard:
    """Refuses `.grad` that user code sets after backward. It costs about 0.1 us for each parameter."""

    def __init__(self, order: Sequence[GradBucket]) -> None:
        self._params = tuple(param for grads in order for param in grads.params)
        self._names = tuple(slot.name for grads in order for slot in grads.layout.slots)
        self._shown: frozenset[int] = frozenset()

    def allow(self, shown: Iterable[Tensor]) -> None:
        """These may be in `.grad`. Who put them there takes them out before the next backward."""
        self._shown = frozenset(id(grad) for grad in shown)

    def take_out_allowed(self) -> None:
        """No `.grad` holds what `allow` named: another engine would add to it."""
        for param in self._params:
            if param.grad is not None and id(param.grad) in self._shown:
                param.grad = None
        self._shown = frozenset()

    def clear(self) -> None:
        """Drop what user code has put into `.grad`."""
        self._shown = frozenset()
        for param in self._params:
            param.grad = None

    def refuse(self, arrived: nn.Parameter | None = None) -> None:
        """Check that every `.grad` is None, except that of `arrived`. Call it where all gradients are taken.

        Raises:
            UsageError: some are not. They are None again, and the engine's gradients are untouched.
        """
        if arrived is not None and self._shown:
            raise UsageError(
                "loss.backward() after engine.backward(loss) in one step: gradients of the step are in .grad; "
                "call engine.backward for each loss of the step"
            )
        positions = [
            position
            for position, param in enumerate(self._params)
            if param.grad is not None and id(param.grad) not in self._shown
        ]
        refused = [position for position in positions if self._params[position] is not arrived]
        if not refused:
            return
        for position in refused:
            self._params[position].grad = None
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        name = self._names[refused[0]]
        raise UsageError(
            f"{name}.grad{more} was set after backward, but the engine has taken the gradients: "
            "it would not count, and is None again; to change them call xds.zero.set_full_grad, "
            "engine.clip_grad_norm or engine.zero_grad"
        )


class ScriptBackward(NamedTuple):
    """What a backward that user code has started is for; see `BackwardPass.begin`."""

    reduces: bool
    ends_step: bool


class BackwardRules(ABC):
    """Decides about a backward that user code starts, loss.backward(). It is asked at the first gradient."""

    @abstractmethod
    def begin_script_backward(self) -> ScriptBackward:
        """Such a backward begins. If this raises, none of its gradients is taken."""

    @abstractmethod
    def script_factor(self) -> float:
        """The factor on its gradients. If this raises, none of them is taken."""


@final
class PlainRules(BackwardRules):
    """Each backward is a micro-batch, and its gradients count as they are."""

    def __init__(self, *, reduces: bool) -> None:
        self._reduces = reduces

    def begin_script_backward(self) -> ScriptBackward:
        return ScriptBackward(self._reduces, ends_step=False)

    def script_factor(self) -> float:
        return 1.0


@final
class BackwardPass:
    """Takes the gradients of backward passes. Owns the hooks on gradients and the state of the running pass.

    It calls downward: the gatherer for parameters, the buckets for gradients, the reduction for messages.
    """

    def __init__(
        self,
        trainable: Sequence[tuple[Unit, GradBucket]],
        reduction: Reduction,
        gatherer: Gatherer | None,
        *,
        shards_grads: bool,
        diverges: bool,
    ) -> None:
        """
        Args:
            gatherer: gathers units that are sharded or not up to date; None: there are none.
            diverges: ranks may run different units.
        """
        self.has_seen_one = False  # since `clear_seen`
        self._rules: BackwardRules = PlainRules(reduces=shards_grads)
        self._trainable = trainable
        self._slots = {
            id(param): (bucket, position)
            for _, bucket in trainable
            for position, param in enumerate(bucket.params)
        }
        self._reduction = reduction
        self._diverges = diverges
        self._gatherer = gatherer
        self._is_running = False
        self._has_factor = True  # the factor on this backward's gradients is known
        self._had_seen_one = False  # before the backward that is running
        self._in_autograd_grad = (
            False  # a torch.autograd.grad runs, which leaves no gradients in parameters
        )
        self.manual_grads = ManualGradGuard(reduction.order)
        # get no gradients in the backwards that follow, the same on all ranks
        self.left_out: frozenset[GradBucket] = frozenset()
        self._hooks: list[tuple[Node, RemovableHandle]] = []

    def ask(self, rules: BackwardRules) -> None:
        """Let `rules` decide about backwards that user code starts. Until then each is a micro-batch."""
        self._rules = rules

    # -- begin and end ----------------------------------------------------------------------------------

    def begin(
        self,
        *,
        reduces: bool,
        ends_step: bool = False,
        scope: Scope | None = None,
        has_factor: bool = True,
    ) -> None:
        """A backward is about to start. With `reduces` its gradients are reduced before it ends.

        Args:
            ends_step, scope: see `Reduction.begin_backward`.
            has_factor: the factor on its gradients is known; else the rules are asked at the first one.
        """
        if self._gatherer is not None and self._gatherer.is_uneven:
            raise UsageError(
                "backward inside uneven_forwards(): ranks that run unequal numbers of forwards cannot reduce "
                "gradients together; leave the context first"
            )
        if self._gatherer is not None and self._gatherer.refuses_backward:
            raise UsageError(IN_ROLLOUT.format("backward"))
        self.end_script_backward()
        # a lossy reducer counts its messages, so it sends each one
        without = frozenset() if self._reduction.is_lossy else self.left_out
        self._reduction.begin_backward(
            reduces=reduces, ends_step=ends_step, scope=scope, without=without
        )
        if has_factor:
            self._reduction.open()
        self._is_running = True
        self._has_factor = has_factor
        self.has_seen_one = True
        if self._gatherer is not None:
            if self._diverges:
                self._gatherer.begin_uneven()
            self._gatherer.begin_backward(is_own=True)

    def end(self) -> None:
        """Backward is over: reduce the rest, with zeros for parameters that it did not use."""
        if self._is_running:
            with self._closing():
                self._reduction.end_backward()

    def abandon(self) -> None:
        """Backward raised: drop its gradients, so that the next one starts from zero."""
        with self._closing():
            self._reduction.settle()
        if self._gatherer is not None:
            self._gatherer.begin_update()
        self._reduction.reset()

    def abandon_all(self) -> None:
        """Drop the gradients of all passes, without a wait: the group has failed."""
        self._is_running = False
        self._reduction.expect_no_more()
        self._reduction.abandon()
        if self._gatherer is not None:
            self._gatherer.abandon()
        self.manual_grads.clear()
        self.has_seen_one = False

    def end_script_backward(self) -> None:
        """End a backward that user code started, unless it is still running (a checkpoint's recompute)."""
        if in_backward() or not (self._is_running or self._in_autograd_grad):
            return
        # buffers outlive an evaluation that ends it
        with torch.inference_mode(False), torch.no_grad():
            if self._in_autograd_grad:  # it raised
                self._end_other()
            self.end()

    def end_checked(self) -> None:
        """End a backward that user code started. All gradients are taken on return.

        Raises:
            UsageError: user code has set some `.grad` since, which would not count. It is None again.
        """
        self.end_script_backward()
        if self._reduction.has_sums and not self._is_running:
            self.manual_grads.refuse()

    def clear_seen(self) -> None:
        """The engine has counted the backward passes until now."""
        self.has_seen_one = False

    def drop(self) -> None:
        """Drop the gradients of all passes, at any time outside of a backward."""
        if self._is_running:
            self.abandon()
        self._reduction.undo()
        self._reduction.reset()
        self.manual_grads.clear()
        self.has_seen_one = False

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Around the reduction or the drop of the gradients of the running backward, which ends."""
        self._is_running = False
        if self._diverges and self._gatherer is not None:
            self._gatherer.end_uneven()  # first: this rank serves those whose backward goes on
        self._reduction.expect_no_more()
        with torch.no_grad():
            yield
        if self._gatherer is not None:
            self._gatherer.end_backward()

    # -- gradients --------------------------------------------------------------------------------------

    def _hook_gradient(self, unit: Unit, bucket: GradBucket, position: int) -> None:
        """Take the gradient in slot `position` after user code's own hooks have run.

        The hook is on the autograd node, not on the tensor: hooks of tensors always run before it.
        """
        dropped = frozenset() if self._gatherer is None else self._gatherer.dropped_storages
        param = bucket.params[position]
        this, add_awaited = weakref.ref(self), bucket.arrivals.add_awaited

        def arrived(*_: object) -> None:
            # it runs for each parameter in each step; nearly always the next lines are all
            if dropped and param.grad is not None and _storage_id(param.grad) in dropped:
                param.grad = param.grad.clone()  # a view of a parameter, which may be dropped first
            added = add_awaited(position)
            if added is Added.NOT_READY:
                return
            running = this()
            if running is None:
                return
            if added is Added.READY:
                running._completed(unit)
            else:
                running._on_grad(unit, bucket, position)

        # keep a reference to the node: torch drops the hooks of a node without references
        node = get_gradient_edge(bucket.params[position]).node
        self._hooks.append((node, node.register_hook(arrived)))

    def hook_gradients(self) -> None:
        """Take gradients from now on.

        Called again where dtypes have changed: torch makes new autograd nodes for such parameters.
        """
        held = {id(node) for node, _ in self._hooks}
        for unit, bucket in self._trainable:
            for position, param in enumerate(bucket.params):
                if param.requires_grad and id(get_gradient_edge(param).node) not in held:
                    self._hook_gradient(unit, bucket, position)

    def remove_hooks(self) -> None:
        """Take no more gradients."""
        self.manual_grads.take_out_allowed()
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []

    @torch.no_grad()
    def _on_grad(self, unit: Unit, bucket: GradBucket, position: int) -> None:
        if not (self._is_running and self._has_factor):
            self._on_first_grad(bucket.params[position])
        added = bucket.add(position)
        if added is Added.LATE:
            self._reduction.settle_late(bucket)
            bucket.take(position)
        elif added is Added.READY:
            self._completed(unit)

    @property
    def trained(self) -> list[GradBucket]:
        """The gradients of all units that are trained."""
        return [bucket for _, bucket in self._trainable]

    def add_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add `grad` to the sum of `param`, as if autograd had brought it at the end of the last backward.

        That backward should hold its gradients back: what is sent already is reduced a second time. A
        parameter that the optimizer does not update is ignored.

        Args:
            grad: [shape of `param`], with the factor of the loss.

        Raises:
            UsageError: a backward is running.
        """
        self.end_script_backward()
        if self._is_running:
            raise UsageError(
                "add_gradient inside a backward: its buffer may be on its way to other ranks; "
                "call it after the backward"
            )
        if id(param) in self._slots:
            bucket, position = self._slots[id(param)]
            if not bucket.takes_gradients:
                self._reduction.settle_late(bucket)
            bucket.add_by_call(position, grad)

    def _on_first_grad(self, param: nn.Parameter) -> None:
        """The first gradient has arrived: begin user code's backward if none runs, and set the factor."""
        # sums that arrive meanwhile are those of earlier backwards: this gradient is not one of theirs
        grad, param.grad = param.grad, None
        try:
            if not self._is_running:
                self._begin_script_backward(param)
            factor = self._rules.script_factor()
        except BaseException:
            if self._is_running:  # no gradient of this backward is taken
                with self._closing():
                    self._reduction.end_without_reducing()
                self.has_seen_one = self._had_seen_one
            raise
        self._has_factor, param.grad = True, grad
        self._reduction.scale_by(factor)
        self._reduction.open()

    def _completed(self, unit: Unit) -> None:
        if torch.is_grad_enabled():  # with create_graph
            with torch.no_grad():
                self._completed(unit)
            return
        if self._gatherer is not None and unit.is_complete:
            self._gatherer.after_grads(unit)
        if not self._diverges:  # there no rank waits for a reduction while others gather
            self._reduction.start_complete()

    def on_call_done(self, unit: Unit) -> None:
        """Backward has finished a call of `unit`, because its inputs have their gradients.

        Gradients of the unit that cannot arrive any more are complete.
        """
        if not self._is_running:  # torch.autograd.grad leaves no gradients
            return
        missing = [bucket for bucket in unit.grads if not bucket.arrivals.is_complete]
        if missing and not any(bucket.arrivals.expects_more() for bucket in missing):
            for bucket in missing:
                bucket.arrivals.expect_no_more()
            self._completed(unit)

    # -- passes that user code starts ------------------------------------------------------------------

    def on_output_grad(self) -> None:
        """A gradient has arrived at an output of some unit; before anything is gathered for it.

        It may be one of a backward that user code started.

        - The gradients of a loss.backward() are reduced; those of torch.autograd.grad are not.
        - With create_graph the new graph needs full parameters until the next update.
        """
        assert self._gatherer is not None
        if self._is_running or self._in_autograd_grad:
            return
        if torch.is_grad_enabled():
            self._gatherer.keep_all()
        elif self._computes_gradients():
            self._begin_script_backward()
            return
        self._in_autograd_grad = True
        self._gatherer.begin_backward(is_own=False)
        after_backward(self._end_other)

    def _computes_gradients(self) -> bool:
        """The running backward leaves gradients in parameters."""
        try:
            return any(will_execute(node) for node, _ in self._hooks)
        except RuntimeError:  # torch raises it if torch.autograd.grad computes some of them
            return False

    def _end_other(self) -> None:
        assert self._gatherer is not None
        self._in_autograd_grad = False
        self.end()
        self._gatherer.end_backward()

    def _begin_script_backward(self, arrived: nn.Parameter | None = None) -> None:
        """User code called loss.backward() itself. The next call of the engine ends this backward.

        Callbacks of autograd cannot end it: they run at the end of the innermost backward, and a reentrant
        checkpoint runs a nested one for each call. At stage 3 they can: the hook on the model's output has
        already run in the outermost backward.
        """
        before = self.has_seen_one
        if self._reduction.has_sums:
            self.manual_grads.refuse(arrived)
        reduces, ends_step = self._rules.begin_script_backward()
        self.begin(reduces=reduces, ends_step=ends_step, has_factor=False)
        self._had_seen_one = before
        if self._gatherer is not None and not self._in_autograd_grad:
            after_backward(self.end)


def _storage_id(tensor: Tensor) -> int:
    """Equal for tensors that share their memory; 0 for those without an ordinary storage (sparse)."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


__all__ = ["BackwardPass", "BackwardRules", "ScriptBackward", "ManualGradGuard"]
