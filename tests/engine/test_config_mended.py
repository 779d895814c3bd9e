"""One wrong key is one complaint: nothing else is said that goes away once this key is right."""

import copy

import pytest

import xds
from xds.engine.config.config import Config, parse_config
from xds.utils.schema.section import Section, subsection

RICH = {
    "a stage and offload": {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "data_parallel_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}},
        "bf16": {"enabled": True},
        "data_types": {"param_dtype": "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "super_offload": True},
            "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "zeropp_loco_param": {"err_beta": 0.5},
            "zero_hpz_partition_size": 2,
        },
        "compile": {"enabled": True, "mode": "default", "kwargs": {"options": {}}},
        "ops": {"native": True, "require": True},
    },
    "one bit": {
        "train_batch_size": 8,
        "fp16": {"enabled": True, "loss_scale": 64, "min_loss_scale": 0, "loss_scale_window": 0},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 200}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "zero_optimization": {"stage": 2, "cpu_offload": False},
    },
    "a pipeline": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "pipeline": {
            "stages": 2,
            "schedule": "interleaved_1f1b",
            "chunks": 2,
            "micro_batches": 8,
            "partition": [0, 1, 2, 3, 4],
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 1, "total_steps": 9}},
        "tensor_parallel": {"tp_size": 2},
        "zero_optimization": {"stage": 1, "mics_shard_size": 1},
    },
    "elastic": {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 64,
            "micro_batch_sizes": [2, 4],
            "min_gpus": 1,
            "max_gpus": 8,
            "version": 0.2,
            "model_parallel_size": 2,
            "num_gpus_per_node": 2,
        },
        "sequence_parallel_size": 2,
        "zero_optimization": {"stage": 1},
        "activation_checkpointing": {"partition_activations": True},
    },
}
WORLD_SIZE = 4


NEEDS_MORE = ("optimizer", "scheduler", "zeropp_loco_param")  # where they are, other keys must be
OWN_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def keys_of(model: type[Section], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key and section that xds reads and that may be added alone."""
    found = []
    for name in model.model_fields:
        if name in model.results or name in NEEDS_MORE:
            continue
        found.append((*path, name))
        inner = subsection(model, name)
        if inner is not None:
            found += keys_of(inner, (*path, name))
    return found


def written(section: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key in a config."""
    found = []
    for name, value in section.items():
        found.append((*path, name))
        if isinstance(value, dict) and name != "kwargs":
            found += written(value, (*path, name))
    return found


def changed(config: dict, path: tuple[str, ...], value: object) -> dict:
    config = copy.deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner[name] = inner.get(name) or {}
        inner = inner[name]
    inner[path[-1]] = value
    return config


def value_at(config: dict, path: tuple[str, ...]) -> object:
    found: object = config
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def misspelled(config: dict, path: tuple[str, ...]) -> dict:
    config = copy.deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    inner[f"{path[-1]}x"] = inner.pop(path[-1])
    return config


def complaints(config: dict) -> list[str]:
    with pytest.raises(xds.ConfigError) as error:
        parse_config(config, world_size=WORLD_SIZE)
    return list(error.value.complaints)


@pytest.mark.parametrize("name", RICH)
def test_the_configs_are_right(name):
    parse_config(RICH[name], world_size=WORLD_SIZE)


@pytest.mark.parametrize("name", RICH)
@pytest.mark.parametrize("wrong", [[[]], "8 ranks", {"x": {}}], ids=["list", "text", "object"])
def test_a_wrong_value_is_one_complaint(name, wrong):
    every = keys_of(Config) if name == next(iter(RICH)) else []
    for path in dict.fromkeys([*every, *written(RICH[name])]):
        if name == "elastic" and path[0] in OWN_BATCH:
            continue  # refused, however right it is
        if isinstance(wrong, dict) and isinstance(value_at(RICH[name], path), dict):
            continue  # the section would be another one
        try:
            parse_config(changed(RICH[name], path, wrong), world_size=WORLD_SIZE)
        except xds.ConfigError as error:
            found = list(error.complaints)
        else:
            continue  # text may be any text
        here = ".".join(path)
        assert len(found) == 1 and found[0].startswith((f"{here} = ", f"{here}.x = ")), found


@pytest.mark.parametrize("name", RICH)
def test_a_mistyped_key_is_one_complaint(name):
    for path in written(RICH[name]):
        found = complaints(misspelled(RICH[name], path))
        here = f"{'.'.join(path)}x"
        assert len(found) == 1 and found[0].startswith(f"{here} = "), (path, found)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"train_batch_size": "8"}, "not text: write 8 without quotes"),
        ({"train_batch_size": 8, "optimizer": []}, "must be an object {...}"),
        ({"train_batch_size": 8, "optimizer": {"typ": "Adam"}}, 'did you mean "type"?'),
        ({"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": 3}}, "an object"),
        ({"batch_size": 8}, 'did you mean "train_batch_size"?'),
        ({"train_batch_size": 8, "fp16": {"enabled": "auto"}}, "only an integration"),
    ],
)
def test_what_is_missing_only_because_of_another_mistake_is_not_said(config, says):
    (complaint,) = complaints(config)
    assert says in complaint
