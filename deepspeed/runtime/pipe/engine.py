"""`PipelineEngine`: what `deepspeed.initialize` returns for a model in pipeline stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from ....engine.config.ranks import mesh_of
from ....engine.engine import Engine
from ....engine.telemetry.timers import memory_use
from ....utils.arguments import wrong
from ...missing import placeholder
from ...utils.logging import log_dist
from ..engine import DeepSpeedEngine, EngineAdapter
from .coordinates import topology_of
from .grid import PipelineParallelGrid

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
        use = memory_use(self._engine.device)
        text = f"{msg}: {use.now_bytes / GIB:.2f} GiB, peak {use.peak_bytes / GIB:.2f}"
        log_dist(text, ranks=[print_rank])


def _grid_of(engine: Engine) -> PipelineParallelGrid:
    """The grid with the groups that the engine has made."""
    parts = engine._parts
    known = {
        tuple(dist.get_process_group_ranks(opened.group)): opened.group
        for opened in parts.opened
        if opened.group is not None
    }
    mesh = mesh_of(engine.config.pipeline, engine.config.tensor_parallel, engine.world_size)
    return PipelineParallelGrid(topology_of(mesh), known=known)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["PipelineEngine"]
