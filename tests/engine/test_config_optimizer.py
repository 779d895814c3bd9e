"""The sections optimizer and scheduler: names, arguments, refusals."""

import inspect
from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import nn

import xds
from xds.engine.config.config import parse_config
from xds.engine.config.optimizer import OPTIMIZERS
from xds.engine.config.scheduler import SCHEDULERS
from xds.engine.optim import schedules
from xds.engine.optim.optimizers import read_groups, split_for_muon
from xds.ops.optim.adam import Adam
from xds.ops.optim.lamb import Lamb
from xds.ops.optim.lion import Lion
from xds.ops.optim.muon import Muon
from xds.ops.optim.one_bit_adam import OneBitAdam
from xds.ops.optim.one_bit_lamb import OneBitLamb


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
        ("MuAdam", "muP"),
        ("LBFGS", "several loss evaluations"),
        ("SparseAdam", "use Adam"),
        ("zerooneadam", "use OneBitAdam"),
        ("qqqqqq", "use Adam, AdamW, SGD"),
    ],
)
def test_optimizers_that_are_refused(type_, says):
    (complaint,) = complaints("optimizer", type_)
    assert complaint.startswith(f'optimizer.type = "{type_}": ')
    assert says in complaint


@pytest.mark.parametrize("name", OPTIMIZERS.built_in)
def test_every_argument_that_takes_effect_is_one_of_the_optimizer(name):
    own = {"Adam": Adam, "AdamW": Adam, "Lamb": Lamb, "Lion": Lion, "Muon": Muon}
    own |= {"OneBitAdam": OneBitAdam, "OneBitLamb": OneBitLamb}
    built = own.get(name) or getattr(torch.optim, name)
    read = {*OPTIMIZERS.arguments(name)}
    only_a_default = {"torch_adam"}  # chooses that of weight_decay
    assert read - only_a_default <= set(inspect.signature(built).parameters)


@pytest.mark.parametrize("name", SCHEDULERS.built_in)
def test_every_argument_of_a_schedule_is_known(name):
    parameters = set(inspect.signature(getattr(schedules, name)).parameters)
    assert set(SCHEDULERS.built_in[name]) == parameters - {"optimizer"}


def test_the_named_classes_of_torch_exist():
    assert all(hasattr(torch.optim, name) for name in OPTIMIZERS.from_torch)
    names = SCHEDULERS.from_torch
    assert all(hasattr(torch.optim.lr_scheduler, name) for name in names)


def test_a_section_without_type():
    with pytest.raises(xds.ConfigError, match="optimizer.type: is missing"):
        parse_config({"optimizer": {"params": {"lr": 1e-3}}})
    with pytest.raises(xds.ConfigError, match="scheduler.type: is missing"):
        parse_config({"scheduler": {}})


@pytest.mark.parametrize(
    ("type_", "name", "value", "need"),
    [
        ("Adam", "lr", "1e-3", "not text: write 1e-3 without quotes"),
        ("Adam", "lr", -1, "at least 0"),
        ("Adam", "betas", [0.9], "must be a list of 2"),
        ("Adam", "betas", [0.9, 1.5], "below 1"),
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
        "weight_decay": 0.01,  # torch.optim.AdamW's, which torch_adam asks for
    }
    assert read("optimizer", "Adam", {"adam_w_mode": False}).params == {"adam_w_mode": False}
    assert read("optimizer", "NAdam", {"momentum_decay": 4e-3}).params == {"momentum_decay": 4e-3}


def test_torch_adam_is_noted_where_it_sets_the_weight_decay():
    for more, is_noted in (({}, True), ({"weight_decay": 0.1}, False)):
        section = {"type": "AdamW", "params": {"torch_adam": True, **more}}
        config = parse_config({"optimizer": section})
        assert any("weight_decay is 0.01, torch's" in note for note in config.notes) is is_noted
        assert config.without_effect == ()


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
        ("WarmupLR", {"warmup_num_steps": -1}, "scheduler.params.warmup_num_steps = -1: must be"),
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


# What DeepSpeed 0.19.8 gives each of its optimizers: type, arguments in the file, what each group then has.
# Muon has two groups: matrices, and all that AdamW updates.
_ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}
DEEPSPEED_DEFAULTS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("Adam", {}, [_ADAM]),
    ("AdamW", {}, [_ADAM]),
    ("Adam", {"torch_adam": True}, [{**_ADAM, "weight_decay": 0.01}]),
    ("AdamW", {"torch_adam": True}, [{**_ADAM, "weight_decay": 0.01}]),
    ("AdamW", {"torch_adam": True, "weight_decay": 0.1}, [{**_ADAM, "weight_decay": 0.1}]),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, [_ADAM]),
    ("Adam", {"torch_adam": False}, [_ADAM]),
    (
        "SGD",
        {},
        [{"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}],
    ),
    (
        "Adagrad",
        {},
        [
            {
                "lr": 1e-2,
                "lr_decay": 0,
                "eps": 1e-10,
                "weight_decay": 0,
                "initial_accumulator_value": 0,
            }
        ],
    ),
    ("Lion", {}, [{"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}]),
    (
        "Lamb",
        {},
        [{**_ADAM, "max_coeff": 10.0, "min_coeff": 0.01}],
    ),
    (
        "Muon",
        {},
        [
            {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5},
            {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
        ],
    ),
    ("Muon", {"lr": 0.1}, [{"lr": 0.1}, {"lr": 0.1}]),
    ("Muon", {"muon_lr": 0.1}, [{"lr": 0.1}, {"lr": 3e-4}]),
    ("Muon", {"adam_lr": 0.1}, [{"lr": 0.02}, {"lr": 0.1}]),
    ("Muon", {"lr": 0.1, "muon_lr": 0.2, "adam_lr": 0.3}, [{"lr": 0.2}, {"lr": 0.3}]),
    ("RMSprop", {}, [{"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0}]),
    ("NAdam", {}, [{"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "momentum_decay": 4e-3}]),
    ("RAdam", {}, [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}]),
    ("Adamax", {}, [{"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}]),
    ("Adadelta", {}, [{"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0}]),
    ("ASGD", {}, [{"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0}]),
    ("Rprop", {}, [{"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50)}]),
]


def _defaults_are_deepspeeds() -> None:
    for type_, params, wanted in DEEPSPEED_DEFAULTS:
        for precision in ("fp32", "bf16"):
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": type_, "params": params},
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": precision == "bf16"},
            }
            engine = xds.initialize(model, config)
            groups = [g for g in engine.optimizer.param_groups if g["params"]]
            assert len(groups) == len(wanted), (type_, params)
            for group, want in zip(groups, wanted, strict=True):
                got = {key: group[key] for key in want}
                assert got == want, (type_, params, precision, got)
            engine.destroy()


def test_the_defaults_of_every_optimizer_are_deepspeeds():
    run_ranks(_defaults_are_deepspeeds, 1)


def _muon_updates_matrices() -> None:
    """By DeepSpeed's rule, blocks or not; a group's own learning rate comes before all others."""
    model = nn.Sequential()
    for name, module in [
        ("embedding", nn.Embedding(8, 4)),
        ("conv", nn.Conv1d(4, 4, 3)),
        ("middle", nn.Linear(4, 4)),
        ("head", nn.Linear(4, 4)),
        ("lm_head", nn.Linear(4, 4)),
    ]:
        model.add_module(name, module)
    groups = read_groups(model, [{"params": list(model.parameters()), "lr": 0.5}])
    split = split_for_muon(model, groups)
    chosen = [
        n for n, p in model.named_parameters() if split.options[split.index[id(p)]]["use_muon"]
    ]
    assert chosen == ["conv.weight", "middle.weight", "head.weight"]
    section = {"type": "Muon", "params": {"lr": 0.1, "muon_lr": 0.2, "adam_lr": 0.3}}
    entries = [
        {"params": [model.middle.weight, model.middle.bias], "lr": 0.5},
        {"params": [model.head.weight, model.head.bias]},
    ]
    engine = xds.initialize(
        model, {"train_batch_size": 1, "optimizer": section}, model_parameters=entries
    )
    assert engine.get_lr() == [0.5, 0.5, 0.2, 0.3]
    engine.destroy()


def test_muon_updates_the_matrices_that_deepspeed_gives_it():
    run_ranks(_muon_updates_matrices, 1)


def test_a_compile_section_that_would_compile_nothing_is_refused():
    with pytest.raises(xds.ConfigError, match="compile.disable = false: .*compile.enabled to true"):
        parse_config({"train_batch_size": 1, "compile": {"disable": False}})
    assert not parse_config({"train_batch_size": 1, "compile": {"disable": True}}).compile.enabled


ONE_BIT = {"type": "OnebitAdam", "params": {"lr": 1e-4, "freeze_step": 100, "cuda_aware": False}}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage = 3: OneBitAdam sends"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            'offload_optimizer.device = "cpu": OneBitAdam computes its messages',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 101}}},
            "optimizer.params.freeze_step = 100: the learning rate rises for 101 steps",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
            "the learning rate rises for 2000 steps",
        ),
        ({"optimizer": {**ONE_BIT, "params": {"freeze_step": 0}}}, "freeze_step = 0: must be"),
        ({"optimizer": {**ONE_BIT, "params": {"eps": 0}}}, "optimizer.params.eps = 0: must be"),
        (
            {"optimizer": {**ONE_BIT, "params": {"betas": [0.9, 1.0]}}},
            "optimizer.params.betas = [0.9, 1.0]: must be",
        ),
        (
            {"optimizer": {"type": "OneBitLamb", "params": {"factor_min": 4, "factor_max": 0.1}}},
            "optimizer.params.factor_min = 4.0: must not exceed factor_max (0.1)",
        ),
    ],
)
def test_one_bit_optimizers_name_what_does_not_fit(more, says):
    with pytest.raises(xds.ConfigError) as raised:
        parse_config({"train_micro_batch_size_per_gpu": 1, "optimizer": ONE_BIT, **more})
    (complaint,) = raised.value.complaints
    assert says in complaint


@pytest.mark.parametrize("freeze_step", [100, "auto", "AUTO", 1e3])
def test_a_one_bit_optimizer_with_a_step_of_its_own(freeze_step):
    params = {**ONE_BIT["params"], "freeze_step": freeze_step}
    config = parse_config(
        {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "onebitadam", "params": params}}
    )
    assert config.optimizer.type == "OneBitAdam"
    wanted = freeze_step.casefold() if isinstance(freeze_step, str) else int(freeze_step)
    assert config.optimizer.params == {"lr": 1e-4, "freeze_step": wanted}
