"""Classes of torch in a config: their arguments are checked with everything else, before torch is imported."""

import inspect

import pytest
import torch
from torch.optim import lr_scheduler

import xds
from xds.engine.config.config import parse_config
from xds.engine.config.optimizer import OPTIMIZERS
from xds.engine.config.scheduler import SCHEDULERS

OWN = ("max_grad_norm",)  # for a message; torch does not have it


def signature_of(name):
    kind = getattr(torch.optim, name, None) or getattr(lr_scheduler, name)
    parameters = inspect.signature(kind).parameters
    return {key: each for key, each in parameters.items() if key not in ("params", "optimizer")}


@pytest.mark.parametrize(
    ("classes", "name"),
    [(classes, name) for classes in (OPTIMIZERS, SCHEDULERS) for name in classes.from_torch],
)
def test_the_arguments_are_torchs_and_its_defaults_are_accepted(classes, name):
    parameters = signature_of(name)
    assert {*classes.from_torch[name]} - {*OWN} == {*parameters}
    missing = {key for key, each in parameters.items() if each.default is inspect.Parameter.empty}
    assert missing == {*classes.required.get(name, ())}
    for key, each in parameters.items():
        entry = classes.arguments(name).get(key)
        if entry is not None and key not in missing and each.default is not None:
            entry.read(each.default)


@pytest.mark.parametrize(
    ("section", "name", "params", "complaint"),
    [
        ("optimizer", "RMSprop", {"alpha": "x"}, 'alpha = "x": must be a number, at least 0'),
        ("optimizer", "RMSprop", {"momentun": 0.9}, 'unknown key; did you mean "momentum"?'),
        ("optimizer", "rmsprop", {"eps": -1}, "eps = -1: must be a number, at least 0"),
        ("optimizer", "Rprop", {"etas": [1.2, 0.5]}, "one between 0 and 1 and one above 1"),
        ("optimizer", "Rprop", {"step_sizes": [5, 1]}, "the smaller one first"),
        ("optimizer", "Adafactor", {"eps": 1e-3}, "must be a list of a number or null"),
        ("optimizer", "NAdam", {"betas": [0.9, 1]}, "betas = [0.9, 1]: must be a list of 2"),
        ("optimizer", "NAdam", {"differentiable": True}, "not supported; set it to false"),
        ("scheduler", "StepLR", {}, "scheduler.params.step_size: is missing"),
        ("scheduler", "StepLR", {"step_siz": 3}, 'did you mean "step_size"?'),
        ("scheduler", "StepLR", {"step_size": 0}, "step_size = 0: must be a whole number"),
        ("scheduler", "MultiStepLR", {"milestones": 3}, "milestones = 3: must be a list"),
        ("scheduler", "OneCycleLR", {"max_lr": 1}, "write it, or both epochs and steps_per_epoch"),
        ("scheduler", "LinearLR", {"last_epoch": 5}, "last_epoch = 5: must be -1"),
        ("scheduler", "CyclicLR", {"base_lr": 0, "max_lr": 1, "scale_fn": "f"}, "must be null"),
    ],
)
def test_a_wrong_argument_is_one_complaint(section, name, params, complaint):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config({section: {"type": name, "params": params}})
    (found,) = caught.value.complaints
    assert found.startswith(f"{section}.params.") and complaint in found


def test_it_comes_with_all_other_complaints():
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(
            {
                "train_batch_size": 0,
                "optimizer": {"type": "RMSprop", "params": {"alpha": -1, "lr": "1"}},
                "scheduler": {"type": "StepLR", "params": {"step_size": 0}},
            }
        )
    assert len(caught.value.complaints) == 4


@pytest.mark.parametrize(
    ("section", "given", "meant"),
    [
        ("optimizer", "FusedAdam", "AdamW"),
        ("optimizer", "adamw_torch", "AdamW"),
        ("optimizer", "AdmW", "AdamW"),
        ("scheduler", "cosine", "WarmupCosineLR"),
        ("scheduler", "StpLR", "StepLR"),
    ],
)
def test_names_of_other_libraries_and_mistyped_ones(section, given, meant):
    with pytest.raises(xds.ConfigError, match=f"has this name; did you mean {meant}\\?"):
        parse_config({section: {"type": given}})


def test_a_name_that_is_like_no_other_gets_the_list_of_all():
    with pytest.raises(xds.ConfigError, match="no optimizer has this name; use Adam, AdamW"):
        parse_config({"optimizer": {"type": "Sophia"}})
