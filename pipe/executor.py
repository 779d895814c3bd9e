"""Runs one rank's row of a table: computes, sends, receives, gathers and reduces in its order.

    row of rank 1:   RECEIVE_F(1,0)  F(1,0)  SEND_F(1,0)  RECEIVE_F(1,1) ... B(1,0)  SEND_B(1,0) ... REDUCE(1)

- torch.distributed.pipelining has orders and an executor. The orders are used as an oracle in tests. The
  executor is not used: it knows sharding by class and aborts where a shape changes.
- A stage keeps the autograd edges of what it sent, not the tensors.
- Where a stage and the next one are on one rank, what flows is handed over without a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .channel import Channel, Header
from .cut.part import Flow, Part
from .schedules.actions import COMPUTE, Action, Op, Placement, Table
from .weight_grads import WeightGrads


class StageStates(ABC):
    """What the executor asks of the model states."""

    @abstractmethod
    def forward(self, micro_batch: int) -> AbstractContextManager[Any]:
        """Around a forward of a stage."""

    @abstractmethod
    def backward(
        self, stage: int, micro_batch: int, *, reduces: bool
    ) -> AbstractContextManager[Any]:
        """Around a backward of a stage; `reduces`: it is the last of the stage before its reduction."""

    @abstractmethod
    def weights(self) -> AbstractContextManager[Any]:
        """Around the weight gradients of a stage that its backward left for later."""

    @abstractmethod
    def hold(self, stage: int) -> None:
        """Gather the parameters of a stage until `release`."""

    @abstractmethod
    def release(self, stage: int) -> None:
        """Drop the parameters of a stage."""

    @abstractmethod
    def reduce(self, stage: int) -> None:
        """Start to reduce the gradients of a stage that are not reduced yet."""

    @abstractmethod
    def release_all(self) -> None:
        """Drop everything that is held, also after an error."""


@dataclass
class _Pending:
    """A micro-batch whose backward has not run: its inputs, and where its backward begins."""

    inputs: tuple[Tensor, ...]
    edges: list[GradientEdge]
    header: Header | None = None
    loss: Tensor | None = None  # with its factor


@dataclass
class PipelineOutputs:
    """What a run has produced on the rank of the last stage; empty on others."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[float | Tensor | None] = field(default_factory=list)  # None: the loss has none
    outputs: list[Any] = field(default_factory=list)


@final
class Executor:
    """Runs the stages of one rank. All ranks of the pipeline run the same table at the same time."""

    def __init__(
        self,
        part: Part,
        channel: Channel,
        states: StageStates,
        loss_of: Callable[[Any], tuple[Tensor, float | Tensor | None]],
        weight_grads: WeightGrads,
    ) -> None:
        """`loss_of`: the loss in the result of the last stage, and its weight."""
        self._part = part
        self._channel = channel
        self._states = states
        self._loss_of = loss_of
        self._weight_grads = weight_grads
        self._table: Table | None = None
        self._answers: dict[Action, list[Action]] = {}  # see Table.answers
        self._rank = 0
        self._batches: Sequence[Any] = ()
        self._factor: float | None = None
        self._weight_factor = 1.0
        self._keeps_outputs = False
        self._computes_loss = True
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._flows: dict[tuple[int, int], Flow] = {}  # out of a stage, until it is sent
        # of the inputs of a stage, until sent
        self._grads: dict[tuple[int, int], list[Tensor]] = {}
        self._outcome = PipelineOutputs()
        self.max_in_flight = 0  # micro-batches between forward and backward, in the last run
        self._of_stages: dict[Op, Callable[[int], None]] = {
            Op.GATHER: states.hold,
            Op.DROP: states.release,
            Op.REDUCE: states.reduce,
        }
        self._of_micro_batches: dict[Op, Callable[[int, int], None]] = {
            Op.FORWARD: self._forward,
            Op.WEIGHT: self._weight,
            Op.SEND_F: self._send_forward,
            Op.RECEIVE_F: channel.post_forward,
            Op.SEND_B: self._send_backward,
            Op.RECEIVE_B: self._post_backward,
        }

    def run(
        self,
        table: Table,
        rank: int,
        batches: Sequence[Any],
        *,
        factor: float | None,
        weight_factor: float = 1.0,
        keeps_outputs: bool = False,
        computes_loss: bool = True,
    ) -> PipelineOutputs:
        """Run row `rank` of `table`.

        Args:
            batches: the micro-batches.
            factor: losses are multiplied with it for backward; None: the table has no backward.
            weight_factor: the same, beside the weight, for losses that have a weight.
            keeps_outputs: the outcome has what the last layer returned.
            computes_loss: False leaves out the loss; only without backward.
        """
        if table is not self._table:
            self._answers = table.answers(rank)
        self._table, self._rank, self._batches = table, rank, batches
        self._factor, self._weight_factor = factor, weight_factor
        self._keeps_outputs, self._computes_loss = keeps_outputs, computes_loss
        self._outcome, self.max_in_flight = PipelineOutputs(), 0
        row = table.rows[rank]
        try:
            for place, action in enumerate(row):
                self._do(action, row, place)
            self._channel.finish()
        finally:
            self._states.release_all()
            self._forget()
        return self._outcome

    def _forget(self) -> None:
        for stage, micro_batch in self._pending:
            self._part.release(stage, micro_batch)
        self._pending.clear()
        self._flows.clear()
        self._grads.clear()
        self._weight_grads.clear()

    def _do(self, action: Action, row: Sequence[Action], place: int) -> None:
        op, stage, micro_batch = action.op, action.stage, action.micro_batch
        if op is Op.BACKWARD:
            self._backward(stage, micro_batch, splits=False, reduces=_is_reduced_next(row, place))
        elif op is Op.INPUT:
            self._backward(stage, micro_batch, splits=True, reduces=False)
        elif op in self._of_stages:
            self._of_stages[op](stage)
        else:
            self._of_micro_batches[op](stage, micro_batch)

    def _weight(self, stage: int, micro_batch: int) -> None:
        with self._states.weights():
            self._weight_grads.run((stage, micro_batch))

    def _send_forward(self, stage: int, micro_batch: int) -> None:
        flow = self._flows.pop((stage, micro_batch))
        if self._factor is None:  # nothing comes back; the receiver is at most a round behind
            round_before = micro_batch - self._placement.num_ranks
            self._channel.free([Action(Op.SEND_F, stage, round_before)])
        header = self._channel.send_forward(stage, micro_batch, flow)
        if (stage, micro_batch) in self._pending:
            self._pending[stage, micro_batch].header = header

    def _send_backward(self, stage: int, micro_batch: int) -> None:
        self._channel.send_backward(stage, micro_batch, self._grads.pop((stage, micro_batch)))

    # -- forward ----------------------------------------------------------------------------------------

    def _forward(self, stage: int, micro_batch: int) -> None:
        arrived = self._arrived(stage, micro_batch)
        batch = self._batches[micro_batch]
        is_last = stage == self._placement.num_stages - 1
        result: Any = None
        with self._states.forward(micro_batch):
            output = self._part.run(stage, batch, arrived, micro_batch)
            if is_last and self._computes_loss:
                result = self._part.result(output, batch)
        inputs = () if arrived is None else arrived.leaves
        if is_last:
            if self._keeps_outputs:
                self._outcome.outputs.append(output)
            if self._computes_loss:
                self._end(result, inputs, stage, micro_batch)
            return
        flow: Flow = output
        if self._factor is not None:
            edges = [get_gradient_edge(leaf) for leaf in flow.leaves if leaf.requires_grad]
            self._keep(stage, micro_batch, _Pending(inputs, edges))
        self._flows[stage, micro_batch] = flow

    def _end(self, result: Any, inputs: tuple[Tensor, ...], stage: int, micro_batch: int) -> None:
        """The last stage has computed its result."""
        loss, weight = self._loss_of(result)
        self._outcome.losses.append(loss.detach())
        self._outcome.weights.append(weight)
        if self._factor is not None:
            if weight is not None:
                loss = loss * (weight * self._weight_factor)
            elif self._factor != 1.0:
                loss = loss * self._factor
            self._keep(stage, micro_batch, _Pending(inputs, [], loss=loss))

    def _keep(self, stage: int, micro_batch: int, pending: _Pending) -> None:
        self._pending[stage, micro_batch] = pending
        self.max_in_flight = max(self.max_in_flight, len(self._pending))

    def _arrived(self, stage: int, micro_batch: int) -> Flow | None:
        if stage == 0:
            return None
        if not self._is_local(stage - 1):
            arrived = self._channel.take_forward(stage, micro_batch)
            self._channel.free(self._answers[Action(Op.SEND_F, stage - 1, micro_batch)])
            return arrived
        flow: Flow = self._flows.pop((stage - 1, micro_batch))
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in flow.leaves]
        return Flow(tuple(leaves), flow.spec)

    # -- backward ---------------------------------------------------------------------------------------

    def _backward(self, stage: int, micro_batch: int, *, splits: bool, reduces: bool) -> None:
        pending = self._pending.pop((stage, micro_batch))
        starts, grads = self._starts(pending, stage, micro_batch)
        key = (stage, micro_batch)
        with (
            self._states.backward(stage, micro_batch, reduces=reduces),
            self._part.recomputing(stage, micro_batch),
            self._weight_grads.deferring(key if splits else None),
        ):
            if starts:
                torch.autograd.backward(starts, grads)
        self._part.release(stage, micro_batch)
        if stage > 0:
            self._grads[key] = [_grad_of(leaf) for leaf in pending.inputs if leaf.requires_grad]

    def _post_backward(self, stage: int, micro_batch: int) -> None:
        """Start to receive gradients, as soon as it is known what was sent."""
        pending = self._pending.get((stage, micro_batch))
        if pending is not None and pending.header is not None:
            self._channel.post_backward(stage, micro_batch, pending.header)
            pending.header = None

    def _starts(
        self, pending: _Pending, stage: int, micro_batch: int
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Where backward begins, and the gradients there."""
        if pending.loss is not None:
            loss = pending.loss
            return ([loss], [None]) if loss.requires_grad else ([], [])
        if self._is_local(stage):
            return pending.edges, list(self._grads.pop((stage + 1, micro_batch)))
        if pending.header is not None:
            self._channel.post_backward(stage, micro_batch, pending.header)
        grads = self._channel.take_backward(stage, micro_batch)
        self._channel.free(self._answers[Action(Op.SEND_B, stage + 1, micro_batch)])
        return pending.edges, list(grads)

    # -- the placement ----------------------------------------------------------------------------------

    @property
    def _placement(self) -> Placement:
        assert self._table is not None
        return self._table.placement

    def _is_local(self, stage: int) -> bool:
        """`stage` and the next one are both on this rank."""
        rank_of = self._placement.rank_of
        return rank_of(stage) == rank_of(stage + 1)


def _is_reduced_next(row: Sequence[Action], place: int) -> bool:
    """The reduction of the stage of row[place] comes before its next computation."""
    for action in row[place + 1 :]:
        if action.op is Op.REDUCE and action.stage == row[place].stage:
            return True
        if action.op in COMPUTE:
            return False
    return False


def _grad_of(leaf: Tensor) -> Tensor:
    """The gradient of an input that flowed in; zeros where backward did not reach it."""
    grad, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if grad is None else grad


__all__ = ["Executor", "PipelineOutputs", "StageStates"]
