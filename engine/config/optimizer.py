"""The config section `optimizer`: known types, their arguments, and refused types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, final

from pydantic import Field

from ...utils.schema.keys import Entry, NoEffect, Refused, Report
from ...utils.schema.rules import (
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    list_of,
    number,
    one_of,
    or_auto,
    whole,
)
from ...utils.schema.section import Section
from . import torch_classes
from .params import RATE, ClassTable, Param, read_params

BESIDE_PARAMS = "its place is optimizer.params, in DeepSpeed too"


@final
class OptimizerConfig(Section):
    """The optimizer that the engine builds if the script passes none."""

    others: ClassVar[Mapping[str, Entry]] = {
        "legacy_fusion": NoEffect(FLAG, "the update is always one fused pass", same=(False,)),
        **dict.fromkeys(
            ("adam_w_mode", "amsgrad", "bias_correction", "torch_adam"),
            NoEffect(FLAG, BESIDE_PARAMS),
        ),
    }

    type: Annotated[str, TEXT] = Field(
        "", description="name of the optimizer, in any case; must be given"
    )
    params: Annotated[dict[str, Any], OBJECT] = Field(
        default_factory=dict, description="its arguments"
    )


TORCH_DECAY = 0.01  # the default of torch.optim.AdamW
FUSED = "there is one implementation, and it is fused"
_LR = RATE
_DECAY = number(0)
_EPS = number(0)
# an element without gradients would be 0 / 0, and others share its norm or its message
_SHARED_EPS = number(above=0)
_BETA = number(0, below=1)
_BETAS = list_of(_BETA, 2, 2)
_AMSGRAD = Refused(FLAG, "AMSGrad is not supported; set it to false", harmless=(False,))
_MAX_GRAD_NORM = Refused(
    NUMBER, "set the top-level key gradient_clipping instead", harmless=(0, 0.0)
)
_ALL: dict[str, Param] = {
    "lr": _LR,
    "weight_decay": _DECAY,
    "max_grad_norm": _MAX_GRAD_NORM,
    "fused": NoEffect(FLAG, FUSED, same=(True,)),
    "foreach": NoEffect(FLAG, FUSED, same=(False,)),
    "capturable": NoEffect(FLAG, "the update is not captured", same=(False,)),
    "set_grad_none": NoEffect(FLAG, "gradients stay in their flat buffers"),
    "maximize": Refused(FLAG, "negate the loss instead", harmless=(False,)),
    "differentiable": Refused(
        FLAG, "differentiating through the update is not supported; set it to false", (False,)
    ),
}
_ADAM: dict[str, Param] = {
    **_ALL,
    "betas": _BETAS,
    "eps": _EPS,
    "bias_correction": FLAG,
    "amsgrad": _AMSGRAD,
    "torch_adam": FLAG,
    "fp32_optimizer_states": NoEffect(FLAG, "optimizer states are always fp32", same=(True,)),
    "eps_inside_sqrt": Refused(FLAG, "eps is added outside the root", harmless=(False,)),
    "disable_fused_adam": NoEffect(FLAG, FUSED, same=(False,)),
}

_MESSAGES = "messages are sent by the backend of torch.distributed, on any device"
_ONE_BIT: dict[str, Param] = {
    "cuda_aware": NoEffect(FLAG, _MESSAGES),
    "comm_backend_name": NoEffect(TEXT, _MESSAGES),
    "eps": _SHARED_EPS,
    "bias_correction": FLAG,
    "betas": _BETAS,
    "amsgrad": _AMSGRAD,
    "eps_inside_sqrt": Refused(FLAG, "eps is added outside the root", harmless=(False,)),
}
_FREEZE_STEP = or_auto(whole(1))

_BUILT_IN: dict[str, dict[str, Param]] = {
    "Adam": {**_ADAM, "adam_w_mode": FLAG},
    "AdamW": {
        **_ADAM,
        "adam_w_mode": NoEffect(FLAG, "AdamW always decouples weight decay", same=(True,)),
    },
    "SGD": {**_ALL, "momentum": number(0), "dampening": NUMBER, "nesterov": FLAG},
    "Adagrad": {
        **_ALL,
        "eps": _EPS,
        "lr_decay": number(0),
        "initial_accumulator_value": number(0),
        "amsgrad": _AMSGRAD,
    },
    "Lion": {**_ALL, "betas": _BETAS},
    "Lamb": {
        **_ALL,
        "betas": _BETAS,
        "eps": _SHARED_EPS,
        "bias_correction": FLAG,
        "amsgrad": _AMSGRAD,
        "max_coeff": number(above=0),
        "min_coeff": number(0),
        "eps_inside_sqrt": Refused(FLAG, "eps is added outside the root", harmless=(False,)),
    },
    "Muon": {
        **_ALL,
        "muon_lr": _LR,
        "adam_lr": _LR,
        "momentum": _BETA,
        "nesterov": FLAG,
        "ns_steps": whole(1),
        "ns_method": NoEffect(
            one_of("gram", "standard"), "both orthogonalize; there is one implementation"
        ),
        "betas": _BETAS,
        "eps": _EPS,
    },
    "OneBitLamb": {
        **_ALL,
        **_ONE_BIT,
        "freeze_step": _FREEZE_STEP,
        "max_coeff": number(above=0),
        "min_coeff": number(0),
        "coeff_beta": _BETA,
        "factor_max": number(above=0),
        "factor_min": number(0),
        "factor_threshold": number(0, 1),
    },
    "OneBitAdam": {**_ALL, **_ONE_BIT, "freeze_step": _FREEZE_STEP},
}

# they use norms or products of whole tensors, so an element's update depends on others
WHOLE_TENSOR = ("Lamb", "Muon", "OneBitLamb")

OPTIMIZERS = ClassTable(
    section="optimizer",
    what="optimizer",
    example="AdamW",
    built_in=_BUILT_IN,
    from_torch=torch_classes.OPTIMIZERS,
    refused={
        **dict.fromkeys(
            ("MuAdam", "MuAdamW", "MuSGD"),
            "muP optimizers are not supported yet; give parameter groups their own lr instead",
        ),
        "LBFGS": "needs several loss evaluations per step, but the engine does one; use AdamW",
        "ZeroOneAdam": "0/1 Adam was removed, because it missed its loss; use OneBitAdam with freeze_step",
        "SparseAdam": "sparse gradients are not supported yet; use Adam",
    },
    other_names={
        **dict.fromkeys(("fusedadam", "deepspeedcpuadam", "adamw_torch", "adamw_hf"), "AdamW"),
        **dict.fromkeys(("adamw_torch_fused", "adamw_apex_fused", "torch_adamw"), "AdamW"),
        **dict.fromkeys(("fusedlion", "deepspeedcpulion"), "Lion"),
        "fusedlamb": "Lamb",
        "deepspeedcpuadagrad": "Adagrad",
    },
)


def check_optimizer(given: OptimizerConfig, report: Report) -> OptimizerConfig:
    """The section with the canonical type and only the arguments that take effect."""
    name = OPTIMIZERS.find(given.type, report)
    if name is None:
        return given
    table = OPTIMIZERS.table(name)
    params = read_params(table, given.params, "optimizer.params", report)
    # DeepSpeed builds torch.optim.AdamW then, and torch.optim.Adam if adam_w_mode is false
    if params.pop("torch_adam", False) and params.get("adam_w_mode", True):
        if "weight_decay" not in params:
            params["weight_decay"] = TORCH_DECAY
            report.notes.append(
                f"optimizer.params.torch_adam = true: weight_decay is {TORCH_DECAY}, torch's default"
            )
    _check_together(name, params, report)
    return OptimizerConfig.model_construct(type=name, params=params)


def _check_together(name: str, params: Mapping[str, Any], report: Report) -> None:
    if name == "Adam" and params.get("adam_w_mode", True) and params.get("weight_decay"):
        report.notes.append(
            "optimizer.type = Adam: weight decay is decoupled, as in AdamW and as DeepSpeed does; "
            "set adam_w_mode to false for L2"
        )
    if name == "SGD" and params.get("nesterov") and not report.complaints:
        if not params.get("momentum") or params.get("dampening"):
            report.complain(
                "optimizer.params.nesterov",
                True,
                "needs momentum above 0 and dampening 0; set both, or nesterov to false",
            )
    for lowest, highest in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
        low, high = params.get(lowest), params.get(highest)
        if low is not None and high is not None and low > high:
            report.complain(
                f"optimizer.params.{lowest}",
                low,
                f"must not exceed {highest} ({high:g}); swap the two",
            )
