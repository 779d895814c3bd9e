"""The status of each key: what passes silently, what is named, what the engine then reads."""

import logging
import pickle

import pytest

import xds
from xds.engine.config.config import Config, parse_config

SMALL = {"train_batch_size": 8}


def complaints(source, **kwargs):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, **kwargs)
    return caught.value.complaints


HARMLESS = {
    "sparse_gradients": False,
    "sequence_parallel_size": 1,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "amp": {"enabled": False, "opt_level": "O1"},
    "elasticity": {"enabled": False, "max_train_batch_size": 2000},
    "autotuning": {"enabled": False, "arg_mappings": {"anything ": "--x"}},
    "hybrid_engine": {"enabled": False},
    "compile": {"deepcompile": False},
    "flops_profiler": {"enabled": False, "detailed": True},
    "comms_logger": {"enabled": False},
    "nebula": {"enabled": False},
    "progressive_layer_drop": {"enabled": False, "theta": 0.5},
    "curriculum_learning": {"enabled": False},
    "data_efficiency": {"enabled": False},
    "eigenvalue": {"enabled": False},
    "quantize_training": {"enabled": False},
    "expert_parallel": {"enabled": False, "top_k": "auto"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
    "pipeline": {"stages": "auto", "partition": "best"},
    "sparse_attention": {"mode": "dense"},
    "checkpoint": {"load_universal": False},
    "fp16": {"enabled": False, "fp16_master_weights_and_grads": False},
    "wandb": None,
}


@pytest.mark.parametrize("key", HARMLESS)
def test_a_value_that_changes_nothing_passes_silently(key):
    config = parse_config({**SMALL, "gradient_clipping": 0, key: HARMLESS[key]})
    assert config.without_effect == ()
    assert config.notes == ()


def test_sparse_attention_is_refused_by_being_there():
    (complaint,) = complaints({**SMALL, "sparse_attention": {"block": 16}})
    assert "not supported yet" in complaint


def test_keys_without_effect_are_named_in_one_line_once(caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    source = {
        **SMALL,
        "prescale_gradients": True,
        "cuda_visible_devices": 0,
        "aio": {"thread_count": 2},
        "zero_optimization": {"contiguous_gradients": False, "sub_group_size": 1e9},
    }
    with caplog.at_level(logging.WARNING, logger="xds"):
        config = Config.load(source)
        Config.load(source)
    assert [path for path, _ in config.without_effect] == [
        "prescale_gradients",
        "cuda_visible_devices",
        "aio.thread_count",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.sub_group_size",
    ]
    assert all(why for _, why in config.without_effect)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("config: 5 keys have no effect (prescale_gradients, cuda_visible")
    assert text.endswith("zero_optimization.sub_group_size); `xds check` says why")


def test_only_rank_0_warns(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING, logger="xds"):
        Config.load({**SMALL, "prescale_gradients": True})
    assert not caplog.records


def test_absent_clipping_is_none_and_noted():
    config = parse_config(SMALL)
    assert config.gradient_clipping == 0.0
    assert any(note.startswith("gradient_clipping is not given") for note in config.notes)


def test_sections_and_defaults_that_the_engine_reads():
    config = parse_config({"train_batch_size": 8, "bfloat16": {"enabled": True}})
    assert config.bf16.enabled and config.bf16.check_grad_overflow
    assert (config.fp16.loss_scale, config.fp16.initial_scale_power) == (0.0, 16)
    assert (config.fp16.hysteresis, config.fp16.loss_scale_window) == (2, 1000)
    assert config.optimizer is None and config.scheduler is None
    assert config.steps_per_print is None
    assert config.managed_gradient_accumulation
    assert config.communication_data_type is None
    assert config.timers.throughput.enabled
    assert config.activation_checkpointing.enabled is False
    assert config.zero_optimization.stage == 0


@pytest.mark.parametrize(
    ("section", "enabled"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"partition_activations": True}, True),
        (None, False),
    ],
)
def test_activation_checkpointing_is_on_where_the_section_is(section, enabled):
    config = parse_config({**SMALL, "activation_checkpointing": section})
    assert config.activation_checkpointing.enabled is enabled


@pytest.mark.parametrize("value", [float("inf"), "inf", None])
def test_progress_is_never_printed_at_infinity(value):
    assert parse_config({**SMALL, "steps_per_print": value}).steps_per_print is None
    assert parse_config('{"steps_per_print": Infinity}').steps_per_print is None


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_dtypes_have_their_usual_names(name):
    config = parse_config(
        {
            **SMALL,
            "communication_data_type": name,
            "torch_autocast": {"enabled": True, "dtype": name},
            "data_types": {"grad_accum_dtype": name},
        }
    )
    assert config.communication_data_type == "bf16"
    assert config.torch_autocast.dtype == "bf16"
    assert config.data_types.grad_accum_dtype == "bf16"


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse_config(SMALL).train_batch_size = 3


def test_a_config_travels_to_another_process():
    config = parse_config({**SMALL, "optimizer": {"type": "AdamW"}}, world_size=2)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_section_is_a_model_that_checks_its_types():
    for wrong in ({"stage": "1"}, {"stage": 4}, {"stag": 1}):
        with pytest.raises(ValueError, match="zero_optimization.stag"):
            Config(train_batch_size=8, zero_optimization=wrong)
    assert Config(zero_optimization={"stage": 2.0}).zero_optimization.stage == 2
    assert Config(train_batch_size=8).zero_optimization.stage == 0


def test_secrets_are_not_shown():
    config = parse_config({**SMALL, "comet": {"api_key": "abc"}})
    assert config.comet.api_key == "abc"
    assert config.as_dict()["comet"]["api_key"] == "***"
