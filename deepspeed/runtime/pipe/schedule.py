"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's instruction lists, for scripts that read them.

The engine of xds does not run them: its order is `pipeline.schedule` of the config. In `TrainSchedule` stage s
of S runs the forward of micro-batch j at tick 2 j + s, and its backward at tick 2 (j + S) - 1 - s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import Any, final


class PipeInstruction(ABC):  # noqa: B024 (it has no method of its own, but is no instruction either)
    """One command for one stage; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """A command that uses the buffer `buffer_id` of its stage."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


@final
class OptimizerStep(PipeInstruction):
    """Update the parameters, after all gradients are reduced."""


@final
class ReduceGrads(PipeInstruction):
    """Reduce the gradients over the data ranks of the stage."""


@final
class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of weights that several stages share."""


@final
class CommitP2P(PipeInstruction):
    """Start the messages since the last one as a batch, and wait for them."""


@final
class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch into a buffer: inputs on the first stage, labels on the last."""


@final
class ForwardPass(BufferOpInstruction):
    """Run the stage's layers."""


@final
class BackwardPass(BufferOpInstruction):
    """Run backward of the stage's layers."""


@final
class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


@final
class RecvActivation(BufferOpInstruction):
    """Receive inputs from the stage before."""


@final
class SendGrad(BufferOpInstruction):
    """Send the gradient of the inputs to the stage before."""


@final
class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the outputs from the next stage."""


class PipeSchedule(ABC):
    """The instructions of one stage; iterating yields a list of them for each tick.

    Args:
        micro_batches: micro-batches of a step.
        stages: pipeline stages.
        stage_id: this stage, from 0.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self._iterator: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each tick."""

    def num_pipe_buffers(self) -> int:
        """How many buffers the instructions use."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def __iter__(self) -> PipeSchedule:
        self._iterator = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._iterator is None:
            self._iterator = self.steps()
        return next(self._iterator)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    @property
    def _loads(self) -> bool:
        return self.is_first_stage or self.is_last_stage


@final
class InferenceSchedule(PipeSchedule):
    """Forwards only: stage s runs micro-batch j at tick j + s, with two buffers in turn."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for tick in range(self.micro_batches + self.stages - 1):
            found: list[PipeInstruction] = []
            micro_batch = tick - self.stage_id
            computes = self._valid_micro_batch(micro_batch)
            into, out = micro_batch % 2, (micro_batch + 1) % 2
            if computes and self._loads:
                found.append(LoadMicroBatch(into))
            messages: list[PipeInstruction] = []
            if not self.is_last_stage and self._valid_micro_batch(micro_batch - 1):
                messages.append(SendActivation(out))
            if not self.is_first_stage and computes:
                messages.append(RecvActivation(into))
            # neighbours take these in opposite orders, so that blocking calls meet
            found += messages if self.stage_id % 2 == 0 else reversed(messages)
            if computes:
                found.append(ForwardPass(into))
            yield found

    def num_pipe_buffers(self) -> int:
        return 2


@final
class TrainSchedule(PipeSchedule):
    """One forward, one backward: at most `num_pipe_buffers` micro-batches are between the two."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        last_tick = 2 * (self.micro_batches + self.stages - 1) - 1
        before = -1
        for tick in range(last_tick + 1):
            micro_batch, is_forward = self._step_to_micro_batch(tick)
            found = self._messages(before, micro_batch, is_forward)
            if self._valid_micro_batch(micro_batch):
                buffer = self._buffer_idx(micro_batch)
                if is_forward and self._loads:
                    found.append(LoadMicroBatch(buffer))
                found.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if tick == last_tick:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro_batch
            yield found

    def num_pipe_buffers(self) -> int:
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _messages(self, before: int, micro_batch: int, is_forward: bool) -> list[PipeInstruction]:
        """A forward tick talks to the stage before it, a backward tick to the next one."""
        if not self._valid_stage(self.prev_stage if is_forward else self.next_stage):
            return []
        sent: list[PipeInstruction] = []
        received: list[PipeInstruction] = []
        if self._valid_micro_batch(before):
            buffer = self._buffer_idx(before)
            sent.append(SendGrad(buffer) if is_forward else SendActivation(buffer))
        if self._valid_micro_batch(micro_batch):
            buffer = self._buffer_idx(micro_batch)
            received.append(RecvActivation(buffer) if is_forward else RecvGrad(buffer))
        return [*sent, *received] if is_forward else [*received, *sent]

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """(micro-batch, whether it is its forward) of a tick; the micro-batch may be none of the step."""
        if (step_id - self.stage_id) % 2 == 0:
            return (step_id - self.stage_id) // 2, True
        return (step_id + 1 + self.stage_id) // 2 - self.stages, False


@final
class DataParallelSchedule(PipeSchedule):
    """All layers on every rank: a forward and a backward for each micro-batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            found: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                found += [ReduceGrads(), OptimizerStep()]
            yield found

    def num_pipe_buffers(self) -> int:
        return 1


def __getattr__(name: str) -> Any:
    from ...missing import placeholder

    if name == "DualPipeVSchedule":
        return import_module(".v_schedule", __package__).DualPipeVSchedule

    return placeholder(__name__, name)
