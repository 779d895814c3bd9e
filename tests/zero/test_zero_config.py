"""The section zero_optimization: stages, sizes, units, older spellings."""

import pytest

import xds
from xds.engine.config.config import parse_config


def zero(section):
    return parse_config({"zero_optimization": section}).zero_optimization


def test_stages_and_sizes_are_read():
    for section, stage in (({}, 0), ({"stage": 2.0}, 2), (True, 1), (False, 0), (None, 0)):
        assert zero(section).stage == stage
    for value, numel in ((5e8, 500_000_000), (0.9 * 31 * 31, 865), ("auto", 50_000_000)):
        assert zero({"stage3_prefetch_bucket_size": value}).prefetch_bucket_size == numel


def test_both_spellings_of_the_stage_3_sizes():
    for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"):
        assert getattr(zero({name: 12}), name) == 12
        assert getattr(zero({f"stage3_{name}": 12}), name) == 12
        with pytest.raises(xds.ConfigError, match="sets the same option as"):
            zero({name: 12, f"stage3_{name}": 12})


def test_a_complaint_names_the_key_as_it_was_written():
    with pytest.raises(xds.ConfigError) as caught:
        zero({"stage3_max_live_parameters": "many"})
    assert caught.value.complaints == (
        'zero_optimization.stage3_max_live_parameters = "many": '
        "must be a number of elements, at least 0",
    )


def test_leaf_modules_become_units():
    section = {
        "units": ["Block"],
        "leaf_module": {"classes": ["Block", "Expert"], "names": ["h.0"], "name_suffixes": ["mlp"]},
    }
    assert zero(section).units == ("Block", "Expert", "h.0", "*mlp")


REFUSED = [
    {"offload_param": {"devise": "cpu"}},
    {"offload_optimizer": {"super_offload": True}},
    {"zenflow": {"topk_ratio": 0.1}},
    {"zero_quantized_weights": True},
    {"zero_quantized_nontrainable_weights": True},
    {"zero_quantized_gradients": True},
    {"zero_hpz_partition_size": 8},
    {"zeropp_loco_param": {"err_beta": 0.8}},
    {"legacy_stage1": True},
]


def test_features_that_are_not_supported():
    for section in REFUSED:
        with pytest.raises(xds.ConfigError) as caught:
            zero(section)
        (complaint,) = caught.value.complaints
        assert complaint.startswith(f"zero_optimization.{next(iter(section))}")


SILENT = [
    {"cpu_offload": False},
    {"offload_param": {"device": "none", "buffer_size": "auto", "pin_memory": True}},
    {"offload_optimizer": {"device": None}},
    {"zero_quantized_weights": False},
    {"zero_hpz_partition_size": 1},
    {"mics_shard_size": -1},
    {"contiguous_gradients": True, "reduce_scatter": True, "allgather_partitions": True},
    {"round_robin_gradients": False, "ignore_unused_parameters": True},
]


def test_values_that_change_nothing():
    for section in SILENT:
        assert parse_config({"zero_optimization": section}).without_effect == (), section


NAMED = [
    {"contiguous_gradients": False},
    {"reduce_scatter": False},
    {"round_robin_gradients": True},
    {"sub_group_size": 1e12},
    {"stage3_model_persistence_threshold": 0},
    {"stage3_gather_16bit_weights_on_model_save": True},
    {"gather_16bit_weights_on_model_save": True},
    {"stage3_gather_fp16_weights_on_model_save": True},
]


def test_keys_without_effect_are_named_as_they_were_written():
    for section in NAMED:
        found = parse_config({"zero_optimization": section}).without_effect
        assert [path for path, _ in found] == [f"zero_optimization.{next(iter(section))}"]
