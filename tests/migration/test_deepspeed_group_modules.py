"""Tests of modules and methods of DeepSpeed that only name process groups, parameters and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks
from torch import nn
from warm_ranks import warm

from xds import deepspeed
from xds.deepspeed.moe import utils as moe
from xds.deepspeed.pipe import PipelineModule
from xds.deepspeed.runtime import compiler
from xds.deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
from xds.deepspeed.utils import groups


def sequence_ranks() -> list[int]:
    with pytest.raises(AssertionError, match="call initialize_sequence_parallel"):
        mpu.get_sequence_parallel_group()
    with pytest.raises(ValueError, match="must be at least 2"):
        mpu.initialize_sequence_parallel(1)
    mpu.initialize_sequence_parallel(2)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config, mpu=mpu)
    assert engine.seq_parallel_group is mpu.get_sequence_parallel_group()
    assert groups._get_sequence_parallel_rank() == mpu.get_sequence_parallel_rank()
    found = [
        mpu.get_sequence_parallel_world_size(),
        mpu.get_sequence_parallel_rank(),
        mpu.get_sequence_data_parallel_world_size(),
        mpu.get_sequence_data_parallel_group().size(),
        mpu.get_data_parallel_world_size(),
        mpu.get_model_parallel_world_size(),
    ]
    mpu._release_sequence_parallel_groups()
    return found


def test_the_module_of_sequence_ranks_is_an_mpu() -> None:
    assert run_new_ranks(sequence_ranks, 2) == [[2, rank, 2, 2, 1, 2] for rank in range(2)]


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


def test_parameters_of_experts_are_told_apart_by_their_mark() -> None:
    shared, expert = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    expert.allreduce = False  # type: ignore[attr-defined]
    assert moe.split_params_into_shared_and_expert_params([expert, shared]) == ([shared], [expert])
    expert.grad = torch.ones(1)
    assert moe.split_params_grads_into_shared_and_expert_params([shared, expert]) == (
        [],
        [expert.grad],
    )


def test_names_of_the_compiler_are_torchs() -> None:
    assert compiler.is_compile_supported() and not compiler.is_compiling()
    assert compiler.compile() is torch.compile and compiler.dummy_decorator(abs) is abs
    for decorated in (
        compiler.disable(lambda: torch.compiler.is_compiling()),
        compiler.enable("1.0")(lambda: torch.compiler.is_compiling()),
        compiler.enable("99.0")(lambda: torch.compiler.is_compiling()),
        compiler.enable(lambda: torch.compiler.is_compiling()),
    ):
        assert decorated() is False
    with compiler.compiled_autograd(False, {}):
        pass
    x = torch.ones(2, requires_grad=True)
    with compiler.compiled_autograd(True, {"backend": "eager"}):
        (x * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]
