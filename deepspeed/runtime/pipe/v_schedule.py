"""`DualPipeVSchedule`: DualPipeV as DeepSpeed's instruction lists, from the order that the engine of xds runs.

Each rank holds two stages, of the two arms ("phases") of a V. All ranks' lists follow one common order of
computations and messages, so that a send and its receive meet wherever each rank waits at `CommitP2P`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from ....pipe.schedules.actions import FLOW_BACK, Action, Op, Placement
from ....pipe.schedules.dualpipev import dualpipev
from .schedule import (
    BackwardPass,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

_Streams = list[list[list[PipeInstruction]]]


@final
class DualPipeVSchedule(PipeSchedule):
    """The instructions of one rank; a list for each computation.

    A buffer is `phase * micro_batches + micro-batch`. Micro-batches enter and leave at rank 0.

    Args:
        stages, stage_id: pipeline ranks, and this one.
        forward_only: without backward and update.
    Raises:
        ValueError: fewer than two micro-batches a rank.
    """

    def __init__(
        self, micro_batches: int, stages: int, stage_id: int, forward_only: bool = False
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if micro_batches < 2 * stages:
            raise ValueError(
                f"DualPipeV of {stages} ranks needs at least {2 * stages} micro-batches, not {micro_batches}"
            )
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        return 2 * self.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        placement = Placement(self.stages, num_chunks=2, is_v=True)
        ops = {Op.FORWARD} if self.forward_only else {Op.FORWARD, *FLOW_BACK}
        orders = [
            [action for action in order if action.op in ops]
            for order in dualpipev(placement, self.micro_batches)
        ]
        yield from _Walk(placement, orders, self.micro_batches).streams()[self.stage_id]
        if not self.forward_only:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


@final
class _Walk:
    """Runs the orders tick by tick, and notes for each rank what it computes, sends and receives."""

    def __init__(
        self, placement: Placement, orders: list[list[Action]], micro_batches: int
    ) -> None:
        self._placement = placement
        self._orders = orders
        self._micro_batches = micro_batches
        self._done: set[tuple[bool, int, int]] = set()  # (is forward, stage, micro-batch)
        self._messages: list[list[PipeInstruction]] = [[] for _ in orders]  # not committed yet

    def streams(self) -> _Streams:
        found: _Streams = [[] for _ in self._orders]
        places = [0] * len(self._orders)
        while any(place < len(order) for place, order in zip(places, self._orders, strict=True)):
            ready = [
                (rank, order[place])
                for rank, (place, order) in enumerate(zip(places, self._orders, strict=True))
                if place < len(order) and self._is_ready(order[place])
            ]
            for rank, action in ready:
                found[rank].append([*self._commit(rank), *self._compute(rank, action)])
                places[rank] += 1
            for rank, action in ready:
                self._done.add((action.op is Op.FORWARD, action.stage, action.micro_batch))
                self._send(rank, action)
        for rank, stream in enumerate(found):
            stream.append(self._commit(rank))
        return found

    def _is_ready(self, action: Action) -> bool:
        stage, micro_batch = action.stage, action.micro_batch
        if action.op is Op.FORWARD:
            return stage == 0 or (True, stage - 1, micro_batch) in self._done
        is_last = self._placement.is_last(stage)
        return is_last or (False, stage + 1, micro_batch) in self._done

    def _buffer(self, stage: int, micro_batch: int) -> tuple[int, int]:
        """(buffer, phase)."""
        phase = self._placement.chunk_of(stage)
        return phase * self._micro_batches + micro_batch, phase

    def _commit(self, rank: int) -> list[PipeInstruction]:
        messages, self._messages[rank] = self._messages[rank], []
        return [*messages, CommitP2P()] if messages else []

    def _compute(self, rank: int, action: Action) -> list[PipeInstruction]:
        buffer, phase = self._buffer(action.stage, action.micro_batch)
        if action.op is not Op.FORWARD:
            return [BackwardPass(buffer, phase=phase)]
        load = [LoadMicroBatch(buffer)] if action.stage == 0 else []
        return [*load, ForwardPass(buffer, phase=phase)]

    def _send(self, rank: int, action: Action) -> None:
        """Note the message to the rank with the next stage, or for a gradient with the one before."""
        is_forward = action.op is Op.FORWARD
        other = action.stage + (1 if is_forward else -1)
        if not 0 <= other < self._placement.num_stages or self._placement.rank_of(other) == rank:
            return
        buffer, phase = self._buffer(action.stage, action.micro_batch)
        into, its_phase = self._buffer(other, action.micro_batch)
        kinds = (SendActivation, RecvActivation) if is_forward else (SendGrad, RecvGrad)
        self._messages[rank].append(kinds[0](buffer, phase=phase))
        self._messages[self._placement.rank_of(other)].append(kinds[1](into, phase=its_phase))


__all__ = ["DualPipeVSchedule"]
