"""Tests of the names and arguments of `xds.deepspeed`, and of the errors for names that xds lacks."""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xds
import xds.deepspeed as deepspeed
from xds.engine.deepspeed.missing import MISSING, MISSING_METHODS, Missing, NotCovered, placeholder

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "deepspeed.md").read_text()
TABLE = (Path(__file__).parent / "deepspeed_names.txt").read_text()

# what DeepSpeed 0.19.8 has, argument by argument
SIGNATURES = {
    "initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
    "dist_init_required collate_fn config mesh_param config_params",
    "init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method "
    "dist_init_required config rank world_size",
    "add_config_arguments": "parser",
    "zero.Init": "module data_parallel_group mem_efficient_linear remote_device pin_memory "
    "config_dict_or_path config enabled dtype mpu",
    "zero.GatheredParameters": "params modifier_rank fwd_module enabled",
    "zero.register_external_parameter": "module param",
    "checkpointing.configure": "mpu_ deepspeed_config partition_activations contiguous_checkpointing "
    "num_checkpoints checkpoint_in_cpu synchronize profile",
    "ops.adam.FusedAdam": "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
    "ops.adam.DeepSpeedCPUAdam": "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode "
    "fp32_optimizer_states",
    "ops.lamb.FusedLamb": "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm "
    "max_coeff min_coeff amsgrad",
    "ops.lion.FusedLion": "params lr betas weight_decay set_grad_none",
    "ops.lion.DeepSpeedCPULion": "model_params lr betas weight_decay fp32_optimizer_states",
    "ops.adagrad.DeepSpeedCPUAdagrad": "model_params lr eps weight_decay amsgrad fp32_optimizer_states",
    "utils.set_z3_leaf_modules": "model leaf_module_classes raise_if_not_found",
    "utils.unset_z3_leaf_modules": "model leaf_module_classes raise_if_not_found",
    "utils.get_z3_leaf_modules": "model",
    "utils.z3_leaf_module": "model",
    "utils.log_dist": "message ranks level",
    "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint": "checkpoint_dir tag "
    "exclude_frozen_parameters lazy_mode",
    "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict": "checkpoint_dir output_dir "
    "max_shard_size safe_serialization tag exclude_frozen_parameters",
    "utils.zero_to_fp32.load_state_dict_from_zero_checkpoint": "model checkpoint_dir tag",
    "runtime.utils.see_memory_usage": "message force",
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live": "model num_gpus_per_node num_nodes "
    "additional_buffer_factor",
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live": "model num_gpus_per_node "
    "num_nodes additional_buffer_factor",
    "PipelineModule": "layers num_stages topology loss_fn seed_layers seed_fn base_seed partition_method "
    "activation_checkpoint_interval activation_checkpoint_func checkpointable_layers dynamic_shape",
    "pipe.LayerSpec": "typename module_args module_kwargs",
    "pipe.TiedLayerSpec": "key typename module_args forward_fn tied_weight_attr module_kwargs",
    "runtime.pipe.engine.PipelineEngine.train_batch": "data_iter",
    "runtime.pipe.engine.PipelineEngine.eval_batch": "data_iter return_logits compute_loss reduce_output "
    "bcast_loss num_micro_batches",
    "runtime.pipe.engine.PipelineEngine.set_dataloader": "loader",
    "runtime.pipe.engine.PipelineEngine.set_dataiterator": "iterator",
    "runtime.pipe.engine.PipelineEngine.mem_status": "msg print_rank reset_max",
    "DeepSpeedEngine.backward": "loss retain_graph scale_wrt_gas",
    "DeepSpeedEngine.step": "lr_kwargs",
    "DeepSpeedEngine.deepspeed_io": "dataset batch_size route pin_memory data_sampler collate_fn "
    "num_local_io_workers",
    "DeepSpeedEngine.save_checkpoint": "save_dir tag client_state save_latest exclude_frozen_parameters",
    "DeepSpeedEngine.load_checkpoint": "load_dir tag load_module_strict load_optimizer_states "
    "load_lr_scheduler_states load_module_only custom_load_fn",
    "runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss.apply": "fn x y mask shards "
    "compute_params output_reduction",
    "moe.layer.MoE": "hidden_size expert num_experts ep_size k capacity_factor eval_capacity_factor "
    "min_capacity use_residual noisy_gate_policy drop_tokens use_rts use_tutel "
    "enable_expert_tensor_parallelism top2_2nd_expert_sampling",
    "moe.layer.MoE.forward": "hidden_states used_token",
    "moe.sharded_moe.TopKGate": "model_dim num_experts k capacity_factor eval_capacity_factor min_capacity "
    "noisy_gate_policy drop_tokens use_rts ep_group top2_2nd_expert_sampling",
    "moe.sharded_moe.TopKGate.forward": "input used_token sparse_routes use_tutel",
    "moe.experts.Experts": "expert num_local_experts expert_group_name",
    "moe.utils.has_moe_layers": "m",
    "moe.utils.split_params_into_different_moe_groups_for_optimizer": "param_groups max_group_size",
    "moe.utils.configure_moe_param_groups": "model_parameters",
    "DeepSpeedEngine.save_16bit_model": "save_dir save_filename exclude_frozen_parameters",
}
# the names that real scripts use: path -> whether it is refused when it is used
USED: dict[str, bool] = {}
COUNTS: dict[str, int] = {}
for _line in TABLE.replace("\n  ", " ").splitlines():
    if _line and not _line.startswith("#"):
        _module, _, _items = _line.partition(": ")
        for _item in _items.split(", "):
            _name, _count, *_marks = _item.split()
            _path = f"{_module}.{_name}".removeprefix("deepspeed.")
            USED[_path], COUNTS[_path] = bool(_marks), int(_count)
GENERAL = ("xds has no such internal state", "it has no counterpart")
FEW = 2  # what so few scripts use is only imported
STAND_INS = [
    *("moe.mappings.drop_tokens", "linear.optimized_linear.OptimizedLinear"),
    "runtime.hybrid_engine.DeepSpeedHybridEngine",
    *("inference.v2.engine_v2.InferenceEngineV2", "compile.util.get_deepcompile_handle"),
]


def find(path: str) -> Any:
    """The name as a script gets it: `from deepspeed.a.b import C`, or an attribute of a class."""
    module, _, name = f"xds.deepspeed.{path}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(find(path.rpartition(".")[0]), name)


def test_functions_take_deepspeeds_arguments_in_their_order() -> None:
    for path, expected in SIGNATURES.items():
        found = find(path)
        names = [
            name for name in inspect.signature(found).parameters if name not in ("self", "others")
        ]
        assert names == expected.split(), path


def test_the_names_that_scripts_use_are_there_or_refused_with_a_reason() -> None:
    assert len(USED) > 300
    wrong = []
    for path, is_refused in USED.items():
        try:
            found = find(path)
        except NotCovered:  # inside a name that is refused
            found = Missing("Within", (), {"_why": ""})
        if isinstance(found, Missing) is not is_refused:
            wrong.append(path)
    assert not wrong


def test_what_is_refused_says_why_and_what_to_use() -> None:
    for path in [path for path, count in COUNTS.items() if USED[path] and count > FEW]:
        with pytest.raises(
            xds.UsageError, match=r"is not covered by xds.deepspeed: \w.*\w"
        ) as error:
            find(path)()
        assert not any(one in str(error.value) for one in GENERAL), path


@pytest.mark.parametrize("path", STAND_INS)
def test_a_name_that_is_not_covered_can_be_imported_and_says_so_when_used(path: str) -> None:
    found = find(path)
    assert not isinstance(nn.Linear(1, 1), found)
    said = rf"^deepspeed\.{path} is not covered by xds.deepspeed: \w.*\w"
    with pytest.raises(xds.UsageError, match=said):
        found(1, two=2)
    with pytest.raises(NotCovered, match=said):
        _ = found.anything
    assert found is find(path)
    mine = type(found)("Mine", (found, nn.Module), {})
    assert issubclass(mine, found)
    with pytest.raises(xds.UsageError, match=said):
        mine()


def test_every_reason_is_a_sentence_without_an_end() -> None:
    for name, why in {**MISSING, **MISSING_METHODS}.items():
        assert len(why.split()) > 1, name
        assert not why.endswith("."), name


def test_placeholders_have_the_names_that_they_replace() -> None:
    found = placeholder("moe.mappings", "drop_tokens")
    assert (found.__module__, found.__name__) == ("xds.deepspeed.moe.mappings", "drop_tokens")
    assert not hasattr(found, "build")


def test_the_version_compares_like_the_release_that_is_followed() -> None:
    release = deepspeed.__version__.partition("+")[0]
    assert tuple(int(part) for part in release.split(".")) == (0, 19, 8)


def test_the_page_names_the_names() -> None:
    for path in SIGNATURES:
        assert path.rpartition(".")[2] in PAGE, path
    for name in MISSING_METHODS:
        assert name in PAGE, name


# -- the folder's own name --------------------------------------------------------------------------------


# -- the command line -------------------------------------------------------------------------------------


def test_the_local_rank_is_the_launchers_and_else_the_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_declared in (True, False):
        monkeypatch.setenv("LOCAL_RANK", "3")
        parser = argparse.ArgumentParser()
        if is_declared:
            parser.add_argument("--local_rank", type=int, default=-1)
        parser = deepspeed.add_config_arguments(parser)
        assert parser.parse_args([]).local_rank == 3
        if is_declared:
            assert parser.parse_args(["--local_rank=1"]).local_rank == 1
    monkeypatch.delenv("LOCAL_RANK")
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args(["--deepspeed"])
    assert (args.local_rank, args.deepspeed, args.deepspeed_config) == (-1, True, None)


# -- estimates --------------------------------------------------------------------------------------------


def test_an_estimate_is_the_papers_formula(capsys: pytest.CaptureFixture[str]) -> None:
    from xds.deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
    from xds.deepspeed.runtime.zero.stage_1_and_2 import (
        estimate_zero2_model_states_mem_needs_all_live,
    )

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    printed = capsys.readouterr().out
    assert "1 nodes with 2 ranks each; 8.4M parameters, 4.2M in the largest unit" in printed
    numel, largest, gib = 2 * (2048 + 1) * 2048, (2048 + 1) * 2048, 2**30
    # 16 bytes a parameter over 2 ranks, and six units of 2 bytes; 2 ranks build a unit each
    device, host = (16 * numel / 2 + 12 * largest) / gib, 4 * largest * 2 * 1.5 / gib
    assert f"{host:.2f} GiB |         {device:.2f} GiB | built under zero.Init\n" in printed
    assert "built under zero.Init, optimizer and parameters on the host" in printed
    estimate_zero2_model_states_mem_needs_all_live(model, 4, 2)
    device, host = (2 * numel + 14 * numel / 8 + 8 * largest) / gib, 4 * numel * 4 * 1.5 / gib
    printed = capsys.readouterr().out
    assert f"{host:.2f} GiB |         {device:.2f} GiB | built whole on each rank\n" in printed


@pytest.mark.parametrize("name", ["accelerate", "huggingface"])
def test_the_former_classes_for_hugging_face_name_the_stock_ones(name: str) -> None:
    with pytest.raises(ImportError, match=r"is removed: use .* `xds --as-deepspeed`"):
        importlib.import_module(f"xds.engine.integrations.{name}")
