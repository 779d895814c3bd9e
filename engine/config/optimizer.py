"""The config section `optimizer`: the types of `ops/optim/config.py` and of torch, and refused ones.

The names of torch's arguments are those of the constructors. Bounds are where these, or arithmetic, fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Protocol, final

from pydantic import Field

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...ops.optim.config import (
    AT_LEAST_0,
    BETAS,
    DECAY,
    DIFFERENTIABLE,
    EPS,
    MAX_GRAD_NORM,
    RATE,
    REGISTERED,
)
from ...utils.schema.section import Entry, NoEffect, Report, Section
from ...utils.schema.values import (
    FLAG,
    NUMBER,
    TUPLE,
    Flag,
    Object,
    Positive,
    Share,
    Value,
    checked,
    needs,
)
from .classes import FLAG_OR_NULL, ClassTable

BESIDE_PARAMS = "its place is optimizer.params, in DeepSpeed too"
TORCH_DECAY = 0.01  # the default of torch.optim.AdamW

_TORCH: dict[str, Value] = {
    "lr": RATE,
    "weight_decay": DECAY,
    "max_grad_norm": MAX_GRAD_NORM,
    "foreach": FLAG_OR_NULL,
    "maximize": FLAG,
    "capturable": FLAG,
    "differentiable": DIFFERENTIABLE,
}
_ETAS = Annotated[
    tuple[Positive, Positive],
    needs("a list of two numbers, one between 0 and 1 and one above 1"),
    TUPLE,
    checked(lambda etas: etas[0] < 1 < etas[1]),
]
_STEP_SIZES = Annotated[
    tuple[Positive, Positive],
    needs("a list of two numbers above 0, the smaller one first"),
    TUPLE,
    checked(lambda sizes: sizes[0] <= sizes[1]),
]
_FROM_TORCH: dict[str, dict[str, Value]] = {
    "ASGD": {**_TORCH, "lambd": NUMBER, "alpha": NUMBER, "t0": NUMBER},
    "Adadelta": {**_TORCH, "rho": Value(Share), "eps": EPS},
    "Adamax": {**_TORCH, "betas": BETAS, "eps": EPS},
    "NAdam": {
        **_TORCH,
        "betas": BETAS,
        "eps": EPS,
        "momentum_decay": AT_LEAST_0,
        "decoupled_weight_decay": FLAG,
    },
    "RAdam": {**_TORCH, "betas": BETAS, "eps": EPS, "decoupled_weight_decay": FLAG},
    "RMSprop": {
        **_TORCH,
        "alpha": AT_LEAST_0,
        "eps": EPS,
        "momentum": AT_LEAST_0,
        "centered": FLAG,
    },
    "Rprop": {
        **{name: entry for name, entry in _TORCH.items() if name != "weight_decay"},
        "etas": Value(_ETAS),
        "step_sizes": Value(_STEP_SIZES),
    },
}

# names of bitsandbytes and transformers, in lower case, whose states the driver moves to the host page by page
PAGED = {
    **dict.fromkeys(("pagedadamw", "pagedadamw32bit", "paged_adamw", "paged_adamw_32bit"), "AdamW"),
    **dict.fromkeys(("pagedadam", "pagedadam32bit"), "Adam"),
    **dict.fromkeys(("pagedlion", "pagedlion32bit", "paged_lion", "paged_lion_32bit"), "Lion"),
}

OPTIMIZERS = ClassTable(
    section="optimizer",
    what="optimizer",
    example="AdamW",
    built_in={name: each.arguments for name, each in REGISTERED.items()},
    from_torch=_FROM_TORCH,
    required={},
    refused={
        **dict.fromkeys(
            ("MuAdam", "MuAdamW", "MuSGD"),
            "muP optimizers are not supported yet; give parameter groups their own lr instead",
        ),
        "LBFGS": "needs several loss evaluations per step, but the engine does one; use AdamW",
        "ZeroOneAdam": "0/1 Adam was removed, because it missed its loss; use OneBitAdam with freeze_step",
        "SparseAdam": "sparse gradients are not supported yet; use Adam",
    },
    other_names={alias: name for name, each in REGISTERED.items() for alias in each.aliases}
    | PAGED,
)


# names of bitsandbytes, torchao and transformers, in lower case -> the optimizer whose states have 8 bits
EIGHT_BITS = {
    **dict.fromkeys(("adamw8bit", "adamw_8bit", "adamw_bnb_8bit"), "AdamW"),
    **dict.fromkeys(("pagedadamw8bit", "paged_adamw_8bit"), "AdamW"),
    **dict.fromkeys(("adam8bit", "pagedadam8bit"), "Adam"),
    **dict.fromkeys(("lion8bit", "lion_8bit", "lion_bnb_8bit"), "Lion"),
    **dict.fromkeys(("pagedlion8bit", "paged_lion_8bit"), "Lion"),
}


class Neighbours(Protocol):
    """What the rules of this section read of the rest of the config."""

    @property
    def warmup_steps(self) -> int: ...


@final
class OptimizerConfig(Section):
    """The optimizer that the engine builds if the script passes none."""

    others: ClassVar[Mapping[str, Entry]] = {
        "legacy_fusion": NoEffect(Flag, "the update is always one fused pass", same=(False,)),
        **dict.fromkeys(
            ("adam_w_mode", "amsgrad", "bias_correction", "torch_adam"),
            NoEffect(Flag, BESIDE_PARAMS),
        ),
    }

    type: str = Field(
        "",
        description="name of the optimizer, in any case; must be given. AdamW8bit, Adam8bit and Lion8bit "
        "mean AdamW, Adam and Lion with state_dtype int8",
    )
    params: Object = Field(default_factory=dict, description="its arguments")

    @property
    def state_dtype(self) -> str:
        """Of states that have an element for each of a parameter."""
        return str(self.params.get("state_dtype", "fp32"))

    @classmethod
    def read_own(cls, values: dict[str, Any], path: str, report: Report) -> None:
        """Read the arguments of this type."""
        given, params = values.get("type"), values.get("params", {})
        meant = EIGHT_BITS.get(given.casefold()) if isinstance(given, str) else None
        if isinstance(given, str) and given.casefold().startswith("paged"):
            report.notes.append(
                f"optimizer.type = {given}: states have no pages; if they do not fit, set "
                "zero_optimization.offload_optimizer"
            )
        if meant is not None and isinstance(params, dict):
            states = params.get("state_dtype", "int8")
            if states != "int8":
                report.complain(
                    "optimizer.params.state_dtype",
                    states,
                    f"optimizer.type {given} means int8; choose {meant}, or remove the key",
                )
            values.update(type=meant, params={"state_dtype": "int8", **params})
        kind = OPTIMIZERS.read(values, report)
        if not kind:
            return
        params = values["params"]
        # DeepSpeed builds torch.optim.AdamW then, and torch.optim.Adam if adam_w_mode is false
        if params.pop("torch_adam", False) and params.get("adam_w_mode", True):
            if "weight_decay" not in params:
                params["weight_decay"] = TORCH_DECAY
                report.notes.append(
                    f"optimizer.params.torch_adam = true: weight_decay is {TORCH_DECAY}, torch's default"
                )
        if kind == "Adam" and params.get("adam_w_mode", True) and params.get("weight_decay"):
            report.notes.append(
                "optimizer.type = Adam: weight decay is decoupled, as in AdamW and as DeepSpeed does; "
                "set adam_w_mode to false for L2"
            )
        pairs = "min_coeff <= max_coeff", "factor_min <= factor_max"
        OPTIMIZERS.complain_order(params, report, *pairs)

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`: a one-bit optimizer freezes its variance after the warmup."""
        freeze = self.params.get("freeze_step")
        if self.type not in ONE_BIT_OPTIMIZERS or not isinstance(freeze, int):
            return
        warmup = config.warmup_steps
        if freeze < warmup:
            report.complain(
                "optimizer.params.freeze_step",
                freeze,
                f"the learning rate rises for {warmup} steps, and a variance that is frozen before does not "
                f'fit the gradients after them: set it to {warmup} at least, or to "auto"',
            )

    def check(self, report: Report) -> None:
        """Check what is missing, and arguments that exclude or need one another."""
        dim, heads = self.params.get("dim"), self.params.get("n_heads")
        if (dim is None) != (heads is None) or (dim and heads and dim % heads):
            report.complain(
                "optimizer.params.n_heads",
                heads,
                f"a head has dim / n_heads rows, and dim is {dim}: give both, dim as a multiple, or none",
            )
        OPTIMIZERS.complain_missing(self, report)
        needs_momentum = self.type == "SGD" and self.params.get("nesterov")
        if needs_momentum and (not self.params.get("momentum") or self.params.get("dampening")):
            report.complain(
                "optimizer.params.nesterov",
                True,
                "needs momentum above 0 and dampening 0; set both, or nesterov to false",
            )
