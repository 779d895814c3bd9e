"""`deepspeed.runtime.pipe.module`: models as lists of layers, with what DeepSpeed's scripts ask them."""

from __future__ import annotations

import os
from abc import ABC
from typing import Any

import torch.distributed as dist

from ....pipe import module
from ....pipe.layer_specs import LayerSpec, TiedLayerSpec
from ....utils.errors import UsageError
from ...errors import raises_theirs
from ...missing import placeholder
from .coordinates import PipeDataParallelTopology
from .grid import PipelineParallelGrid


class _Asked(module.PipelineModule, ABC):
    """The questions. This rank's layers are known where the constructor built them, see `num_stages`."""

    is_checkpointable_results: list[bool] = []  # noqa: RUF012 (replaced, never changed)

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

    def get_additional_losses(self) -> None:
        """Nothing: a class of the script may return a dict of losses to log."""
        return

    @raises_theirs
    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute so many layers together in backward, from the next forward on; 0: none."""
        if interval < 0:
            raise UsageError(f"set_checkpoint_interval({interval}): must be 0 or more layers")
        self.activation_checkpoint_interval = interval
        self._precompute_checkpointable_values()

    def _precompute_checkpointable_values(self) -> None:
        """Set `is_checkpointable_results`: whether each group of layers is recomputed."""
        interval = self.activation_checkpoint_interval
        if interval > 0 and self.built:
            self.is_checkpointable_results = [
                self._is_recomputed(first, min(first + interval, stop))
                for start, stop in self._own_stages()
                for first in range(start, stop, interval)
            ]

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


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec"]
