"""`deepspeed.runtime.pipe.module`: models as lists of layers, with what DeepSpeed's scripts ask them."""

from __future__ import annotations

import logging
import os
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from ....ops.device import device_of
from ....pipe import module
from ....utils.arguments import wrong
from ....utils.errors import UsageError
from ...config.batch import mesh_of
from ...engine import Engine
from ..errors import raises_theirs
from ..library.log import log_dist
from ..missing import placeholder
from .engine import DeepSpeedEngine, EngineAdapter
from .topology import PipeDataParallelTopology, PipelineParallelGrid, topology_of

GIB = 2**30


@DeepSpeedEngine.register
@final
class PipelineEngine(EngineAdapter):
    """Trains whole steps by `train_batch`, with DeepSpeed's names. The grid is that of the config's stages.

    Attributes:
        agg_train_loss: what the last `train_batch` returned, [] fp32; None before one.
        total_loss: the sum of the losses of its micro-batches, averaged over data ranks, on ranks with the last
            stage; None on others. DeepSpeed's is the sum of one data rank.
    """

    _INSTRUCTION_MAP = placeholder("runtime.pipe.engine", "_INSTRUCTION_MAP")

    def __init__(self, engine: Engine, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        super().__init__(engine, collate_fn)
        # not by assignment: __setattr__ sets attributes of the engine
        self.__dict__.update(
            data_iterator=None,
            agg_train_loss=None,
            total_loss=None,
            grid=_grid_of(engine),
        )

    # -- data -------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """Read `train_batch`'s micro-batches from one pass over `loader`; the first stage alone reads it."""
        self.set_dataiterator(None if loader is None else iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read `train_batch`'s micro-batches from `iterator`; None: from `training_data`."""
        self.__dict__["data_iterator"] = iterator

    # -- steps ------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """`xds.Engine.train_batch`. An iterator stays in use for the next calls without one."""
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        loss = self._engine.train_batch(self.__dict__["data_iterator"])
        total = loss * self.micro_batches if self._engine.is_last_stage() else None
        self.__dict__.update(agg_train_loss=loss, total_loss=total)
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """`xds.Engine.eval_batch` with DeepSpeed's arguments.

        Args:
            return_logits: return (loss, outputs): those of the last micro-batch, as in DeepSpeed; None on ranks
                without the last stage. `xds.Engine.eval_batch` returns those of all micro-batches.
            bcast_loss: without effect: every rank gets the loss.
        """
        found = self._engine.eval_batch(
            data_iter,
            num_micro_batches,
            return_logits=return_logits,
            reduce_output=reduce_output,
            compute_loss=compute_loss,
        )
        if not return_logits:
            return found
        loss, outputs = found
        return loss, outputs[-1] if outputs else None

    def set_has_attention_mask(self, value: bool) -> None:
        """Without effect: masks are sent like every other tensor. Raises UsageError unless it is a bool."""
        if not isinstance(value, bool):
            raise wrong("set_has_attention_mask: value", value, "true or false")

    def reset_activation_shape(self) -> None:
        """Without effect: shapes are sent again for each new shape of the input."""

    # -- places -----------------------------------------------------------------------------------------

    @property
    def mpu(self) -> PipelineParallelGrid:
        """The grid."""
        return self._place

    @property
    def _place(self) -> PipelineParallelGrid:
        grid: PipelineParallelGrid = self.__dict__["grid"]
        return grid

    @property
    def is_pipe_parallel(self) -> bool:
        return self._place.pipe_parallel_size > 1

    @property
    def is_data_parallel(self) -> bool:
        return self._place.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        return self._place.model_parallel_size > 1

    @property
    def dp_id(self) -> int:
        return self._place.data_parallel_id

    @property
    def prev_stage(self) -> int:
        return self._engine.stage_id - 1

    @property
    def next_stage(self) -> int:
        return self._engine.stage_id + 1

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return int(self.stage_id)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return self._place.get_data_parallel_group()

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self._engine.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self._engine.train_micro_batch_size_per_gpu()

    # -- messages ---------------------------------------------------------------------------------------

    def log_for_device(self, *msg: Any) -> None:
        """Log `msg` with this rank's place, at level DEBUG."""
        place = self._place
        where = f"stage {place.stage_id}, data rank {place.data_parallel_id}"
        log_dist(f"{where}: {' '.join(map(str, msg))}", level=logging.DEBUG)

    def mem_status(self, msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
        """Log the memory that rank `print_rank` uses; -1: every rank. The peak is not reset."""
        use = device_of(self._engine.device).memory()
        text = f"{msg}: {use.now_bytes / GIB:.2f} GiB, peak {use.peak_bytes / GIB:.2f}"
        log_dist(text, ranks=[print_rank])


def _grid_of(engine: Engine) -> PipelineParallelGrid:
    """The grid with the groups that the engine has made."""
    known = {
        tuple(dist.get_process_group_ranks(group)): group
        for group in engine.internals.process_groups()
    }
    num_ranks = engine.world_size // engine.config.num_groups
    mesh = mesh_of(engine.config.pipeline, engine.config.tensor_parallel, num_ranks)
    return PipelineParallelGrid(topology_of(mesh), known=known)


class _Asked(module.PipelineModule, ABC):
    """The questions. This rank's layers are known where the constructor built them, see `num_stages`."""

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def forward_funcs(self) -> list[Any]:
        """This rank's layers in order: modules and functions."""
        own = [index for start, stop in self._own_stages() for index in range(start, stop)]
        names = [(index, self.name_of(index)) for index in own]
        return [self.layers[i] if name is None else self.get_submodule(name) for i, name in names]

    def partitions(self) -> list[int]:
        """The first layer of each stage, and the number of layers."""
        self._own_stages()
        return self.parts

    @raises_theirs
    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has the layer.

        Raises:
            UsageError: there is no such layer, or the layers are not cut yet.
        """
        self._own_stages()
        if not 0 <= layer_idx < len(self.layers):
            raise UsageError(
                f"stage_owner({layer_idx}): the layers are 0 to {len(self.layers) - 1}"
            )
        return sum(bound <= layer_idx for bound in self.parts) - 1

    def mpu(self) -> PipelineParallelGrid:
        """The places of ranks, with groups that are made when they are asked for.

        Raises:
            UsageError: there is no process group, or neither a topology nor the number of stages.
        """
        topology = self.topology()
        if topology is None and self.num_stages is None:
            self._own_stages()
        if topology is None:
            num_pp = int(self.num_stages or 1)
            topology = PipeDataParallelTopology(num_pp=num_pp, num_dp=self.world_size // num_pp)
        return PipelineParallelGrid(topology)

    def num_pipeline_stages(self) -> int | None:
        """None: that of the config."""
        return self.num_stages

    @raises_theirs
    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute so many layers together in backward, from the next forward on; 0: none."""
        if interval < 0:
            raise UsageError(f"set_checkpoint_interval({interval}): must be 0 or more layers")
        self.activation_checkpoint_interval = interval

    def _own_stages(self) -> list[tuple[int, int]]:
        """(first layer, end) of each stage of this rank."""
        if not hasattr(self, "parts"):
            raise UsageError(
                "this PipelineModule is not cut into stages yet; pass num_stages or topology, after "
                "deepspeed.init_distributed()"
            )
        stages = self.stages_of(self.stage_id)
        return [(self.parts[stage], self.parts[stage + 1]) for stage in stages]


class PipelineModule(_Asked):
    """`xds.pipe.PipelineModule`, and DeepSpeed's questions."""


class DualPipeVModule(_Asked, module.DualPipeVModule):
    """`xds.pipe.DualPipeVModule`, and DeepSpeed's questions."""


# -- deepspeed.runtime.pipe.schedule: the instructions as plain data ---------------------------------------
# The engine of xds runs tables. The lists of instructions (`TrainSchedule` and others) are refused.


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
