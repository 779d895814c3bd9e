"""Tests of DeepSpeed's topologies and grids, and of what scripts ask a `PipelineModule`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer import on_ranks
from torch import nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.pipe import DualPipeVModule, PipelineModule
from xds.deepspeed.runtime.pipe import schedule
from xds.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from xds.pipe.module import PipelineModule as Core


def test_a_topology_of_any_axes() -> None:
    topo = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert (topo.world_size(), topo.get_axis_names()) == (6, ["row", "col"])
    places = [(row, col) for row in (0, 1) for col in (0, 1, 2)]
    assert [topo.get_rank(row=row, col=col) for row, col in places] == list(range(6))
    assert topo.get_coord(4) == topo.ProcessCoord(row=1, col=1)
    assert topo.mapping[topo.ProcessCoord(row=1, col=2)] == 5
    assert (topo.get_dim("col"), topo.get_dim("data")) == (3, 0)
    assert topo.get_axis_comm_lists("row") == [[0, 3], [1, 4], [2, 5]]
    assert topo.get_axis_comm_lists("col") == [[0, 1, 2], [3, 4, 5]]
    assert topo.get_axis_comm_lists("data") == []
    assert topo.get_axis_list(axis="col", idx=1) == [1, 4]
    assert topo.filter_match(row=1) == [3, 4, 5]
    assert topo.filter_match(row=1, col=2) == [5]
    assert topo.get_rank_repr(4) == "row_01-col_01"
    assert topo.get_rank_repr(4, omit_axes=["row"], inner_sep="=") == "col=01"

    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topo.get_axis_names() == ["pipe", "data", "model"] and isinstance(topo, ProcessTopology)
    assert topo.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topo.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topo.filter_match(pipe=0, data=1) == [2, 3]
    assert [topo.get_rank_repr(rank) for rank in range(3)] == ["model_00", "model_01", "model_00"]
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_wrong_coordinates_and_axes() -> None:
    topo = PipeDataParallelTopology(2, 2)
    with pytest.raises(ValueError, match=r"use filter_match\(\)"):
        topo.get_rank(pipe=0)
    with pytest.raises(ValueError, match=r"lengths of the axes are \[2, 2\]"):
        topo.get_rank(pipe=2, data=0)
    with pytest.raises(ValueError, match="rank = 4: must be from 0 to 3"):
        topo.get_coord(4)
    with pytest.raises(xds.UsageError, match="one name and one length"):
        ProcessTopology(["pipe"], [2, 2])
    with pytest.raises(xds.UsageError, match="the length of axis data is 0"):
        PipeDataParallelTopology(2, 0)


@on_ranks(4)
def test_a_grid_has_the_groups_of_its_rank() -> None:
    rank = dist.get_rank()
    grid = PipelineParallelGrid(PipeDataParallelTopology(2, 2))
    for group, expected in (
        (grid.get_data_parallel_group(), [1, 1, 5, 5]),
        (grid.get_pipe_parallel_group(), [2, 4, 2, 4]),
    ):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == expected[rank]
    assert grid.get_data_parallel_group() is grid.get_data_parallel_group()
    stage = grid.get_stage_id(), grid.is_first_stage, grid.is_last_stage
    assert stage == (rank // 2, rank < 2, rank >= 2)
    own = [0, 1] if rank < 2 else [2, 3]
    assert (grid.get_data_parallel_id(), grid.get_data_parallel_group_ranks()) == (rank % 2, own)
    assert grid.stage_to_global(1) == 2 + rank % 2
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (0, 1)
    with pytest.raises(xds.UsageError, match="3 ranks and the process group 4"):
        PipelineParallelGrid(PipeDataParallelTopology(3, 1))


def test_instructions_show_their_arguments() -> None:
    found = schedule.ForwardPass(3, extra="x")
    assert (found.name, found.buffer_id) == ("ForwardPass", 3)
    assert found.kwargs == {"buffer_id": 3, "extra": "x"}
    assert repr(found) == "ForwardPass(buffer_id=3, extra='x')"
    assert repr(schedule.OptimizerStep()) == "OptimizerStep()"


def layers() -> list[Any]:
    return [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), abs, nn.ReLU(), nn.Linear(2, 2)]


@on_ranks(2)
def test_a_pipeline_module_knows_its_stages_and_groups() -> None:
    rank = dist.get_rank()
    model = PipelineModule(layers(), num_stages=2, partition_method="uniform")
    assert isinstance(model, Core) and type(model).__name__ == "PipelineModule"
    model.set_checkpoint_interval(2)
    v = DualPipeVModule(layers(), num_stages=2, partition_method=[0, 1, 2, 3, 6])
    v.set_checkpoint_interval(1)
    assert model.partitions() == [0, 3, 6] and len(v.forward_funcs) == (4, 2)[rank]
    assert [model.stage_owner(index) for index in range(6)] == [0, 0, 0, 1, 1, 1]
    assert (model.num_pipeline_stages(), model.global_rank, model.world_size) == (2, rank, 2)
    names = [getattr(one, "__name__", type(one).__name__) for one in model.forward_funcs]
    assert names == (["Linear", "ReLU", "Linear"], ["abs", "ReLU", "Linear"])[rank]
    for wrong in (lambda: model.stage_owner(6), lambda: model.set_checkpoint_interval(-1)):
        with pytest.raises(AssertionError):
            wrong()
    grid = model.mpu()
    assert dist.get_world_size(grid.get_pipe_parallel_group()) == 2
    assert grid.get_pipeline_model_parallel_rank() == rank
    assert grid.get_pipeline_model_parallel_world_size() == 2
    assert grid.get_tensor_model_parallel_rank() == 0
    assert grid.get_tensor_model_parallel_world_size() == 1
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config["gradient_accumulation_steps"] = 2
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert engine.module.stage_owner(3) == 1


def test_before_the_cut_an_error_says_what_is_needed() -> None:
    model = PipelineModule(layers())
    with pytest.raises(ValueError, match="not cut into stages yet; pass num_stages"):
        model.stage_owner(0)
    assert model.num_pipeline_stages() is None and not dist.is_initialized()
    with pytest.raises(xds.UsageError, match="leave mpu out"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1}, mpu=object())
