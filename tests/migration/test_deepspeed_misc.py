"""Tests of deepspeed.utils.groups with experts, pinned memory, undone Adam steps, and parts of weights."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pydantic
import pytest
import torch
from helpers import run_new_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed import env_report
from xds.deepspeed.inference.v2.inference_utils import ceil_div, elem_size
from xds.deepspeed.inference.v2.model_implementations import sharding
from xds.deepspeed.inference.v2.ragged import DSStateManagerConfig
from xds.deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
from xds.deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from xds.deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from xds.deepspeed.ops.adam import DeepSpeedCPUAdam
from xds.deepspeed.ops.op_builder import UtilsBuilder
from xds.deepspeed.runtime.config import DeepSpeedConfig
from xds.deepspeed.sequence.layer import _dim_zero_all_to_all, _SeqAllToAll
from xds.deepspeed.utils import groups, zero_to_fp32
from xds.deepspeed.utils.pin_memory import NativePinnedMemory
from xds.deepspeed.utils.timer import ThroughputTimer

# -- groups -----------------------------------------------------------------------------------------------


def test_expert_groups_are_made_of_ranks_with_the_same_slice() -> None:
    experts, copies = groups._get_expert_parallel_ranks(8, 2, 2)
    assert experts == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert copies == [[0, 4], [2, 6], [1, 5], [3, 7]]
    experts, copies = groups._get_expert_parallel_ranks(
        8, 1, 2, 2, use_data_before_expert_parallel_=True
    )
    assert experts == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert copies == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for wrong in ((8, 3, 1), (8, 2, 3), (8, 0, 1)):
        with pytest.raises(AssertionError, match="is not divisible by") as caught:
            groups._get_expert_parallel_ranks(*wrong)
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, xds.UsageError)


def made_groups() -> dict[str, object]:
    assert groups._get_max_expert_size() is None
    groups._create_expert_and_data_parallel(2)
    groups._create_expert_and_data_parallel(1)
    groups._create_expert_and_data_parallel(2)  # exists
    with pytest.raises(AssertionError, match="ep_size_3"):
        groups._get_expert_parallel_group("ep_size_3")
    return {
        "experts": groups._get_expert_parallel_group_ranks("ep_size_2"),
        "copies": groups._get_expert_data_parallel_group_ranks("ep_size_2"),
        "sizes": [
            groups._get_expert_parallel_world_size("ep_size_2"),
            groups._get_expert_data_parallel_world_size("ep_size_2"),
            groups._get_expert_data_parallel_world_size("ep_size_1"),
        ],
        "rank": groups._get_expert_parallel_rank("ep_size_2"),
        "first": groups._get_expert_broadcast_src_rank("ep_size_2"),
        "max": groups._get_max_expert_size_name(),
        "data": groups._get_data_parallel_group_ranks(),
        "source": groups._get_broadcast_src_rank(),
    }


def test_expert_groups_exist_once_per_size() -> None:
    for rank, found in enumerate(run_new_ranks(made_groups, 2)):
        assert found == {
            "experts": [0, 1],
            "copies": [rank],
            "sizes": [2, 1, 2],
            "rank": rank,
            "first": rank,
            "max": "ep_size_2",
            "data": [0, 1],
            "source": 0,
        }


# -- sequences --------------------------------------------------------------------------------------------


def exchanged() -> None:
    engine, *_ = deepspeed.initialize(
        model=nn.Linear(4, 4),
        config_params={"train_batch_size": 8, "optimizer": {"type": "Adam"}},
        mesh_param=(1, 2),
    )
    group = engine.seq_parallel_group
    rank = torch.distributed.get_rank(group)
    assert groups._get_sequence_parallel_world_size() == 2
    for tokens_dim, batch_dim in ((1, 0), (0, 1)):
        whole = torch.randn(4, 4, 3, 5, generator=torch.Generator().manual_seed(0))
        mine = whole.chunk(2, dim=tokens_dim)[rank].contiguous().requires_grad_()
        heads = _SeqAllToAll.apply(group, mine, 2, tokens_dim, batch_dim)
        assert torch.equal(heads, whole.split([2, 1], dim=2)[rank])
        back = _SeqAllToAll.apply(group, heads, tokens_dim, 2, batch_dim)
        assert torch.equal(back, mine)
        (heads**2).sum().backward()
        torch.testing.assert_close(mine.grad, 2 * mine)
    rows = (rank * 10 + torch.arange(2.0)[:, None].expand(2, 3)).contiguous().requires_grad_()
    moved = _dim_zero_all_to_all(group, rows)
    (moved**2).sum().backward()
    assert moved[:, 0].tolist() == [rank, 10 + rank]
    torch.testing.assert_close(rows.grad, 2 * rows)
    with pytest.raises(ValueError, match="pad them"):
        _SeqAllToAll.apply(group, torch.ones(1, 3, 2, 1), 1, 2, 0)
    with pytest.raises(ValueError, match="each rank needs a group"):
        _SeqAllToAll.apply(group, torch.ones(1, 2, 1, 1), 2, 1, 0)


def test_heads_and_tokens_change_places_with_uneven_heads() -> None:
    run_new_ranks(exchanged, 2)


# -- memory -----------------------------------------------------------------------------------------------


def test_pinned_memory_is_known_by_its_views_and_ends_with_them() -> None:
    pins = NativePinnedMemory()
    values = torch.arange(32.0).reshape(4, 8)
    pinned = pins.pin(values)
    assert torch.equal(pinned, values) and pinned.ds_pinned
    assert pins.pin(values, make_copy=False).shape == (4, 8)
    assert pins.pin(values, match_shape=False).tolist() == list(range(32))
    view, begin = pinned[1], pinned.data_ptr()
    del pinned
    gc.collect()
    assert pins.is_pinned(view) and begin in pins._ranges  # the view keeps it
    assert view.tolist() == list(range(8, 16))
    assert not pins.is_pinned(values) and not pins.is_pinned(torch.empty(2, device="meta"))
    with FakeTensorMode() as fake:
        assert not pins.is_pinned(fake.from_tensor(torch.zeros(2)))
    del view
    gc.collect()
    assert begin not in pins._ranges
    other = pins.pin(values)
    assert pins.unpin(other) and not pins.is_pinned(other[1]) and not pins.unpin(other)
    assert torch.equal(other, values)  # still valid


def test_the_accelerator_pins_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = deepspeed.get_accelerator()
    monkeypatch.delenv("DS_PIN_MEMORY_BACKEND", raising=False)
    assert here.unpin_memory(torch.ones(2)) is None
    assert here.pin_empty(4, 8, dtype=torch.float16).shape == (4, 8)
    with pytest.raises(ValueError, match="leave device out"):
        here.pin_empty((4,), dtype=torch.float16, device="meta")
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    like = here.pin_empty_like(torch.ones(2, 3, dtype=torch.float16))
    assert here.is_pinned(like) and like.dtype == torch.float16 and like.shape == (2, 3)
    assert here.unpin_memory(like) is True and not here.is_pinned(like)
    empty = here.pin_memory(torch.empty(0))
    assert empty.shape == (0,)


def test_bytes_of_a_tensor_are_the_same_memory() -> None:
    ops = UtilsBuilder().load()
    value = torch.ones(3, dtype=torch.float16)
    seen, pair = ops.cast_to_byte_tensor(value), ops.cast_to_byte_tensor([value, value])
    assert seen.dtype == torch.uint8 and seen.shape == (6,) and seen.data_ptr() == value.data_ptr()
    assert len(pair) == 2


# -- Adam -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_adam_step_can_be_undone(decoupled: bool) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(50))
    optimizer = DeepSpeedCPUAdam([param], 1e-2, weight_decay=0.1, adamw_mode=decoupled)
    seen = []
    for _ in range(3):
        param.grad = torch.randn(50)
        seen.append((param.detach().clone(), param.grad))
        optimizer.step_subgroup(4)
    assert optimizer.state[4]["step"] == 3 and param not in optimizer.state
    for step in (2, 1, 0):
        before, param.grad = seen[step]
        optimizer.rollback_subgroup(4)
        assert optimizer.state[4]["step"] == step
        torch.testing.assert_close(param.detach(), before, rtol=1e-3, atol=1e-4)
    assert optimizer.state[4]["exp_avg"].abs().max() < 1e-6
    for number in (4, 5):
        with pytest.raises(RuntimeError, match="call step_subgroup first"):
            optimizer.rollback_subgroup(number)


# -- small functions --------------------------------------------------------------------------------------


def test_parts_of_attention_are_whole_heads() -> None:
    head, model = 4, 32  # 8 query heads, 2 key and value heads
    rows = torch.arange(12).repeat_interleave(head)[:, None].expand(-1, model)
    parts = [sharding.shard_qkv_param(rows, rank, 4, head, 8, 2) for rank in range(4)]
    assert [sorted(set(part[:, 0].tolist())) for part in parts] == [
        [0, 1, 8, 10],
        [2, 3, 8, 10],
        [4, 5, 9, 11],
        [6, 7, 9, 11],
    ]
    assert {part.shape[0] for part in parts} == {sharding.qkv_out_features(32, 0, 4, head, 8, 2)}
    outs = [sharding.shard_attn_out_param(rows.T, rank, 5, head) for rank in range(5)]
    assert torch.equal(torch.cat(outs, dim=1), rows.T)  # 12 heads: 3, 3, 2, 2, 2
    assert sharding.get_local_heads(0, 5, 12) == (3, 3)
    assert sharding.shard_attn_out_param(torch.ones(4), 1, 2, head) is None
    with pytest.raises(ValueError, match="use fewer ranks"):
        sharding.get_local_heads(0, 8, 6)
    with pytest.raises(ValueError, match="a divisor of the ranks"):
        sharding.shard_qkv_param(torch.empty(80 * head, 4), 0, 8, head, 60, 10)


@pytest.mark.parametrize("experts", [(), (3,)])
def test_parts_of_an_mlp_are_blocks_that_cover_it(experts: tuple[int, ...]) -> None:
    is_moe = bool(experts)
    weight = torch.randn(*experts, 256, 8)
    parts = [sharding.shard_mlp_1_param(weight, r, 3, is_moe=is_moe) for r in range(3)]
    assert [part.shape[-2] for part in parts] == [96, 96, 64]
    assert torch.equal(torch.cat(parts, dim=-2), weight)
    gated = [sharding.shard_mlp_1_param(weight, r, 3, gated=True, is_moe=is_moe) for r in range(3)]
    assert [part.shape[-2] for part in gated] == [128, 64, 64]
    back = [sharding.shard_mlp_2_param(weight.mT, r, 3, is_moe=is_moe) for r in range(3)]
    assert torch.equal(torch.cat(back, dim=-1), weight.mT)
    assert sharding.shard_mlp_2_param(torch.ones(*experts, 8), 1, 3, is_moe=is_moe) is None
    assert sharding.sharded_intermediate_dim(256, 3, 2) == 64


def test_small_functions_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    assert (ceil_div(10, 3), ceil_div(9, 3), elem_size(torch.bfloat16)) == (4, 3, 2)
    with pytest.raises(ValueError, match="b must be non-zero"):
        ceil_div(1, 0)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="steps_per_output must be"):
            ThroughputTimer(None, 1, steps_per_output=wrong)  # type: ignore[arg-type]
    names = [f"zero_{i}_optim_states.pt" for i in (0, 2, 10)]
    for name in reversed(names):
        (tmp_path / name).touch()
    assert [Path(one).name for one in zero_to_fp32.get_optim_files(tmp_path)] == names
    with pytest.raises(xds.UsageError, match="not a folder of DeepSpeed's files"):
        zero_to_fp32.get_model_state_files(tmp_path)


def test_the_report_of_the_environment_says_who_stands_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env_report.main()
    said = capsys.readouterr().out
    assert "stands in for it" in said and torch.__version__ in said and "cpu_adam" in said
    assert env_report.human_readable_size(3 * 2**29) == "1.50 GB"
    env_report.main(hide_operator_status=True)
    assert "cpu_adam" not in capsys.readouterr().out


def test_plans_of_transformers_become_specs() -> None:
    specs = TPPlanConverter.convert(
        {
            "layers.*.q_proj": "colwise",
            "layers.*.down_proj.weight": "rowwise",
            "head": "colwise_rep",
        }
    )
    assert specs is not None
    found = AutoTPConfig(layer_specs=specs).find_matching_spec("model.layers.3.q_proj.weight")
    assert found is specs[0] and found.partition_type is PartitionType.COLUMN
    assert specs[1].matches("layers.0.down_proj.weight") and specs[1].get_partition_dim() == 1
    assert [spec.gather_output for spec in specs] == [False, False, True]
    assert TPPlanConverter.convert({}) is None
    with pytest.raises(ValueError, match="unsupported partition style"):
        TPPlanConverter.convert({"a": "sideways"})


def test_specs_of_fused_layers_know_their_parts() -> None:
    config = AutoTPConfig.from_dict(
        {
            "tp_size": 4,
            "layer_specs": [
                {
                    "patterns": [r".*qkv\.weight$"],
                    "shape": [[8, 2, 2], -1],
                    "model_types": ["Llama"],
                }
            ],
        }
    )
    (spec,) = config.layer_specs
    assert config.tp_size == 4 and spec.get_sub_param_sizes() == (8, 2, 2)
    assert spec.get_num_sub_params() == 3 and spec.has_unequal_sub_params()
    assert spec.matches("a.qkv.weight", "llama") and not spec.matches("a.qkv.weight")
    for wrong in ((3, 0), (-1, (2, 2)), ((), -1), (((1,),), -1)):
        with pytest.raises(ValueError, match="shape = "):
            TPLayerSpec(["a"], shape=wrong)


def test_limits_of_an_inference_engine_are_checked() -> None:
    assert DSStateManagerConfig().max_context == 8192
    for wrong in (
        {"max_ragged_batch_size": 0},
        {"max_tracked_sequences": 512, "max_ragged_sequence_count": 1024},
    ):
        with pytest.raises(pydantic.ValidationError):
            DSStateManagerConfig(**wrong)


def test_dimensions_are_divided_by_heads_or_grains() -> None:
    meta = AutoTPMeta(num_kv_heads=3, tp_grain_size=8)
    assert get_shard_size_list(24, 2, meta, "q_proj") == [16, 8]
    assert get_shard_size_list(27, 2, meta, "mlp.up_proj") == [16, 11]
    assert get_shard_size_list(7, 2, meta, "lm_head") == [4, 3]
    assert get_shard_size_list(3, 2, AutoTPMeta()) == [2, 1]
    text = SimpleNamespace(num_key_value_heads=2, num_attention_heads=8, hidden_size=64)
    found = AutoTPMeta.from_model_config(SimpleNamespace(text_config=text))
    assert found == AutoTPMeta(2, 8, 64) and AutoTPMeta.from_model_config(None) == AutoTPMeta()


def test_the_config_object_has_the_sections_of_monitors_and_of_the_log() -> None:
    config = DeepSpeedConfig(
        {
            "train_batch_size": 2,
            "csv_monitor": {"enabled": True, "job_name": "test"},
            "comms_logger": {"enabled": True, "verbose": True},
        }
    )
    monitors = config.monitor_config
    assert monitors.enabled and monitors.csv_monitor.job_name == "test"
    assert not monitors.wandb.enabled
    assert config.comms_config.comms_logger.verbose and config.comms_config.comms_logger_enabled
    wrong = DeepSpeedConfig({"train_batch_size": 2, "wandb": {"enabled": "perhaps"}})
    with pytest.raises(ValueError, match=r"wandb\.enabled"):
        _ = wrong.monitor_config
