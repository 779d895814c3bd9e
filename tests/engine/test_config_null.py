"""null in a config means unset, and "auto" for a type is one complaint."""

import pytest

import xds
from xds.engine.config.config import Config, parse_config
from xds.utils.schema.section import Section, subsection

SMALL = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}


def paths_of(model: type[Section], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key that xds reads."""
    paths = []
    for name in model.model_fields:
        inner = subsection(model, name)
        if inner is not None:
            paths += paths_of(inner, (*path, name))
        elif name not in model.results:
            paths.append((*path, name))
    return paths


def nested(path: tuple[str, ...], value: object) -> dict:
    return {path[0]: nested(path[1:], value) if len(path) > 1 else value}


NEEDS = {"zeropp_loco_param": {"stage": 1, "zero_quantized_gradients": True}}


def with_needs(config: dict, path: tuple[str, ...]) -> dict:
    """With the keys without which this one is refused."""
    for key in set(path) & set(NEEDS):
        config[path[0]] |= NEEDS[key]
    return config


def complaints(config: dict) -> list[str]:
    with pytest.raises(xds.ConfigError) as error:
        parse_config(config, world_size=1)
    return list(error.value.complaints)


@pytest.mark.parametrize(
    "path",
    [path for path in paths_of(Config) if path[0] not in ("optimizer", "scheduler")],
    ids=".".join,
)
def test_null_is_the_same_as_no_key(path):
    without = nested(path[:-1], {}) if len(path) > 1 else {}
    found = parse_config(with_needs(nested(path, None), path))
    assert found.as_dict() == parse_config(with_needs(without, path)).as_dict()


@pytest.mark.parametrize(
    "section, given",
    [
        ("optimizer", {"type": "AdamW", "params": {"lr": None, "betas": None, "fused": None}}),
        ("optimizer", {"type": "RMSprop", "params": {"lr": None, "max_grad_norm": None}}),
        ("optimizer", {"type": "AdamW", "params": None}),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": None}}),
        ("scheduler", {"type": "PolynomialLR", "params": None}),
    ],
)
def test_arguments_that_are_null_are_left_out(section, given):
    config = parse_config({**SMALL, section: given}, world_size=1)
    assert getattr(config, section).params == {}


def test_a_required_key_that_is_null_is_missing():
    assert complaints({**SMALL, "train_micro_batch_size_per_gpu": None})[0].startswith(
        "train_batch_size: no batch size is given"
    )
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": None}}
    assert complaints({**SMALL, "scheduler": scheduler}) == [
        "scheduler.params.total_num_steps: is missing; it has no default"
    ]
    assert complaints({**SMALL, "optimizer": {"type": None}}) == [
        "optimizer.type: is missing; write for example AdamW"
    ]


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_type_that_is_auto_is_one_complaint(section):
    (complaint,) = complaints({**SMALL, section: {"type": "auto"}})
    assert complaint.startswith(f'{section}.type = "auto": only an integration')
