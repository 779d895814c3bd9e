"""Tests of the tools in `xds.deepspeed.checkpoint`: maps of shards, plans, files of DeepSpeed, lazy weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xds.deepspeed as deepspeed
from xds.deepspeed.checkpoint import ZeROCheckpoint, affine, affine_transfer
from xds.deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from xds.deepspeed.checkpoint.affine_boxes import LogicalBox
from xds.deepspeed.checkpoint.affine_layouts import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from xds.deepspeed.checkpoint.affine_transfer import PlanBudget, plan_transfer
from xds.deepspeed.checkpoint.reshape_3d_utils import model_3d_desc
from xds.deepspeed.utils import zero_to_fp32
from xds.utils.errors import UsageError

MATRIX = torch.arange(12 * 8, dtype=torch.float64).view(12, 8)

# name -> the map of a 12 x 8 matrix over some ranks, and the slices that its shards consist of
LAYOUTS: dict[str, tuple[ParamAffineMap, list[Tensor]]] = {
    "copied": (replicated_map((12, 8), 2), [MATRIX, MATRIX]),
    "rows": (contiguous_split_map((12, 8), [5, 0, 7], 0), [MATRIX[:5], MATRIX[:0], MATRIX[5:]]),
    "columns": (contiguous_split_map((12, 8), [3, 5], 1), [MATRIX[:, :3], MATRIX[:, 3:]]),
    "parts": (
        sub_param_map((12, 8), (8, 4), [[5, 3], [1, 3]], 0),
        [torch.cat([MATRIX[:5], MATRIX[8:9]]), torch.cat([MATRIX[5:8], MATRIX[9:]])],
    ),
    "split and copied": (
        segmented_map((12, 8), [(8, False), (4, True)], 0, 2, [[6, 2]]),
        [torch.cat([MATRIX[:6], MATRIX[8:]]), torch.cat([MATRIX[6:8], MATRIX[8:]])],
    ),
    "blocks": (
        block_gather_map((12, 8), {0: [0, 1, 3], 4: [2]}, 2, -1),
        [torch.cat([MATRIX[:, :4], MATRIX[:, 6:]], 1), MATRIX[:, 4:6]],
    ),
}


def run_plan(
    plan: affine_transfer.TransferPlan, target: ParamAffineMap, shards: dict[int, Tensor]
) -> dict[int, Tensor]:
    """The target's shards after the copies of the plan. Each element must be written once."""
    made = {rank: torch.zeros(shape).double() for rank, shape in target.shard_shapes.items()}
    count = {rank: torch.zeros(shape) for rank, shape in target.shard_shapes.items()}
    for one in plan.segments:
        there = (one.shape, one.target_strides, one.target_offset)
        source = shards[one.source_rank].contiguous().clone()
        values = torch.as_strided(source, one.shape, one.source_strides, one.source_offset)
        torch.as_strided(made[one.target_rank], *there).copy_(values)
        torch.as_strided(count[one.target_rank], *there).add_(1)
    assert all((one == 1).all() for one in count.values())
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_map_cuts_and_rebuilds_a_parameter(name: str) -> None:
    map_, slices = LAYOUTS[name]
    map_.validate_coverage()
    shards = {rank: map_.extract(MATRIX, rank) for rank in map_.shard_shapes}
    for found, expected in zip(shards.values(), slices, strict=True):
        assert torch.equal(found, expected)
    again = ParamAffineMap.from_dict(map_.to_dict())
    assert again.pieces_by_rank == map_.pieces_by_rank
    assert torch.equal(again.rebuild(shards), MATRIX)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_a_plan_moves_shards_from_any_layout_to_any_other(source: str, target: str) -> None:
    old, new = LAYOUTS[source][0], LAYOUTS[target][0]
    plan = plan_transfer(new, old)
    shards = {rank: old.extract(MATRIX, rank) for rank in old.shard_shapes}
    made = run_plan(plan, new, shards)
    for rank, found in made.items():
        assert torch.equal(found, new.extract(MATRIX, rank))
    again = [affine_transfer.TransferSegment.from_dict(one) for one in plan.to_dict()["segments"]]
    assert tuple(again) == plan.segments == plan_transfer(new, old).segments


def test_neighbouring_copies_are_one() -> None:
    four, two = contiguous_split_map((8, 8), [2] * 4, 0), contiguous_split_map((8, 8), [4, 4], 0)
    whole = contiguous_split_map((8, 8), [8], 0)
    assert len(plan_transfer(two, four).segments) == 4
    in_pieces = ParamAffineMap(
        (8, 8),
        {0: (8, 8)},
        {0: [AffinePiece((2, 8), at, (8, 1), at, (8, 1), [0]) for at in (0, 16, 32, 48)]},
    )
    plan = plan_transfer(whole, in_pieces)
    assert [one.shape for one in plan.segments] == [(8, 8)]
    assert plan.statistics.segments_before_merge == 4


def test_a_plan_reads_copies_from_the_chosen_rank() -> None:
    asked: list[affine_transfer.ReplicaSelectionRequest] = []

    def choose(request: affine_transfer.ReplicaSelectionRequest) -> int:
        asked.append(request)
        return request.candidates[-1].source_rank

    old, new = replicated_map((12, 8), 3), contiguous_split_map((12, 8), [6, 6], 0)
    plan = plan_transfer(new, old, replica_selector=choose)
    assert {one.source_rank for one in plan.segments} == {2} and len(asked) == 2
    assert {one.source_rank for one in plan_transfer(new, old).segments} == {0}
    with pytest.raises(affine_transfer.InvalidReplicaPolicyError, match=r"one of \[0, 1, 2\]"):
        plan_transfer(new, old, replica_selector=lambda request: 7)


def test_a_box_without_another_one() -> None:
    box = LogicalBox((0, 0), (4, 4))
    for other in (
        LogicalBox((1, 1), (2, 2)),
        LogicalBox((0, 2), (4, 9)),
        LogicalBox((5, 0), (1, 1)),
    ):
        rest = box.without(other)
        assert sum(one.volume for one in rest) == box.volume - box.intersection(other).volume
        assert not any(one.meets(other) for one in rest)


def piece(*, at: int = 0, rows: int = 2, held: tuple[int, ...] = (0,), **more: Any) -> AffinePiece:
    return AffinePiece(
        (rows, 4), at, more.pop("strides", (4, 1)), more.pop("to", 0), (4, 1), held, **more
    )


@pytest.mark.parametrize(
    ("shapes", "pieces", "message"),
    [
        ({0: (2, 4)}, {0: [piece()]}, "has 8 of its 16 elements"),
        ({0: (4, 4)}, {0: [piece(rows=3)]}, "pieces of 12 of its 16"),
        ({0: (4, 4)}, {0: [piece(), piece(at=8)]}, "same shard addresses"),
        ({0: (4, 4)}, {0: [piece(), piece(to=8)]}, "overlap in the parameter"),
        ({0: (2, 4), 1: (2, 4)}, {0: [piece()], 1: [piece(held=(1,))]}, "different locations"),
        ({0: (2, 4)}, {0: [piece(at=12)]}, "reaches outside"),
        ({0: (2, 4)}, {0: [piece(strides=(1, 4))]}, "strides"),
        ({0: (2, 4)}, {0: [piece(scale=0.5)]}, "scale"),
        ({0: (8,)}, {0: [piece()]}, "number of axes"),
        ({}, {3: []}, r"ranks \[3\] have pieces and no shard shape"),
    ],
)
def test_no_plan_of_a_wrong_map(shapes: Any, pieces: Any, message: str) -> None:
    with pytest.raises(affine_transfer.AffineTransferError, match=message):
        plan_transfer(replicated_map((4, 4), 1), ParamAffineMap((4, 4), shapes, pieces))


@pytest.mark.parametrize("name", ["max_pair_checks", "max_segments", "max_plan_bytes", "max_ndim"])
def test_a_plan_over_a_limit_is_an_error(name: str) -> None:
    old, new = LAYOUTS["rows"][0], LAYOUTS["columns"][0]
    with pytest.raises(affine_transfer.AffineTransferError, match=f"exceeds {name} = 1"):
        plan_transfer(new, old, PlanBudget(**{name: 1}))


def test_a_scale_belongs_to_the_parameter_alone() -> None:
    bias = torch.randn(6, dtype=torch.float64)
    map_ = replicated_map((6,), 4, scale=0.25)
    shards = {rank: map_.extract(bias, rank) for rank in range(4)}
    assert torch.equal(shards[3], bias / 4) and torch.equal(map_.rebuild(shards), bias)
    with pytest.raises(NotImplementedError, match="lr and eps"):
        map_.rebuild(shards, affine.SCALE_POWER_BY_STATE["exp_avg"])
    with pytest.raises(ValueError, match="hold different data"):
        map_.rebuild({**shards, 2: shards[2] + 1})
    with pytest.raises(ValueError, match="the map describes 6"):
        map_.rebuild({**shards, 2: torch.ones(7)})
    with pytest.raises(ValueError, match="not invertible"):
        replicated_map((6,), 2, scale=0.0)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece()], "shard of 16 elements, and pieces of 8"),
        ([piece(), piece(at=8, to=4)], "two pieces at element 4"),
        ([piece(), piece(at=8, to=12)], "outside the shard of 16"),
        ([piece(), piece(to=8)], "8 elements of the parameter"),
        ([piece(), piece(at=8, to=8, held=(0, 1))], r"held by \[0\]"),
    ],
)
def test_a_map_that_cannot_be_rebuilt(pieces: list[AffinePiece], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        ParamAffineMap((4, 4), {0: (4, 4)}, {0: pieces}).validate_coverage()


# -- files of DeepSpeed -----------------------------------------------------------------------------------


def write_zero_files(folder: Path, data_ranks: int) -> None:
    """The files of optimizer states of a group of 6 elements on `data_ranks` ranks, filled up to 8."""
    torch.save({"param_shapes": [{}]}, folder / "mp_rank_00_model_states.pt")
    whole = torch.cat([torch.arange(6.0), torch.zeros(2)])
    for rank, part in enumerate(whole.chunk(data_ranks)):
        padding = 2 if rank == data_ranks - 1 else 0
        states = {0: {"exp_avg": part.clone(), "step": torch.tensor(3.0)}}
        inner = {
            "base_optimizer_state": {"state": states},
            "group_paddings": [padding],
            "partition_count": [data_ranks],
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": inner, "ds_config": {}}, path)


def test_the_states_of_deepspeeds_files_for_fewer_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="optim_states"):
        ZeROCheckpoint(str(tmp_path))
    write_zero_files(tmp_path, 4)
    found = ZeROCheckpoint(str(tmp_path))
    assert (found.get_src_dp_degree(), found.get_src_world_size(), found.num_files) == (4, 4, 4)
    assert found.get_file_indices_for_rank(0, 0, 2) == [2]
    found.reshape(model_3d_desc(1, 1, 1))
    state = found.get_state_for_rank(0, 0, 0, keys_to_ignore=["ds_config"])
    assert state is not None and "ds_config" not in state
    inner = state["optimizer_state_dict"]
    assert torch.equal(inner["base_optimizer_state"]["state"][0]["exp_avg"], torch.arange(6.0))
    assert inner["group_paddings"] == [0] and inner["partition_count"] == [1]
    found.print_3d_file_map("files")
    assert "zero_pp_rank_3" in capsys.readouterr().out
    with pytest.raises(UsageError, match="dp_index = 1"):
        found.get_files_for_rank(0, 0, 1)


def test_a_universal_checkpoint_of_deepspeed_names_its_source(tmp_path: Path) -> None:
    (tmp_path / "t_universal/zero/0.weight").mkdir(parents=True)
    torch.save({}, tmp_path / "t_universal/mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("t_universal")
    with pytest.raises(UsageError, match="universal checkpoint of DeepSpeed.* --tag ITS_TAG"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


# -- weights ----------------------------------------------------------------------------------------------


def test_lazy_weights_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    engine.save_checkpoint(tmp_path)
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()

    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert lazy.keys() == expected.keys() and lazy["0.weight"] is lazy["1.weight"]
    assert lazy["0.weight"].shape == (4, 4) and lazy["0.weight"].numel() == 16
    assert all(torch.equal(one.contiguous(), expected[name]) for name, one in lazy.items())
    assert zero_to_fp32.to_torch_tensor(lazy, dtype="bf16")["0.bias"].dtype == torch.bfloat16

    own = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint

    def renamed(*args: Any, **options: Any) -> dict[str, Any]:
        return {f"model.{name}": one for name, one in own(*args, **options).items()}

    monkeypatch.setattr(zero_to_fp32, "get_fp32_state_dict_from_zero_checkpoint", renamed)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    made = torch.load(tmp_path / "out/pytorch_model.bin")
    assert torch.equal(made["model.0.weight"], expected["0.weight"])
    assert made["model.0.weight"] is made["model.1.weight"]


@pytest.mark.parametrize("elastic", [False, True])
def test_elastic_checkpoint_renames_the_states_of_stage_3(elastic: bool) -> None:
    model = nn.Linear(4, 4)
    section = {"stage": 3, "elastic_checkpoint": elastic}
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": section}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    state = engine.optimizer.state_dict()
    names = {"base_optimizer_state", "optimizer_state_dict"} & state.keys()
    assert names == {"base_optimizer_state" if elastic else "optimizer_state_dict"}
    engine.optimizer.load_state_dict(state)
    engine.destroy()
