"""Tests of the groups of a pipeline's grid."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from warm_ranks import warm

from xds import deepspeed
from xds.deepspeed.pipe import PipelineModule


def places() -> tuple[Any, ...]:
    deepspeed.init_distributed()
    model = PipelineModule([nn.Linear(1, 1), nn.Linear(1, 1)], num_stages=2)
    grid = model.mpu()
    stage = grid.get_pipeline_model_parallel_rank(), grid.get_pipeline_model_parallel_world_size()
    tensor = grid.get_tensor_model_parallel_rank(), grid.get_tensor_model_parallel_world_size()
    return dist.get_world_size(grid.get_pipe_parallel_group()), stage, tensor


def test_grids_have_groups() -> None:
    assert warm(2).run(places) == [(2, (rank, 2), (0, 1)) for rank in range(2)]
