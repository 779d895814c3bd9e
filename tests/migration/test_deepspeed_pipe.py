"""Tests of DeepSpeed's topologies and instruction lists: literal tables, and messages that meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes

import xds
from xds.deepspeed.runtime.pipe import schedule
from xds.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

# -- topologies -------------------------------------------------------------------------------------------


def test_a_topology_of_any_axes() -> None:
    topo = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert (topo.world_size(), topo.get_axis_names()) == (6, ["row", "col"])
    assert [topo.get_rank(row=row, col=col) for row in (0, 1) for col in (0, 1, 2)] == list(
        range(6)
    )
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


def test_pipe_model_data() -> None:
    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topo.get_axis_names() == ["pipe", "data", "model"]
    assert topo.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topo.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topo.filter_match(pipe=0, data=1) == [2, 3]
    assert [topo.get_rank_repr(rank) for rank in range(3)] == ["model_00", "model_01", "model_00"]
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""
    assert isinstance(topo, ProcessTopology)


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


def _places() -> dict[str, Any]:
    grid = PipelineParallelGrid(PipeDataParallelTopology(2, 2))
    mine = torch.tensor([float(dist.get_rank())])
    sums = []
    for group in (grid.get_data_parallel_group(), grid.get_pipe_parallel_group()):
        total = mine.clone()
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    assert grid.get_data_parallel_group() is grid.get_data_parallel_group()
    try:
        PipelineParallelGrid(PipeDataParallelTopology(3, 1))
    except xds.UsageError as error:
        said = str(error)
    return {
        "stage": (grid.get_stage_id(), grid.is_first_stage, grid.is_last_stage),
        "data": (grid.get_data_parallel_id(), grid.get_data_parallel_group_ranks()),
        "sums": sums,
        "next": grid.stage_to_global(1),
        "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
        "said": said,
    }


def test_a_grid_has_the_groups_of_its_rank() -> None:
    found = run_processes(_places, 4)
    assert [each["stage"] for each in found] == [
        *[(0, True, False)] * 2,
        *[(1, False, True)] * 2,
    ]
    assert [each["data"] for each in found] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    assert [each["sums"] for each in found] == [[1, 2], [1, 4], [5, 2], [5, 4]]
    assert [each["next"] for each in found] == [2, 3, 2, 3]
    assert all(each["model"] == (0, 1) for each in found)
    assert all("3 ranks and the process group 4" in each["said"] for each in found)


# -- instruction lists ------------------------------------------------------------------------------------

SHORT = {
    "LoadMicroBatch": "load",
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "send",
    "RecvActivation": "recv",
    "SendGrad": "send_grad",
    "RecvGrad": "recv_grad",
    "ReduceTiedGrads": "tied",
    "ReduceGrads": "reduce",
    "OptimizerStep": "step",
}


def test_instructions_show_their_arguments() -> None:
    found = schedule.ForwardPass(3, extra="x")
    assert (found.name, found.buffer_id, found.kwargs) == (
        "ForwardPass",
        3,
        {"buffer_id": 3, "extra": "x"},
    )
    assert repr(found) == "ForwardPass(buffer_id=3, extra='x')"
    assert repr(schedule.OptimizerStep()) == "OptimizerStep()"
