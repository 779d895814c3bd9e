"""What DeepSpeed accepts and most configs do not need: comment keys, old names, values without effect."""

import pytest

import xds
from xds.engine.config.config import parse_config

SMALL = {"train_batch_size": 8, "gradient_clipping": 0}


def complaints(source, **kwargs):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, **kwargs)
    return caught.value.complaints


# ---- comment keys --------------------------------------------------------------------------------


def test_a_key_that_begins_with_an_underscore_is_ignored_in_every_section():
    source = {
        **SMALL,
        "_comment": "any",
        "_": {"stage": 9},
        "_fp16": {"enabled": "auto"},
        "zero_optimization": {
            "_why": 1,
            "stage": 1,
            "offload_optimizer": {"_": None, "device": "none"},
            "leaf_module": {"_": []},
        },
        "optimizer": {"_": 1, "type": "Adam", "params": {"_lr": 2, "lr": 0.1}},
        "scheduler": {"type": "StepLR", "params": {"_": "auto", "step_size": 2}},
        "autotuning": {"_": 1, "enabled": False},
        "fp16": {"_enabled": True},
    }
    config = parse_config(source)
    assert config.optimizer.params == {"lr": 0.1}
    assert config.scheduler.params == {"step_size": 2}
    assert config.zero_optimization.stage == 1 and not config.fp16.enabled
    assert config.without_effect == () and config.auto_keys == ()


def test_keys_of_free_objects_are_no_comments():
    plan = {"_orig_mod.*.up": "colwise"}
    assert parse_config({**SMALL, "tensor_parallel": {"plan": plan}}).tensor_parallel.plan == plan


# ---- values that DeepSpeed accepts ---------------------------------------------------------------


@pytest.mark.parametrize("key", ["min_loss_scale", "loss_scale_window"])
def test_limits_of_a_dynamic_scale_may_be_0_where_none_is(key):
    for more in ({"loss_scale": 128}, {"enabled": False}):
        parse_config({**SMALL, "fp16": {"enabled": True, key: 0, **more}})
    (complaint,) = complaints({**SMALL, "fp16": {"enabled": True, key: 0}})
    assert complaint.startswith(f"fp16.{key} = 0: a dynamic loss scale")
    assert "fixed fp16.loss_scale" in complaint


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_autocast_of_half_parameters_is_noted(name):
    source = {**SMALL, name: {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": name}}
    config = parse_config(source)
    assert config.torch_autocast.enabled and getattr(config, name).enabled
    (note,) = config.notes
    assert f"parameters are {name} already" in note


@pytest.mark.parametrize(
    "section",
    [
        {"stage": 2, "offload_param": {"device": "cpu"}},
        {"stage": 2, "offload_param": {"device": "nvme"}},
        {"stage": 1, "cpu_offload_param": True},
        {"stage": 0, "cpu_offload_params": True},
    ],
)
def test_offload_param_below_stage_3_has_no_effect(section):
    config = parse_config({**SMALL, "zero_optimization": section}, world_size=1)
    assert config.zero_optimization.offload_param.device == "none"
    ((path, why),) = config.without_effect
    assert path == "zero_optimization.offload_param.device"
    assert f"the stage is {section['stage']}" in why
    assert parse_config(config.as_dict(), world_size=1).as_dict() == config.as_dict()


def test_no_warmup_steps_are_taken_as_deepspeed_took_them():
    for kind, more in (("WarmupLR", {}), ("WarmupCosineLR", {"total_num_steps": 9})):
        section = {"type": kind, "params": {"warmup_num_steps": 0, **more}}
        assert (
            parse_config({**SMALL, "scheduler": section}).scheduler.params["warmup_num_steps"] == 0
        )


@pytest.mark.parametrize(
    ("section", "enabled", "noted"),
    [
        ({"partition_activations": False}, False, "all its flags are false"),
        (
            {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
                "synchronize_checkpoint_boundary": False,
                "profile": False,
            },
            False,
            "all its flags are false",
        ),
        ({"profile": False, "cpu_checkpointing": True}, True, "are recomputed"),
        ({"profile": False, "enabled": True}, True, "are recomputed"),
        ({"number_checkpoints": 4}, True, "are recomputed"),
    ],
)
def test_checkpointing_with_every_flag_false_does_not_recompute(section, enabled, noted):
    config = parse_config({**SMALL, "activation_checkpointing": section})
    assert config.activation_checkpointing.enabled is enabled
    (note,) = config.notes
    assert noted in note


# ---- old names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimization": {"stage": 2, "grad_hooks": False}},
        {"allgather_size": 5e8},
        {"disable_fused_adam": True},
        {"local_rank": -1},
        {"optimizer": {"type": "Adam", "torch_adam": True}},
        {"optimizer": {"type": "Adam", "params": {"disable_fused_adam": True}}},
    ],
)
def test_old_names_without_a_meaning_are_named_with_the_reason(source):
    ((path, why),) = parse_config({**SMALL, **source}).without_effect
    assert path.rpartition(".")[2] in list(source) or path.partition(".")[0] in list(source)
    assert why


def test_a_misspelled_name_of_deepspeeds_scripts_is_ignored_where_it_changes_nothing():
    parse_config({**SMALL, "grandient_accumulation_steps": 1})
    with pytest.raises(xds.ConfigError, match="write gradient_accumulation_steps"):
        parse_config({**SMALL, "grandient_accumulation_steps": 2})


def test_old_names_with_a_meaning():
    old = {"cpu_offload": True, "stage": 2, "stage3_gather_fp16_weights_on_model_save": False}
    config = parse_config({**SMALL, "zero_optimization": old, "bfloat16": {"check_overflow": True}})
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.bf16.check_grad_overflow
    assert parse_config({**SMALL, "zero_optimization": True}).zero_optimization.stage == 1
    parse_config({**SMALL, "quantize_training": {"quantize-algo": {"q_type": "symmetric"}}})


# ---- "auto" --------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto", ["auto", "Auto", "AUTO"])
def test_auto_is_the_same_in_any_case(auto):
    source = {
        "train_batch_size": auto,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": auto,
        "prescale_gradients": auto,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": auto, "overlap_comm": auto},
        "optimizer": {"type": "AdamW", "params": {"lr": auto, "fused": auto}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": auto}},
        "autotuning": {"fast": auto},
        "elasticity": {"enabled": False},
    }
    filled = {
        "optimizer.params.lr": 0.5,
        "optimizer.params.fused": True,
        "scheduler.params.gamma": 1,
    }
    config = parse_config(source, auto=filled, world_size=2)
    assert config.optimizer.params == {"lr": 0.5} and config.gradient_clipping == 1.0
    assert config.scheduler.params == {"step_size": 2, "gamma": 1.0}
    assert config.train_batch_size == 4 and config.zero_optimization.overlap_comm is True
    found = complaints({**SMALL, "optimizer": {"type": "RMSprop", "params": {"alpha": auto}}})
    assert found[0].startswith('optimizer.params.alpha = "auto": only an integration can fill it')
    assert "--auto optimizer.params.alpha=VALUE" in found[0]


def test_an_integrations_batch_is_used_where_the_file_has_none():
    filled = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    config = parse_config({}, auto={**filled, "train_batch_size": 99}, world_size=2)
    assert config.train_batch_size == 12
    assert parse_config({}, auto={"train_batch_size": 8}, world_size=2).train_batch_size == 8
    config = parse_config({"train_batch_size": 4}, auto=filled, world_size=2)
    assert config.train_micro_batch_size_per_gpu == 2 and config.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("path", "who"),
    [
        ("optimizer.params.betas", "(Trainer of transformers)"),
        ("zero_optimization.stage", "(Accelerator of accelerate)"),
        ("bf16.enabled", "(Trainer of transformers or Accelerator of accelerate)"),
        ("amp.enabled", "fill it; write"),
    ],
)
def test_the_integrations_that_know_a_value_are_named(path, who):
    *sections, key = path.split(".")
    source = {key: "auto"}
    for section in reversed(sections):
        source = {section: source} if section != "params" else {"type": "Adam", section: source}
    (complaint,) = complaints({**SMALL, **source})
    assert complaint.startswith(f'{path} = "auto": only an integration can') and who in complaint


# ---- unknown keys --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"max_grad_norm": 1}, 'max_grad_norm = 1: unknown key; did you mean "gradient_clipping"?'),
        ({"lr": 1}, 'it belongs to "optimizer.params.lr"'),
        ({"learning_rate": 1}, 'did you mean "optimizer.params.lr"?'),
        ({"optimizer": {"type": "Adam", "eps": 1}}, 'it belongs to "optimizer.params.eps"'),
        ({"optimizer": {"type": "Adam", "learning_rate": 1}}, 'mean "optimizer.params.lr"?'),
        ({"backend": "nccl"}, "unknown key; remove it, or see docs/config.md"),
        ({"mode": "x"}, "unknown key; remove it, or see docs/config.md"),
        ({"zerro": 1}, "unknown key; remove it, or see docs/config.md"),
        ({"zero_optimisation": {}}, 'did you mean "zero_optimization"?'),
        ({"zero_optimization": {"gradient_clipping": 1}}, 'it belongs to "gradient_clipping"'),
        (
            {"zero_optimization": {"nvme_path": "/x"}},
            'it belongs to "zero_optimization.offload_optimizer.nvme_path" or '
            '"zero_optimization.offload_param.nvme_path"',
        ),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "it has no loss scale: remove it"),
        (
            {"zero_optimization.stage": 2},
            'keys are nested, not joined by dots: write "zero_optimization": {"stage": ...}',
        ),
        ({"optimizer": {"type": "Adam", "params.lr": 1}}, 'write "params": {"lr": ...}'),
        ({"a.b.c": 1}, 'write "a": {"b": {"c": ...}}'),
        ({"fp16": {"enabld": True}}, 'did you mean "enabled"?'),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            'did you mean "warmup_num_steps"?',
        ),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1}}}, "unknown key; remove it, or see"),
    ],
)
def test_an_unknown_key_gets_a_hint_only_where_one_is_known(source, says):
    (complaint,) = complaints({**SMALL, **source})
    assert says in complaint
