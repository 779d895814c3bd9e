"""The optimizers of xds, one row for each: what is known before a module is loaded.

The config, the engine and imports read it, and nothing here imports torch. A row names the arguments of the
constructor that a config may set. Bounds are where the constructor, or arithmetic, fails.
CONTRIBUTING.md adds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Literal, final

from pydantic import Field

from ...utils.schema.section import NoEffect, Refused
from ...utils.schema.values import (
    ANY_CASE,
    COUNT,
    FLAG,
    NUMBER,
    TUPLE,
    BelowOne,
    Count,
    Flag,
    InsideOne,
    Natural,
    NonNegative,
    Positive,
    Share,
    Text,
    Value,
    needs,
)

if TYPE_CHECKING:
    from .shard_optimizer import ShardOptimizer

Rate = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]  # of learning
RATE = Value(Rate)  # in a checkpoint as well
DECAY = EPS = AT_LEAST_0 = Value(NonNegative)
BETA = Value(BelowOne)
_BETAS_OF_AVERAGE = Value(  # the average is (y - (1 - beta1) z) / beta1
    Annotated[tuple[InsideOne, BelowOne], Field(fail_fast=True), TUPLE]
)
BETAS = Value(Annotated[tuple[BelowOne, BelowOne], Field(fail_fast=True), TUPLE])
FREEZE_STEP = Value(Count | Annotated[Literal["auto"], ANY_CASE])
MAX_GRAD_NORM = Refused(float, "set the top-level key gradient_clipping instead", harmless=(0, 0.0))
DIFFERENTIABLE = Refused(
    Flag, "differentiating through the update is not supported; set it to false", harmless=(False,)
)
STATE_DTYPE = Value(Annotated[Literal["fp32", "bf16", "int8"], ANY_CASE])
FUSED = "there is one implementation, and it is fused"
_MESSAGES = "messages are sent by the backend of torch.distributed, on any device"
# as eps: an element without gradients would be 0 / 0, and others share its norm
_ABOVE_0 = Value(Positive)


@final
@dataclass(frozen=True)
class Registration:
    """One optimizer.

    module, class_name: where it is: a file of this folder, loaded on first use.
    arguments: of `optimizer.params`, each with what is valid.
    aliases: its names in other libraries, in lower case.
    states: a checkpoint of another library that names no optimizer, and has these states, is one of it.
    is_elementwise: as the class's; False: an element's update depends on others of the parameter.
    matrix_flag: it has a formula for matrices, and groups of them have this key; AdamW updates the rest.
    is_torchs: torch's class of this name does the same, and steps where nothing is cast.
    rounds_masters: as the class's; masters may have 16 bits.
    """

    module: str
    class_name: str
    arguments: Mapping[str, Value]
    aliases: tuple[str, ...] = ()
    states: frozenset[str] = frozenset()
    is_elementwise: bool = True
    is_torchs: bool = False
    matrix_flag: str = ""
    rounds_masters: bool = False

    def load(self) -> type[ShardOptimizer]:
        """The class."""
        found: type[ShardOptimizer] = getattr(
            import_module(f".{self.module}", __package__), self.class_name
        )
        return found


_TWO_EPS = Annotated[
    tuple[NonNegative | None, NonNegative],
    needs("a list of a number or null, and a number, each at least 0"),
    TUPLE,
]
_ALL: dict[str, Value] = {
    "lr": RATE,
    "weight_decay": DECAY,
    "max_grad_norm": MAX_GRAD_NORM,
    "fused": NoEffect(Flag, FUSED, same=(True,)),
    "foreach": NoEffect(Flag, FUSED, same=(False,)),
    "capturable": NoEffect(Flag, "the update is not captured", same=(False,)),
    "set_grad_none": NoEffect(Flag, "gradients stay in their flat buffers"),
    "maximize": Refused(Flag, "negate the loss instead", harmless=(False,)),
    "differentiable": DIFFERENTIABLE,
}
_AMSGRAD = Refused(Flag, "AMSGrad is not supported; set it to false", harmless=(False,))
_EPS_INSIDE = Refused(Flag, "eps is added outside the root", harmless=(False,))
_ADAM: dict[str, Value] = {
    **_ALL,
    "betas": BETAS,
    "eps": EPS,
    "bias_correction": FLAG,
    "amsgrad": _AMSGRAD,
    "torch_adam": FLAG,
    "state_dtype": STATE_DTYPE,
    "fp32_optimizer_states": NoEffect(Flag, "state_dtype is the dtype of states", same=(True,)),
    "eps_inside_sqrt": _EPS_INSIDE,
    "disable_fused_adam": NoEffect(Flag, FUSED, same=(False,)),
}
_SHARES_NORMS: dict[str, Value] = {
    **_ALL,
    "betas": BETAS,
    "eps": _ABOVE_0,
    "bias_correction": FLAG,
    "amsgrad": _AMSGRAD,
    "eps_inside_sqrt": _EPS_INSIDE,
}
_COEFFICIENTS: dict[str, Value] = {"max_coeff": _ABOVE_0, "min_coeff": AT_LEAST_0}
_ONE_BIT: dict[str, Value] = {
    **_SHARES_NORMS,
    "cuda_aware": NoEffect(Flag, _MESSAGES),
    "comm_backend_name": NoEffect(Text, _MESSAGES),
    "freeze_step": FREEZE_STEP,
}
_LOW_RANK: dict[str, Value] = {
    **_ALL,
    "betas": BETAS,
    "eps": EPS,
    "rank": COUNT,
    "update_proj_gap": COUNT,
    "scale": _ABOVE_0,
}
_MOMENTS = frozenset(("exp_avg", "exp_avg_sq"))

# the first one with the states of a checkpoint is taken
REGISTERED: dict[str, Registration] = {
    "Adam": Registration(
        "adam", "Adam", {**_ADAM, "adam_w_mode": FLAG}, states=_MOMENTS, rounds_masters=True
    ),
    "AdamW": Registration(
        "adam",
        "Adam",
        {
            **_ADAM,
            "adam_w_mode": NoEffect(Flag, "AdamW always decouples weight decay", same=(True,)),
        },
        aliases=(
            *("fusedadam", "cpuadam", "deepspeedcpuadam", "adamw_torch", "adamw_hf"),
            *("adamw_torch_fused", "adamw_apex_fused", "torch_adamw"),
        ),
        rounds_masters=True,
    ),
    "SGD": Registration(
        "sgd",
        "SGD",
        {**_ALL, "momentum": AT_LEAST_0, "dampening": NUMBER, "nesterov": FLAG},
        states=frozenset(("momentum_buffer",)),
        is_torchs=True,
    ),
    "Adagrad": Registration(
        "adagrad",
        "Adagrad",
        {
            **_ALL,
            "eps": EPS,
            "lr_decay": AT_LEAST_0,
            "initial_accumulator_value": AT_LEAST_0,
            "amsgrad": _AMSGRAD,
        },
        aliases=("deepspeedcpuadagrad",),
        states=frozenset(("sum",)),
        is_torchs=True,
    ),
    "Lion": Registration(
        "lion",
        "Lion",
        {**_ALL, "betas": BETAS, "state_dtype": STATE_DTYPE},
        aliases=("fusedlion", "cpulion", "deepspeedcpulion"),
        states=frozenset(("exp_avg",)),
        rounds_masters=True,
    ),
    "AdamWScheduleFree": Registration(
        "schedule_free",
        "AdamWScheduleFree",
        {
            **_ALL,
            "betas": _BETAS_OF_AVERAGE,
            "eps": EPS,
            "warmup_steps": Value(Natural),
            "r": AT_LEAST_0,
            "weight_lr_power": AT_LEAST_0,
        },
        aliases=("schedule_free_adamw", "schedulefreeadamw"),
    ),
    "Lamb": Registration(
        "lamb",
        "Lamb",
        {**_SHARES_NORMS, **_COEFFICIENTS},
        aliases=("fusedlamb",),
        is_elementwise=False,
    ),
    "Muon": Registration(
        "muon",
        "Muon",
        {
            **_ALL,
            "muon_lr": RATE,
            "adam_lr": RATE,
            "momentum": BETA,
            "nesterov": FLAG,
            "ns_steps": COUNT,
            "ns_method": NoEffect(
                Annotated[Literal["gram", "standard"], ANY_CASE],
                "both orthogonalize; there is one implementation",
            ),
            "betas": BETAS,
            "eps": EPS,
        },
        is_elementwise=False,
        matrix_flag="use_muon",
    ),
    "Adafactor": Registration(
        "adafactor",
        "Adafactor",
        {
            **_ALL,
            "beta2_decay": Value(Annotated[float, Field(le=0, allow_inf_nan=False)]),
            "eps": Value(_TWO_EPS),
            "d": Value(Annotated[float, Field(ge=1, allow_inf_nan=False)]),
            "maximize": FLAG,
        },
        is_elementwise=False,
    ),
    "AdamMini": Registration(
        "adam_mini",
        "AdamMini",
        {
            **_ALL,
            "betas": BETAS,
            "eps": EPS,
            "dim": Value(Count | None),
            "n_heads": Value(Count | None),
        },
        aliases=("adam_mini",),
        is_elementwise=False,
    ),
    "GaLore": Registration(
        "low_rank",
        "GaLore",
        _LOW_RANK,
        aliases=("galoreadamw", "galore_adamw"),
        is_elementwise=False,
        matrix_flag="low_rank",
    ),
    "Apollo": Registration(
        "low_rank",
        "Apollo",
        {
            **_LOW_RANK,
            "scale_type": Value(Annotated[Literal["channel", "tensor"], ANY_CASE]),
            "seed": Value(Natural),
        },
        aliases=("apolloadamw", "apollo_adamw"),
        is_elementwise=False,
        matrix_flag="low_rank",
    ),
    "OneBitLamb": Registration(
        "one_bit_lamb",
        "OneBitLamb",
        {
            **_ONE_BIT,
            **_COEFFICIENTS,
            "coeff_beta": BETA,
            "factor_max": _ABOVE_0,
            "factor_min": AT_LEAST_0,
            "factor_threshold": Value(Share),
        },
        is_elementwise=False,
    ),
    "OneBitAdam": Registration("one_bit_adam", "OneBitAdam", _ONE_BIT),
}

__all__ = ["REGISTERED", "Registration"]
