"""`deepspeed.ops.lamb`: DeepSpeed's constructor for xds's LAMB, to pass to `initialize(optimizer=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...ops.optim.lamb import Lamb
from ...utils.errors import UsageError
from ..missing import placeholder


def FusedLamb(  # noqa: PLR0913 (DeepSpeed's arguments)
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
) -> Lamb:
    """LAMB, at every stage and precision."""
    asked = {
        "eps_inside_sqrt": eps_inside_sqrt,
        "max_grad_norm": max_grad_norm,
        "amsgrad": amsgrad,
    }
    for name, value in asked.items():
        if value:
            raise UsageError(
                f"FusedLamb({name}={value}): not covered; leave it out"
                + (" and set gradient_clipping in the config" if name == "max_grad_norm" else "")
            )
    return Lamb(
        params,
        lr,
        betas,
        eps,
        weight_decay,
        bias_correction=bias_correction,
        max_coeff=max_coeff,
        min_coeff=min_coeff,
    )


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)

# DeepSpeed has modules inside, which the table of names creates; not needed where this becomes a folder
__path__: list[str] = []
