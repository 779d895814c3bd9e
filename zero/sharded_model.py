"""The engine's five moments on a sharded model: build, backward begins, backward ends, reduce, publish.

Reductions start in one fixed order that every rank knows (construction order reversed, the root unit last),
each as soon as it and all before it are complete; what a backward never touched contributes zeros at its
end. So ranks whose graphs differ send the same messages, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..compression.reducer import GradientReducer
from ..ops.collectives import Collectives
from ..ops.errors import UsageError
from ..ops.pool import BufferPool
from .config import ZeroConfig
from .discover import UnitPlan, find_units
from .flat_grads import FlatGrads
from .flat_params import FlatParams
from .gather import Gatherer
from .layout import Entry, plan_flat
from .outside import WATCHED_FORWARDS, OutsideUse
from .owners import find_owner
from .policy import Policy
from .unit import Unit

REDUCTIONS_IN_FLIGHT = (
    2  # one on the wire while the one before it is summed; 0 without overlap_comm
)


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
        self._groups = groups
        self._reducer = reducer
        self._pool = BufferPool()
        self._numbers = 0
        blocks, root = find_units(model, config.units, config.unit_min_numel)
        for buffer in model.buffers():
            collectives.broadcast(buffer.data)
        self.units = [self._build(plan, is_root=False) for plan in blocks]
        self.units.append(self._build(root, is_root=True))
        self.units = [unit for unit in self.units if unit.params or unit.is_root]
        self.trainable = [
            (unit, params, grads)
            for unit in self.units
            for params, grads in zip(unit.params, unit.grads, strict=False)
        ]
        # backward meets the last block first; what holds the embeddings is complete last
        blocks_last_first = [entry for entry in self.trainable if not entry[0].is_root][::-1]
        roots = [entry for entry in self.trainable if entry[0].is_root]
        self._reduce_order = [entry[2] for entry in blocks_last_first + roots]
        self._next = 0
        self._depth = REDUCTIONS_IN_FLIGHT if config.overlap_comm else 0
        self._in_flight: list[FlatGrads] = []
        self._is_open = False
        self._reduces = True
        self.has_seen_backward = False  # since the engine last asked
        self._hooks: list[RemovableHandle] = []
        self._watched = {True: 0, False: 0}  # forwards, of training and of evaluation
        self._unit_of = {
            id(param): unit for unit in self.units for flat in unit.params for param in flat.params
        }
        self._gatherer = self._build_gatherer(config) if policy.shards_params else None
        self._diverges = config.divergent_graphs and self._gatherer is not None
        self._hook_gradients()

    # -- building ---------------------------------------------------------------------------------------

    def _build(self, plan: UnitPlan, *, is_root: bool) -> Unit:
        unit = Unit(plan.name, plan.modules, is_root)
        kinds: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        for name, param in plan.params:
            trains = id(param) in self._groups
            dtype = self.policy.param_dtype(param.dtype)
            kinds.setdefault((trains, dtype), []).append((name, param))
        for (trains, dtype), entries in sorted(kinds.items(), key=lambda kind: not kind[0][0]):
            if trains or self.policy.shards_params:
                self._add_flat(unit, entries, dtype, trains)
            else:
                for _, param in entries:
                    param.data = param.data.to(dtype)
                    self.collectives.broadcast(param.data)
        return unit

    def _add_flat(
        self,
        unit: Unit,
        entries: Sequence[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        trains: bool,
    ) -> None:
        by_name = dict(entries)
        layout = plan_flat(
            [Entry(name, tuple(p.shape), self._groups.get(id(p), 0)) for name, p in entries],
            self.collectives.world_size,
        )
        ordered = [by_name[slot.name] for slot in layout.slots]
        index = self._numbers
        self._numbers += 1
        frozen = "" if trains else " (frozen)"
        self.collectives.name_buffer(
            index, (f"unit '{unit.name}'" if unit.name else "the root unit") + frozen
        )
        params = FlatParams(
            layout,
            ordered,
            dtype,
            self.collectives,
            index=index,
            is_sharded=self.policy.shards_params,
        )
        unit.params.append(params)
        if trains:
            unit.grads.append(
                FlatGrads(
                    layout, ordered, self.policy, self.collectives, self._reducer, self._pool, index
                )
            )

    def _build_gatherer(self, config: ZeroConfig) -> Gatherer:
        for unit in self.units:
            if unit.full_numel <= config.param_persistence_threshold:
                for flat in unit.params:
                    flat.keep_gathered()
                    flat.gather()
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
            on_backward=self._open_if_closed,
            on_passed=self._passed,
        )

    def _hook_gradients(self) -> None:
        for unit, _, grads in self.trainable:
            arrived = self._make_arrival(unit)
            for position, param in enumerate(grads.params):
                hook = grads.make_hook(position, arrived)
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _make_arrival(self, unit: Unit) -> Any:
        def arrived(grads: FlatGrads) -> None:
            if not self._is_open:
                self._open_if_closed()
            grads.remaining -= 1
            if grads.remaining == 0:
                self._completed(unit)

        return arrived

    # -- forward and backward ---------------------------------------------------------------------------

    def forward_context(
        self, *, is_training: bool, is_compiled: bool
    ) -> AbstractContextManager[Any]:
        """Around a call of the module. The first ones are watched for parameters used outside of their unit."""
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
        self.settle_reductions()  # gradients may be written again only where nothing is being sent
        self._is_open = True
        self.has_seen_backward = True
        self._reduces = reduces
        self._next = 0
        for grads in self._reduce_order:
            grads.begin_backward(hold=not reduces)
        if self._gatherer is not None:
            if self._diverges:
                self._gatherer.begin_uneven()
            self._gatherer.in_backward = True
            self._gatherer.backwards += 1

    def _open_if_closed(self) -> None:
        """The user called loss.backward() himself: the engine's end is queued behind it."""
        if not self._is_open:
            self.begin_backward(reduces=self.policy.shards_grads)
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _completed(self, unit: Unit) -> None:
        if self._gatherer is not None and unit.is_complete:
            self._gatherer.after_grads(unit)
        if self._reduces and not self._diverges:  # nobody waits for a reduction while others gather
            while self._next < len(self._reduce_order):
                grads = self._reduce_order[self._next]
                if grads.remaining > 0:
                    return
                self._start_reduce(grads)
                self._next += 1

    def _passed(self, unit: Unit) -> None:
        """Backward is through with a call of `unit`: what no path leads to any more counts as complete."""
        missing = [grads for grads in unit.grads if grads.remaining > 0]
        if missing and not any(grads.expects_more() for grads in missing):
            for grads in missing:
                grads.remaining = 0
            self._completed(unit)

    def _start_reduce(self, grads: FlatGrads) -> None:
        grads.start_reduce()
        self._in_flight.append(grads)
        if len(self._in_flight) > self._depth:
            self._finish_reduce(self._in_flight.pop(0))

    def _finish_reduce(self, grads: FlatGrads) -> None:
        grads.finish_reduce()
        if not self.policy.shards_optimizer:
            grads.start_gather()

    def end_backward(self) -> None:
        """Backward is over: reduce what is left, with zeros for what it never touched."""
        if not self._is_open:
            return
        self._is_open = False
        if self._diverges and self._gatherer is not None:
            self._gatherer.end_uneven()
        if self._reduces:
            for grads in self._reduce_order[self._next :]:
                self._start_reduce(grads)
            self._next = len(self._reduce_order)
        else:
            for grads in self._reduce_order:
                grads.collect()
        if self._gatherer is not None:
            self._gatherer.in_backward = False
            self._gatherer.drop_all()

    def abandon_backward(self) -> None:
        """Backward raised: what it left behind is dropped, so that the next one starts clean."""
        self._is_open = False
        if self._diverges and self._gatherer is not None:
            self._gatherer.end_uneven()
        self.settle_reductions()
        if self._gatherer is not None:
            self._gatherer.in_backward = False
            self._gatherer.drop_all()
        self.reset()

    # -- step -------------------------------------------------------------------------------------------

    def finish_reduction(self) -> float:
        """Every gradient is summed over the ranks on return, also what `no_sync` held back.

        Returns:
            the squared 2-norm of the sums over all parameters, fp64, the same on every rank; inf or nan on
            overflow. Partial sums of the ranks' shards are added in rank order. Beside the gradients it
            sends 8 bytes a rank to each peer where shards are apart.
        """
        if self._is_open:  # a loss.backward() of the user's own that raised half-way
            self.end_backward()
        if any(grads.has_local for grads in self._reduce_order):
            self.settle_reductions()
            for grads in self._reduce_order:
                self._start_reduce(grads)
        total = torch.zeros(
            self.collectives.world_size, dtype=torch.float64, device=self.collectives.device
        )
        self._drain_reductions()
        for grads in self._reduce_order:  # a norm is read while the next buffer is on its way
            grads.finish_gather()
            total += grads.square_sums()
        if not all(grads.sees_all for grads in self._reduce_order):
            total = self.collectives.gather_small(total).sum(0)
        return float(sum(total.tolist()))

    def _drain_reductions(self) -> None:
        while self._in_flight:
            self._finish_reduce(self._in_flight.pop(0))

    def settle_reductions(self) -> None:
        """Nothing of the gradients is under way on return."""
        self._drain_reductions()
        for grads in self._reduce_order:
            grads.finish_gather()

    def before_update(self) -> None:
        """Gathered parameters are about to become stale."""
        if self._gatherer is not None:
            self._gatherer.drop_all()

    def wait_published(self) -> None:
        """Parameters that stay whole are whole again on return."""
        for unit in self.units:
            for flat in unit.params:
                flat.wait()

    def reset(self) -> None:
        """Drop all gradients: the step is done, or skipped."""
        for grads in self._reduce_order:
            grads.reset()

    def detach(self) -> None:
        """Take every hook off the user's model; its parameters stay where they are, whole."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._gatherer is not None:
            self._gatherer.remove()
            for unit in self.units:
                unit.gather()

    @property
    def has_gradients(self) -> bool:
        """Gradients wait for a step."""
        self.settle_reductions()
        return any(g.has_local or g.reduced() is not None for g in self._reduce_order)

    def release_gradients(self) -> None:
        """Let go of all buffers of gradients; the next backward makes them again."""
        for grads in self._reduce_order:
            grads.release()
        self._pool.clear()

    def param_tensors(self) -> list[Tensor]:
        """The memory that parameters are kept in: shards, and buffers that are whole."""
        flats = [flat for unit in self.units for flat in unit.params]
        return [flat.shard for flat in flats] + [flat.raw for flat in flats]

    def hide_whole_params(self, hides: bool) -> None:
        """With `hides` parameters show NaN until `show_whole_params`."""
        for unit in self.units if hides else []:
            for flat in unit.params:
                flat.hide()

    def show_whole_params(self) -> None:
        """End `hide_whole_params`."""
        for unit in self.units:
            for flat in unit.params:
                flat.show()

    def state_bytes(self) -> dict[str, int]:
        """Bytes this rank holds: parameters, gradients, and the buckets that units pass around."""
        params = sum(
            f.shard.numel() * f.shard.element_size() if f.is_sharded else f.full_bytes
            for unit in self.units
            for f in unit.params
        )
        gathered = sum(
            f.full_bytes
            for unit in self.units
            for f in unit.params
            if f.is_sharded and f.raw.untyped_storage().nbytes()
        )
        return {
            "param": params,
            "grad": sum(grads.held_bytes for grads in self._reduce_order),
            "buckets": self._pool.allocated_bytes + gathered + self.collectives.scratch_bytes,
        }


def move_model(model: nn.Module, device: torch.device) -> None:
    """Parameters and buffers to `device`, in place; those that are kept in slices lie there already."""
    for param in model.parameters():
        if find_owner(param) is None:
            param.data = param.data.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def check_model(model: nn.Module, groups: Mapping[int, int], *, must_train: bool = True) -> None:
    """Before anything is moved or allocated: can this model be trained?

    Raises:
        UsageError: parameters without values, of unsupported dtype, of another engine, on several devices,
            or none to train; all complaints at once.
    """
    problems: list[str] = []
    for name, param in model.named_parameters():
        if param.is_meta:
            problems.append(f"{name} is on the meta device: give it values before initialize")
        elif param.dtype.is_complex:
            problems.append(f"{name} is {param.dtype}: complex parameters are not supported")
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        if any(hook.__module__ == FlatGrads.__module__ for hook in hooks.values()):
            problems.append(
                f"{name} already belongs to another engine: call destroy() on that engine first, or "
                "give this one a model of its own"
            )
    if must_train and not any(id(p) in groups and p.numel() for p in model.parameters()):
        problems.append(
            "the model has no trainable parameter: set requires_grad on at least one, "
            "and pass it in model_parameters"
        )
    devices = {str(param.device) for param in model.parameters() if find_owner(param) is None}
    if len(devices) > 1:
        problems.append(f"parameters lie on {sorted(devices)}: move the model to one device")
    if problems:
        shown = problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else [])
        raise UsageError("; ".join(shown))
