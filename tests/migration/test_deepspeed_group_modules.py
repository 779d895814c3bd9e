"""Tests of modules and methods of DeepSpeed that only name process groups, parameters and torch.compile."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from warm_ranks import warm

from xds import deepspeed
from xds.deepspeed.pipe import PipelineModule


def meshes() -> tuple[Any, ...]:
    mesh = deepspeed.comm.initialize_mesh_device((1, 2), ("data_parallel", "sequence_parallel"))
    sizes = [mesh.get_group(mesh_dim=name).size() for name in mesh.mesh_dim_names]
    model = PipelineModule([nn.Linear(1, 1), nn.Linear(1, 1)], num_stages=2)
    grid = model.mpu()
    places = grid.get_pipeline_model_parallel_rank(), grid.get_pipeline_model_parallel_world_size()
    tensor = grid.get_tensor_model_parallel_rank(), grid.get_tensor_model_parallel_world_size()
    return sizes, dist.get_world_size(grid.get_pipe_parallel_group()), places, tensor


def test_meshes_and_grids_have_groups() -> None:
    assert warm(2).run(meshes) == [([1, 2], 2, (rank, 2), (0, 1)) for rank in range(2)]
