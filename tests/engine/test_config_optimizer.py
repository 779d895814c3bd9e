"""The sections optimizer and scheduler: names, arguments, refusals, and the defaults of DeepSpeed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import nn
from torch.optim import lr_scheduler

import xds
from xds.engine.config.config import parse_config
from xds.engine.config.optimizer import OPTIMIZERS, OptimizerConfig
from xds.engine.config.scheduler import SCHEDULERS
from xds.engine.optim import schedules
from xds.engine.optim.optimizers import read_groups, split_by_kind
from xds.ops.optim.config import REGISTERED


def read(section: str, type_: Any, **params: Any) -> Any:
    source = {"train_batch_size": 8, section: {"type": type_, "params": params}}
    return getattr(parse_config(source), section)


def complaints(section: str, type_: Any, **params: Any) -> list[str]:
    with pytest.raises(xds.ConfigError) as caught:
        read(section, type_, **params)
    return list(caught.value.complaints)


# ---- names and arguments of classes ----------------------------------------------------------------------

CLASSES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}


def test_names_are_read_in_any_case() -> None:
    for section, classes in CLASSES.items():
        for name in [*classes.built_in, *classes.from_torch]:
            given = {key: 2 for key in classes.required.get(name, ())}
            for spelled in (name, name.lower(), name.upper()):
                try:
                    assert read(section, spelled, **given).type == name
                except xds.ConfigError as error:  # an argument that is no number
                    assert f"{section}.params." in str(error) and ".type" not in str(error)


def test_every_argument_is_one_of_the_class_and_defaults_of_torch_are_accepted() -> None:
    for name in OPTIMIZERS.built_in:
        built = REGISTERED[name].load()
        assert REGISTERED[name].is_elementwise == built.is_elementwise, name
        known = {*OPTIMIZERS.arguments(name)}
        known -= {"torch_adam", "state_dtype"}  # a default of weight_decay, and the dtype of items
        assert known <= {*inspect.signature(built).parameters}, name
    for name, arguments in SCHEDULERS.built_in.items():
        parameters = inspect.signature(getattr(schedules, name)).parameters
        assert {*arguments} == {*parameters} - {"optimizer"}, name
    for classes, package in ((OPTIMIZERS, torch.optim), (SCHEDULERS, lr_scheduler)):
        for name, arguments in classes.from_torch.items():
            parameters = dict(inspect.signature(getattr(package, name)).parameters)
            del parameters["params" if classes is OPTIMIZERS else "optimizer"]
            # max_grad_norm is there for a message; torch does not have it
            assert {*arguments} - {"max_grad_norm"} == {*parameters}, name
            missing = {k for k, p in parameters.items() if p.default is inspect.Parameter.empty}
            assert missing == {*classes.required.get(name, ())}, name
            for key, each in parameters.items():
                entry = classes.arguments(name).get(key)
                if entry is not None and key not in missing and each.default is not None:
                    entry.read(each.default)


@pytest.mark.parametrize(
    ("section", "name", "params", "says"),
    [
        ("optimizer", "AdmaW", {}, 'type = "AdmaW": no optimizer has this name; did you mean Adam'),
        ("optimizer", "LBFGS", {}, "several loss evaluations"),
        ("optimizer", "Sophia", {}, "no optimizer has this name; use Adam, AdamW"),
        ("optimizer", None, {}, "optimizer.type: is missing; write for example AdamW"),
        ("optimizer", "Adam", {"lr": "1e-3"}, "not text: write 1e-3 without quotes"),
        ("optimizer", "Adam", {"betas": [0.9, 1.5]}, "below 1"),
        ("optimizer", "Adam", {"amsgrad": True}, "AMSGrad is not supported"),
        ("optimizer", "AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("optimizer", "Adam", {"weight_decya": 0.1}, 'did you mean "weight_decay"?'),
        ("optimizer", "Lion", {"eps": 1e-8}, "unknown key"),
        ("optimizer", "SGD", {"nesterov": True}, "needs momentum above 0"),
        ("optimizer", "Lamb", {"min_coeff": 20, "max_coeff": 10}, "must not exceed max_coeff"),
        ("optimizer", "Muon", {"ns_steps": 0}, "at least 1"),
        ("optimizer", "OnebitAdam", {"freeze_step": 0}, "freeze_step = 0: must be"),
        ("optimizer", "OneBitLamb", {"factor_min": 4, "factor_max": 0.1}, "not exceed factor_max"),
        ("optimizer", "RMSprop", {"alpha": "auto"}, "--auto optimizer.params.alpha=VALUE"),
        ("optimizer", "Rprop", {"etas": [1.2, 0.5]}, "one between 0 and 1 and one above 1"),
        ("optimizer", "Rprop", {"step_sizes": [5, 1]}, "the smaller one first"),
        ("optimizer", "Adafactor", {"eps": 1e-3}, "must be a list of a number or null"),
        ("optimizer", "AdamMini", {"dim": 8}, "n_heads = null: a head has dim / n_heads rows"),
        (
            "optimizer",
            "AdamMini",
            {"dim": 8, "n_heads": 3},
            "dim is 8: give both, dim as a multiple",
        ),
        ("optimizer", "schedule_free_adamw", {}, "did you mean AdamWScheduleFree?"),
        ("optimizer", "AdamWScheduleFree", {"betas": [0, 0.9]}, "above 0 and below 1"),
        ("optimizer", "NAdam", {"betas": [0.9, 1]}, "betas = [0.9, 1]: must be a list of 2"),
        ("optimizer", "NAdam", {"differentiable": True}, "not supported; set it to false"),
        ("scheduler", "cosine", {}, "did you mean WarmupCosineLR?"),
        ("scheduler", "ReduceLROnPlateau", {}, "needs a metric"),
        ("scheduler", None, {}, "scheduler.type: is missing"),
        ("scheduler", "OneCycle", {"cycle_min_lr": 0}, "params.cycle_max_lr: is missing"),
        ("scheduler", "WarmupDecayLR", {"total_num_steps": None}, "is missing; it has no default"),
        ("scheduler", "WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps = -1: must be"),
        ("scheduler", "WarmupLR", {"warmup_type": "cubic"}, 'warmup_type = "cubic": must be'),
        ("scheduler", "StepLR", {"step_siz": 3, "step_size": 3}, 'did you mean "step_size"?'),
        ("scheduler", "MultiStepLR", {"milestones": 3}, "milestones = 3: must be a list"),
        ("scheduler", "OneCycleLR", {"max_lr": 1}, "write it, or both epochs and steps_per_epoch"),
        ("scheduler", "LinearLR", {"last_epoch": 5}, "last_epoch = 5: must be -1"),
        ("scheduler", "CyclicLR", {"base_lr": 0, "max_lr": 1, "scale_fn": "f"}, "must be null"),
    ],
)
def test_a_wrong_name_or_argument_is_one_sentence(
    section: str, name: str | None, params: dict[str, Any], says: str
) -> None:
    (said,) = complaints(section, name, **params)
    assert says in said and said.startswith(f"{section}.{'params.' if params else 'type'}")


def test_only_arguments_that_take_effect_are_kept() -> None:
    params: dict[str, Any] = {
        "lr": 1,
        "betas": [0.8, 0.999],
        "torch_adam": True,
        "adam_w_mode": True,
        "amsgrad": False,
        "max_grad_norm": 0.0,
        "bias_correction": False,
        "eps": None,
    }
    assert read("optimizer", "AdamW", **params).params == {
        "lr": 1.0,
        "betas": (0.8, 0.999),
        "bias_correction": False,
        "weight_decay": 0.01,  # torch.optim.AdamW's, which torch_adam asks for
    }
    assert read("optimizer", "Adam", adam_w_mode=False).params == {"adam_w_mode": False}
    assert read("optimizer", "NAdam", momentum_decay=4e-3).params == {"momentum_decay": 4e-3}
    for step, wanted in ((100, 100), ("AUTO", "auto"), (1e3, 1000)):
        found = read("optimizer", "onebitadam", lr=1e-4, freeze_step=step, cuda_aware=False)
        assert found.params == {"lr": 1e-4, "freeze_step": wanted}
    schedules_read: list[tuple[str, dict[str, Any]]] = [
        ("WarmupLR", {"warmup_num_steps": 0}),
        ("WarmupLR", {"warmup_min_lr": [0, 1e-5], "warmup_max_lr": [1e-3, 1e-4]}),
        ("WarmupDecayLR", {"total_num_steps": 1e4, "warmup_num_steps": 100}),
        ("CosineAnnealingLR", {"T_max": 100}),
    ]
    for name, given in schedules_read:
        assert {*read("scheduler", name, **given).params} == {*given}
    assert read("scheduler", "WarmupLR", warmup_num_steps=None).params == {}


# ---- the optimizers of an engine -------------------------------------------------------------------------

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
    ("Lamb", {}, [{**_ADAM, "max_coeff": 10.0, "min_coeff": 0.01}]),
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
    split = split_by_kind(OptimizerConfig(type="Muon"), model, groups)
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


@pytest.mark.parametrize("kind", ["AdamW", "own"])
def test_a_group_that_is_added_after_initialize_is_refused(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
    own = None
    if kind == "own":
        own = torch.optim.RMSprop(model[0].parameters(), lr=0.1)
    else:
        config["optimizer"] = {"type": kind, "params": {"lr": 0.1}}
    first = None if own else list(model[0].parameters())
    engine = xds.initialize(model, config, model_parameters=first, optimizer=own)
    with pytest.raises(xds.UsageError, match="add_param_group after xds.initialize"):
        engine.optimizer.add_param_group({"params": list(model[1].parameters())})
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
