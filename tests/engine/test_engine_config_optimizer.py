"""The sections optimizer and scheduler: names, arguments, refusals."""

import inspect

import pytest
import torch

import xds
from xds.engine import config_optimizer, config_scheduler, schedules
from xds.engine.config import parse_config
from xds.ops.adam import Adam
from xds.ops.config_rules import Rule
from xds.ops.lamb import Lamb
from xds.ops.lion import Lion
from xds.ops.muon import Muon


def read(section, type_, params=None):
    source = {"train_batch_size": 8, section: {"type": type_, "params": params or {}}}
    return getattr(parse_config(source), section)


def complaints(section, type_, params=None):
    with pytest.raises(xds.ConfigError) as caught:
        read(section, type_, params)
    return caught.value.complaints


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("adam", "Adam"),
        ("ADAMW", "AdamW"),
        ("Sgd", "SGD"),
        ("adagrad", "Adagrad"),
        ("LION", "Lion"),
        ("LAMB", "Lamb"),
        ("muon", "Muon"),
        ("nadam", "NAdam"),
        ("RMSprop", "RMSprop"),
        ("Adafactor", "Adafactor"),
    ],
)
def test_optimizer_names_in_any_case(given, canonical):
    assert read("optimizer", given).type == canonical


@pytest.mark.parametrize(
    ("type_", "says"),
    [
        ("AdmaW", "did you mean Adam"),
        ("Lmab", "did you mean Lamb"),
        ("OneBitAdam", "1-bit optimizers are not there yet"),
        ("OnebitAdam", "1-bit optimizers are not there yet"),
        ("ZeroOneAdam", "not there yet"),
        ("OneBitLamb", "not there yet"),
        ("MuAdam", "muP"),
        ("LBFGS", "several evaluations"),
        ("SparseAdam", "use Adam"),
        ("qqqqqq", "use Adam, AdamW, SGD"),
    ],
)
def test_optimizers_that_are_refused(type_, says):
    (complaint,) = complaints("optimizer", type_)
    assert complaint.startswith(f'optimizer.type = "{type_}": ')
    assert says in complaint


@pytest.mark.parametrize("name", config_optimizer.BUILT_IN)
def test_every_argument_that_takes_effect_is_one_of_the_optimizer(name):
    own = {"Adam": Adam, "AdamW": Adam, "Lamb": Lamb, "Lion": Lion, "Muon": Muon}
    built = own.get(name) or getattr(torch.optim, name)
    table = config_optimizer.BUILT_IN[name]
    read = {key for key, entry in table.items() if isinstance(entry, Rule)}
    assert read <= set(inspect.signature(built).parameters)


@pytest.mark.parametrize("name", config_scheduler.BUILT_IN)
def test_every_argument_of_a_schedule_is_known(name):
    parameters = set(inspect.signature(getattr(schedules, name)).parameters)
    assert set(config_scheduler.BUILT_IN[name]) == parameters - {"optimizer"}


def test_the_named_classes_of_torch_exist():
    assert all(hasattr(torch.optim, name) for name in config_optimizer.TORCH_OPTIMIZERS)
    names = config_scheduler.TORCH_SCHEDULERS
    assert all(hasattr(torch.optim.lr_scheduler, name) for name in names)


def test_a_section_without_type():
    with pytest.raises(xds.ConfigError, match="optimizer.type: is missing"):
        parse_config({"optimizer": {"params": {"lr": 1e-3}}})
    with pytest.raises(xds.ConfigError, match="scheduler.type: is missing"):
        parse_config({"scheduler": {}})


@pytest.mark.parametrize(
    ("type_", "name", "value", "need"),
    [
        ("Adam", "lr", "1e-3", "must be a number, at least 0, not text: write 1e-3 without quotes"),
        ("Adam", "lr", -1, "at least 0"),
        ("Adam", "betas", [0.9], "must be a list of 2"),
        ("Adam", "betas", [0.9, 1.5], "at most 1"),
        ("Adam", "eps", True, "must be a number"),
        ("Adam", "bias_correction", 1, "must be true or false"),
        ("Adam", "amsgrad", True, "AMSGrad is not supported"),
        ("AdamW", "max_grad_norm", 1.0, "gradient_clipping"),
        ("RMSprop", "max_grad_norm", 1.0, "gradient_clipping"),
        ("RMSprop", "lr", "x", "must be a number"),
        ("Adam", "weight_decya", 0.1, 'did you mean "weight_decay"?'),
        ("Lion", "eps", 1e-8, "unknown key"),
        ("SGD", "nesterov", True, "needs momentum above 0"),
        ("Lamb", "min_coeff", 20, "must not exceed max_coeff"),
        ("Muon", "ns_steps", 0, "at least 1"),
    ],
)
def test_optimizer_arguments_that_are_refused(type_, name, value, need):
    params = {name: value, **({"max_coeff": 10} if type_ == "Lamb" else {})}
    (complaint,) = complaints("optimizer", type_, params)
    assert complaint.startswith(f"optimizer.params.{name} = ")
    assert need in complaint


def test_only_arguments_that_take_effect_are_kept():
    params = {
        "lr": 1,
        "betas": [0.8, 0.999],
        "torch_adam": True,
        "adam_w_mode": True,
        "amsgrad": False,
        "max_grad_norm": 0.0,
        "bias_correction": False,
    }
    assert read("optimizer", "AdamW", params).params == {
        "lr": 1.0,
        "betas": (0.8, 0.999),
        "bias_correction": False,
    }
    assert read("optimizer", "Adam", {"adam_w_mode": False}).params == {"adam_w_mode": False}
    assert read("optimizer", "NAdam", {"momentum_decay": 4e-3}).params == {"momentum_decay": 4e-3}


@pytest.mark.parametrize(
    ("params", "noted"),
    [
        ({"weight_decay": 0.1}, True),
        ({"weight_decay": 0.0}, False),
        ({"weight_decay": 0.1, "adam_w_mode": False}, False),
    ],
)
def test_adam_says_that_its_decay_is_decoupled(params, noted):
    config = parse_config({"optimizer": {"type": "Adam", "params": params}})
    assert any("decoupled" in note for note in config.notes) is noted


@pytest.mark.parametrize(
    ("type_", "params"),
    [
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_staircase": True}),
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_momentum": False}),
        ("WarmupLR", {"warmup_max_lr": None, "warmup_type": "linear"}),
        ("WarmupLR", {"warmup_min_lr": [0, 1e-5], "warmup_max_lr": [1e-3, 1e-4]}),
        ("WarmupDecayLR", {"total_num_steps": 1e4, "warmup_num_steps": 100}),
        ("WarmupCosineLR", {"total_num_steps": 100, "cos_min_ratio": 0.1}),
        ("CosineAnnealingLR", {"T_max": 100}),
    ],
)
def test_schedules_that_are_accepted(type_, params):
    section = read("scheduler", type_.lower(), params)
    assert section.type == type_
    assert set(section.params) == set(params)


@pytest.mark.parametrize(
    ("type_", "params", "complaint"),
    [
        ("WarmpuLR", {}, 'scheduler.type = "WarmpuLR": no schedule has this name; did you mean W'),
        ("LambdaLR", {}, 'scheduler.type = "LambdaLR": takes functions'),
        ("ReduceLROnPlateau", {}, 'scheduler.type = "ReduceLROnPlateau": needs a metric'),
        ("OneCycle", {"cycle_min_lr": 0}, "scheduler.params.cycle_max_lr: is missing"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: is missing"),
        ("WarmupCosineLR", {}, "scheduler.params.total_num_steps: is missing"),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps = 0: must be"),
        ("WarmupLR", {"warmup_type": "cubic"}, 'scheduler.params.warmup_type = "cubic": must be'),
        ("WarmupLR", {"warmup_steps": 10}, "scheduler.params.warmup_steps = 10: unknown key"),
    ],
)
def test_schedules_that_are_refused(type_, params, complaint):
    (found,) = complaints("scheduler", type_, params)
    assert found.startswith(complaint)


def test_a_warm_up_longer_than_the_schedule_is_noted():
    params = {"total_num_steps": 10, "warmup_num_steps": 20}
    config = parse_config({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert any("never leaves its warm-up" in note for note in config.notes)
