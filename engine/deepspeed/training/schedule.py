"""`deepspeed.runtime.pipe.schedule`: the instructions as plain data.

The engine of xds runs tables: its order is `pipeline.schedule` of the config. The lists of instructions
(`TrainSchedule` and others) can be imported, and are refused when they are used.
"""

from __future__ import annotations

from typing import Any


class PipeInstruction:
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


class OptimizerStep(PipeInstruction):
    """Update the parameters, after all gradients are reduced."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients over the data ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of weights that several stages share."""


class CommitP2P(PipeInstruction):
    """Start the messages since the last one as a batch, and wait for them."""


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch into a buffer: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Run the stage's layers."""


class BackwardPass(BufferOpInstruction):
    """Run backward of the stage's layers."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the inputs to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the outputs from the next stage."""
