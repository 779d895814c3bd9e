"""Arguments of the classes of torch.optim and torch.optim.lr_scheduler that a config may name."""

from __future__ import annotations

from ...utils.schema.keys import Refused
from ...utils.schema.rules import (
    FLAG,
    NULL,
    NUMBER,
    Rule,
    either,
    list_of,
    number,
    one_of,
    whole,
)
from .params import RATE, Param

# The names are those of torch's constructors, and the bounds are where torch, or arithmetic, fails.
_EPS = number(0)
_BETAS = list_of(number(0, below=1), 2, 2)
_COMMON: dict[str, Param] = {
    "lr": RATE,
    "weight_decay": number(0),
    "max_grad_norm": Refused(
        NUMBER, "set the top-level key gradient_clipping instead", harmless=(0, 0.0)
    ),
    "foreach": either(FLAG, NULL),
    "maximize": FLAG,
}
_ALL: dict[str, Param] = {
    **_COMMON,
    "capturable": FLAG,
    "differentiable": Refused(
        FLAG, "differentiating through the update is not supported; set it to false", (False,)
    ),
}


def _read_etas(value: object) -> object:
    down, up = list_of(number(above=0), 2, 2).read(value)
    if not down < 1 < up:
        raise ValueError(f"must be {_ETAS.need}")
    return down, up


def _read_step_sizes(value: object) -> object:
    least, most = list_of(number(above=0), 2, 2).read(value)
    if least > most:
        raise ValueError(f"must be {_STEP_SIZES.need}")
    return least, most


def _read_two_eps(value: object) -> object:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"must be {_TWO_EPS.need}")
    return either(_EPS, NULL).read(value[0]), _EPS.read(value[1])


_ETAS = Rule("a list of two numbers, one between 0 and 1 and one above 1", _read_etas)
_STEP_SIZES = Rule("a list of two numbers above 0, the smaller one first", _read_step_sizes)
_TWO_EPS = Rule("a list of a number or null, and a number, each at least 0", _read_two_eps)

OPTIMIZERS: dict[str, dict[str, Param]] = {
    "ASGD": {**_ALL, "lambd": NUMBER, "alpha": NUMBER, "t0": NUMBER},
    "Adadelta": {**_ALL, "rho": number(0, 1), "eps": _EPS},
    "Adafactor": {**_COMMON, "beta2_decay": number(most=0), "eps": _TWO_EPS, "d": number(1)},
    "Adamax": {**_ALL, "betas": _BETAS, "eps": _EPS},
    "NAdam": {
        **_ALL,
        "betas": _BETAS,
        "eps": _EPS,
        "momentum_decay": number(0),
        "decoupled_weight_decay": FLAG,
    },
    "RAdam": {**_ALL, "betas": _BETAS, "eps": _EPS, "decoupled_weight_decay": FLAG},
    "RMSprop": {
        **_ALL,
        "alpha": number(0),
        "eps": _EPS,
        "momentum": number(0),
        "centered": FLAG,
    },
    "Rprop": {
        **{name: entry for name, entry in _ALL.items() if name != "weight_decay"},
        "etas": _ETAS,
        "step_sizes": _STEP_SIZES,
    },
}

_RATES = either(RATE, list_of(RATE, 1))
_SHARES = either(number(0, 1), list_of(number(0, 1), 1))
_STEPS = whole(1)
_MAYBE_STEPS = either(_STEPS, NULL)
_START: dict[str, Param] = {"last_epoch": one_of(-1)}

SCHEDULERS: dict[str, dict[str, Param]] = {
    "StepLR": {**_START, "step_size": _STEPS, "gamma": number(0)},
    "MultiStepLR": {**_START, "milestones": list_of(whole(0)), "gamma": number(0)},
    "ConstantLR": {**_START, "factor": number(0, 1), "total_iters": whole(0)},
    "LinearLR": {
        **_START,
        "start_factor": number(above=0, most=1),
        "end_factor": number(0, 1),
        "total_iters": whole(0),
    },
    "ExponentialLR": {**_START, "gamma": number(0)},
    "PolynomialLR": {**_START, "total_iters": whole(0), "power": NUMBER},
    "CosineAnnealingLR": {**_START, "T_max": _STEPS, "eta_min": RATE},
    "CosineAnnealingWarmRestarts": {
        **_START,
        "T_0": _STEPS,
        "T_mult": _STEPS,
        "eta_min": RATE,
    },
    "CyclicLR": {
        **_START,
        "base_lr": _RATES,
        "max_lr": _RATES,
        "step_size_up": _STEPS,
        "step_size_down": _MAYBE_STEPS,
        "mode": one_of("triangular", "triangular2", "exp_range"),
        "gamma": number(0),
        "scale_fn": NULL,
        "scale_mode": one_of("cycle", "iterations"),
        "cycle_momentum": FLAG,
        "base_momentum": _SHARES,
        "max_momentum": _SHARES,
    },
    "OneCycleLR": {
        **_START,
        "max_lr": _RATES,
        "total_steps": _MAYBE_STEPS,
        "epochs": _MAYBE_STEPS,
        "steps_per_epoch": _MAYBE_STEPS,
        "pct_start": number(0, 1),
        "anneal_strategy": one_of("cos", "linear"),
        "cycle_momentum": FLAG,
        "base_momentum": _SHARES,
        "max_momentum": _SHARES,
        "div_factor": number(above=0),
        "final_div_factor": number(above=0),
        "three_phase": FLAG,
    },
}
REQUIRED = {
    "StepLR": ("step_size",),
    "MultiStepLR": ("milestones",),
    "ExponentialLR": ("gamma",),
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "CyclicLR": ("base_lr", "max_lr"),
    "OneCycleLR": ("max_lr",),
}

__all__ = ["OPTIMIZERS", "REQUIRED", "SCHEDULERS"]
