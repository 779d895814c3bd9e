"""The order of one step on one rank: what is computed, and where messages start and are waited for.

The real objects of the rank run it: the hooks of units gather and drop, gradients that arrive start
reductions, masters publish. Their collectives send nothing and write to a journal. The blocks compute nothing:
each one is a stub that notes that it runs, and that gives a gradient to each of its parameters.

    Update(..) Start(0) Wait(0) | Start(1) Wait(1) Start(2) Run("blocks.0") Wait(2) Run("blocks.1") ...
    Run("blocks.1", backward) Start(3) Run("blocks.0", backward) Wait(3) ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.fake import Journal, backend_of
from ...pipe.schedules.actions import COMPUTE, Action, Op
from ...zero.model.sharded_model import ShardedModel
from ...zero.model.stage_units import StageUnits
from ...zero.model.update import Updater
from ..model.forwards import Forward, replace_forwards
from .work import KernelWatch

OUTSIDE = ""  # the name of what runs before the first block
HEAD = "head"  # of what runs after the last one, where a stage has that alone


class Run(NamedTuple):
    """A block computes; what follows it, up to the next block, belongs to it.

    share: of the work; a half where the gradients of inputs and of weights are apart.
    is_again: in a backward, the block alone.
    """

    name: str
    is_backward: bool
    share: float = 1.0
    is_again: bool = False


class Update(NamedTuple):
    """A buffer is updated. size_bytes: read and written. copied_bytes: of new values, to the device.

    is_awaited: before the next forward begins; else before its values are gathered.
    """

    size_bytes: int
    is_on_host: bool
    is_on_disk: bool
    is_awaited: bool
    copied_bytes: int


class Sums(NamedTuple):
    """Gradients of `size_bytes` are copied to the host, beside the computation."""

    size_bytes: int


Event = object  # Run, Update, Sums, Kernels, Action of a pipeline, Start, Wait
Trace = tuple[Event, ...]


@final
@dataclass(frozen=True)
class Block:
    """A block of this rank, by the name in the whole model, and its virtual stage."""

    name: str
    stage: int
    module: nn.Module


@final
class Tracer:
    """Runs the steps of one rank on the meta device, and writes down the last one."""

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[Block],
        sharded: ShardedModel,
        updater: Updater,
        opened: Sequence[Collectives],
        stages: Sequence[int] = (0,),
        head_stage: int | None = None,
    ) -> None:
        """stages: of this rank. head_stage: the one of them that runs what is after all blocks, alone."""
        self._root, self._blocks = root, blocks
        self._first_stage, self._head_stage = min(stages), head_stage
        self._sharded, self._updater = sharded, updater
        self._backends = [backend_of(group) for group in (*opened, sharded.collectives)]
        self._journal = Journal()
        place = {id(grads): number for number, grads in enumerate(sharded.reduction.order)}
        self._masters = sorted(updater.masters, key=lambda master: place[id(master.grads)])

    def micro_batches(self, count: int, *, recomputes: bool) -> Trace:
        """A step of `count` micro-batches without a pipeline. Equal ones in the middle run once."""
        with self._noting() as journal, self._stubs(recomputes=recomputes):
            self._micro_batch(is_last=True)  # the first forward does not know the order yet
            self._finish()
            journal.events.clear()
            self._update()
            distinct: list[list[Event]] = [journal.events]
            for number in range(min(count, 3)):
                journal.events = []
                distinct.append(journal.events)
                self._micro_batch(is_last=number == min(count, 3) - 1)
            journal.events = []
            distinct.append(journal.events)
            self._finish()
        middle = distinct[2] * (count - 3) if count > 3 else []
        first, rest = distinct[:3], distinct[3:]
        return tuple(chain(*first, middle, *rest))

    def row(self, row: Sequence[Action], units: StageUnits, *, recomputes: bool) -> Trace:
        """The same for the actions of a pipeline rank.

        Where a stage sends nothing between its first and its last micro-batch, those between its second and its
        last one do the same as the second, and do not run.
        """
        gathers = self._sharded.policy.shards_params
        like: dict[Action, Action] = {}
        extra: set[Action] = set()
        if units.holds_all or not gathers:
            like, extra = _repeated(row, gathers=gathers)
        with self._noting() as journal, self._stubs(recomputes=recomputes):
            for is_noted in (False, True):
                journal.events.clear()
                if is_noted:
                    self._update()
                seen: dict[Action, list[Event]] = {}
                acted = row if is_noted else [action for action in row if action not in extra]
                for place, action in enumerate(acted):
                    if action in like:
                        journal.events += [action, *map(copy, seen[like[action]])]
                        continue
                    first = len(journal.events) + 1
                    self._act(action, units, acted[place + 1 :])
                    seen[action] = list(map(copy, journal.events[first:]))
                units.release_all()
                units.reduce_root()
                self._finish()
        return tuple(journal.events)

    # -- one step ---------------------------------------------------------------------------------------

    def _micro_batch(self, *, is_last: bool) -> None:
        sharded = self._sharded
        reduces = is_last or sharded.reduces_each_backward
        sharded.check_unchanged()
        out = self._root(*self._inputs())
        sharded.backward_pass.begin(reduces=reduces, ends_step=is_last)
        torch.autograd.backward(out, torch.empty_like(out))
        sharded.backward_pass.end()
        sharded.backward_pass.clear_seen()

    def _act(self, action: Action, units: StageUnits, rest: Sequence[Action]) -> None:
        op, stage = action.op, action.stage
        if op is Op.GATHER:
            units.hold(stage)
        elif op is Op.DROP:
            units.release(stage)
        elif op is Op.REDUCE:
            units.reduce(stage)
        if op not in COMPUTE:
            return
        self._journal.events.append(action)
        if op is Op.FORWARD:
            self._pending[action.micro_batch, stage] = self._forward_of(stage)
        elif op is Op.WEIGHT:
            names = [block.name for block in self._of_stage(stage)]
            names += [HEAD] if stage == self._head_stage else []
            self._journal.events += [Run(name, True, 0.5) for name in reversed(names)]
        else:
            following = next((a for a in rest if a.op in COMPUTE or a.op is Op.REDUCE), None)
            reduces = (
                following is not None and following.op is Op.REDUCE and following.stage == stage
            )
            self._share = 0.5 if op is Op.INPUT else 1.0
            backward = self._sharded.backward_pass
            scope = units.scope(stage, reduces=reduces and op is Op.BACKWARD)
            backward.begin(reduces=bool(scope.reduces), scope=scope)
            out = self._pending.pop((action.micro_batch, stage))
            torch.autograd.backward(out, torch.empty_like(out))
            backward.end()
            self._share = 1.0

    def _forward_of(self, stage: int) -> Tensor:
        out: Tensor = self._inputs()[0]
        if stage == self._first_stage:
            out = self._run_outside(out)
        for block in self._of_stage(stage):
            out = block.module(out)
        return self._run(HEAD, out, ()) if stage == self._head_stage else out

    def _of_stage(self, stage: int) -> list[Block]:
        return [block for block in self._blocks if block.stage == stage]

    def _finish(self) -> None:
        """Gradients are summed over the ranks, and the norm is known.

        As `Reduction.start_finish`, which puts norms of unequal groups together on one device.
        """
        sharded = self._sharded
        sharded.reduction.reduce_held()
        sharded.reduction.fill_left_out()
        sharded.complete_sums()
        for bucket in sharded.reduction.order:
            bucket.squares(exact=False)
        sharded.collectives.gather_small(torch.zeros(4, dtype=torch.float64))

    def _update(self) -> None:
        """Masters are updated as their sums arrive, and publish their new values."""
        sharded = self._sharded
        sharded.before_update()
        for master in self._masters:
            size = master.raw.nbytes
            for _, _, states in self._updater.states_in(master):
                tensors = [value for value in states.values() if isinstance(value, Tensor)]
                size += sum(tensor.nbytes for tensor in tensors)
            grads = master.grads.total.store
            size = 2 * size + master.raw.numel() * master.grads.local.dtypes.sums.itemsize
            copied = master.raw.numel() * master.params.dtype.itemsize
            is_on_disk = master.state_storage.is_on_disk
            crosses = master.crosses_device or master.casts
            if master.store.is_on_host and grads.is_on_host:
                sums = master.raw.numel() * master.params.dtype.itemsize
                self._journal.events.append(Sums(sums))
            update = Update(
                size_bytes=size + copied * crosses,
                is_on_host=master.store.is_on_host,
                is_on_disk=is_on_disk,
                is_awaited=not master.params.may_be_resharded,
                copied_bytes=copied,
            )
            self._journal.events.append(update)
            master.publish()
        sharded.reduction.reset()
        sharded.wait_published()

    # -- stubs ------------------------------------------------------------------------------------------

    @contextmanager
    def _noting(self) -> Iterator[Journal]:
        """Inside, messages and kernels of the engine's own are written to the journal."""
        for backend in self._backends:
            backend.journal = self._journal
        self._sharded.reduction.reset()
        try:
            with KernelWatch(self._journal):
                yield self._journal
        finally:
            for backend in self._backends:
                backend.journal = None

    @contextmanager
    def _stubs(self, *, recomputes: bool) -> Iterator[None]:
        """Inside, the root runs what is outside of the blocks, and then each block, and nothing is computed."""
        self._share, self._recomputes = 1.0, recomputes
        self._pending: dict[tuple[int, int], Tensor] = {}
        inside = {id(p) for block in self._blocks for p in block.module.parameters()}
        self._outside = [p for p in self._root.parameters() if id(p) not in inside]
        undo = [replace_forwards([block.module], self._block_stub(block)) for block in self._blocks]
        undo.append(replace_forwards([self._root], lambda _: self._run_all))
        try:
            yield
        finally:
            for restore in reversed(undo):
                restore()

    def _block_stub(self, block: Block) -> Any:
        params = list(block.module.parameters())

        def change(_: Forward) -> Forward:
            return lambda _, given: self._run(block.name, given, params)

        return change

    def _run_all(self, _: nn.Module, given: Tensor) -> Tensor:
        out = self._run_outside(given)
        for block in self._blocks:
            out = block.module(out)
        return out

    def _run_outside(self, given: Tensor) -> Tensor:
        return self._run(OUTSIDE, given, self._outside)

    def _run(self, name: str, given: Tensor, params: Sequence[Tensor]) -> Tensor:
        out: Tensor = _Stub.apply(self, name, given, *params)  # type: ignore[no-untyped-call]
        return out

    def note(self, name: str, *, is_backward: bool) -> None:
        """A block runs."""
        if is_backward and self._recomputes and name not in (OUTSIDE, HEAD):
            self._journal.events.append(Run(name, False, is_again=True))
        self._journal.events.append(Run(name, is_backward, self._share if is_backward else 1.0))

    def _inputs(self) -> tuple[Tensor]:
        return (torch.empty(1, device="meta", requires_grad=True),)


def _repeated(row: Sequence[Action], *, gathers: bool) -> tuple[dict[Action, Action], set[Action]]:
    """Action of a middle micro-batch -> the one that it is like; {}: none, or messages between them.

    Also the actions that a step needs not before it is noted: of all micro-batches but the last.

    gathers: stages have parameters to gather.
    """
    sends = (Op.GATHER, Op.DROP, Op.REDUCE) if gathers else (Op.REDUCE,)
    like: dict[Action, Action] = {}
    extra: set[Action] = set()
    by_stage: dict[int, dict[Op, list[Action]]] = defaultdict(lambda: defaultdict(list))
    for action in row:
        by_stage[action.stage][action.op].append(action)
    for ops in by_stage.values():
        if any(len(ops[op]) > 1 for op in sends):
            continue
        computed = [actions for op, actions in ops.items() if op in COMPUTE and actions]
        orders = {tuple(action.micro_batch for action in actions) for actions in computed}
        if len(orders) == 1:  # an action and its backward are both left out
            for actions in computed:
                like |= {action: actions[1] for action in actions[2:-1]}
                extra.update(actions[:-1])
    return like, extra


@final
class _Stub(torch.autograd.Function):
    """Returns its input, and gives all parameters a gradient."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, name: str, given: Tensor, *params: Tensor) -> Tensor:
        ctx.tracer, ctx.name, ctx.params = tracer, name, params
        tracer.note(name, is_backward=False)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.tracer.note(ctx.name, is_backward=True)
        made = (
            torch.empty_like(param) if needs else None
            for param, needs in zip(ctx.params, ctx.needs_input_grad[3:], strict=True)
        )
        return None, None, grads[0], *made


__all__ = ["HEAD", "OUTSIDE", "Block", "Event", "Run", "Sums", "Trace", "Tracer", "Update"]
