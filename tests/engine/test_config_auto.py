"""The value "auto", resolving, and anything that can be thrown at the config."""

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xds
from xds.engine.config.config import Config, parse_config

SMALL = {"train_batch_size": 8}


def complaints(source, **kwargs):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, **kwargs)
    return caught.value.complaints


# ---- "auto" --------------------------------------------------------------------------------------

FROM_A_TRAINER = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
}


def test_auto_that_only_a_trainer_knows_is_refused_by_name():
    found = complaints(FROM_A_TRAINER)
    assert [complaint.split(" = ")[0] for complaint in found] == [
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    ]
    assert found[1] == (
        'optimizer.params.lr = "auto": only an integration can fill it (Trainer of transformers or Accelerator '
        "of accelerate); write a number, or try a value with `xds check --auto optimizer.params.lr=VALUE`"
    )


def test_an_integration_fills_auto_and_nothing_else():
    filled = {
        "bfloat16.enabled": True,
        "optimizer.params.lr": 1e-4,
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.1,
        "scheduler.params.warmup_num_steps": 10,
        "scheduler.params.total_num_steps": 100,
        "zero_optimization.prefetch_bucket_size": 0.9 * 30 * 30,
        "zero_optimization.stage": 1,
        "some.other.key": 1,
    }
    config = parse_config(FROM_A_TRAINER, auto=filled, world_size=2)
    assert config.optimizer.params == {
        "lr": 1e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert config.bf16.enabled
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.prefetch_bucket_size == 810
    assert config.gradient_clipping == 1.0
    assert config.train_batch_size == 8
    assert any("gradient_clipping" in note and "1.0" in note for note in config.notes)


@pytest.mark.parametrize("path", ["zero_optimization.stage", "fp16.enabled", "amp.enabled"])
def test_auto_for_a_decision_is_refused(path):
    (complaint,) = complaints({**SMALL, path.split(".")[0]: {path.split(".")[1]: "auto"}})
    assert complaint.startswith(f'{path} = "auto": only an integration')


@pytest.mark.parametrize(
    ("params", "auto", "said"),
    [
        ({"lrr": "auto"}, {}, 'lrr = "auto": unknown key; did you mean "lr"?'),
        ({"lr": {"enabled": "auto"}}, {}, 'lr = {"enabled": "auto"}: must be a number, at least'),
        ({"bias_correction": "auto"}, {}, 'bias_correction = "auto": only an integration can fill'),
        ({"lr": "auto"}, {"optimizer.params.lr": "auto"}, 'lr = "auto": only an integration can'),
    ],
)
def test_auto_for_an_argument_is_one_complaint_that_fits_it(params, auto, said):
    source = {**SMALL, "optimizer": {"type": "adamw", "params": params}}
    (complaint,) = complaints(source, auto=auto)
    assert complaint.startswith(f"optimizer.params.{said}")
    assert ("write true or false" in complaint) is ("bias_correction" in params)


def test_batch_sizes_that_are_all_auto_are_refused_when_resolved():
    config = parse_config({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"})
    with pytest.raises(xds.ConfigError, match='"auto" for train_batch_size and train_micro'):
        config.resolve(4)


# ---- resolving -----------------------------------------------------------------------------------


def test_resolving_fills_the_sizes_and_is_idempotent():
    config = parse_config({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})
    assert config.gradient_accumulation_steps == 0
    resolved = config.resolve(8)
    assert (resolved.gradient_accumulation_steps, resolved.world_size) == (2, 8)
    assert resolved.resolve(8) is resolved
    assert config.gradient_accumulation_steps == 0
    assert parse_config(config, world_size=8) == resolved


def test_what_as_dict_gives_reads_back_as_the_same():
    config = parse_config(
        {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, "leaf_module": {"name_suffixes": ["mlp"]}},
            "optimizer": {"type": "lamb", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR"},
            "activation_checkpointing": {},
        },
        world_size=2,
    )
    assert parse_config(config.as_dict(), world_size=2).as_dict() == config.as_dict()


def test_data_parallel_size_must_match():
    config = parse_config({**SMALL, "data_parallel_size": 4})
    assert config.resolve(4).train_micro_batch_size_per_gpu == 2
    with pytest.raises(xds.ConfigError, match="data_parallel_size = 4"):
        config.resolve(2)


def test_reading_a_config_does_not_import_torch():
    code = (
        "import sys; import xds; xds.Config.load({'train_batch_size': 8}).resolve(2); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- anything ------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        *Config.model_fields,
        *Config.others,
        *("stage", "enabled", "type", "params", "lr", "device", "offload_param", "auto", "units"),
        *("leaf_module", "classes", "betas", "reduce_bucket_size", "shared_parameters", ""),
    ]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "Adam", "AdamW", "WarmupLR", "none", "cpu", "inf", "bf16", ""]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS | st.text(max_size=4), VALUES, max_size=5))
def test_any_dict_is_read_or_refused_with_complaints(source):
    try:
        config = parse_config(source)
        config.resolve(2)
        parse_config(config.as_dict())
    except xds.ConfigError as error:
        assert error.complaints
        assert all(isinstance(complaint, str) and complaint for complaint in error.complaints)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='{}[]",:/#*\n 1a\\', max_size=30))
def test_any_text_is_read_or_refused_with_complaints(text):
    try:
        parse_config("{" + text)
    except xds.ConfigError as error:
        assert error.complaints
