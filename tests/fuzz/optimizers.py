"""The optimizers of the cases: what stands in the config, and the same in plain PyTorch.

Adam's eps is 1e-4: with a smaller one an element whose true gradient is 0 would take whole steps in the
direction of rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

EPS = 1e-4


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, program 1, as written there."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                direction = (one * mean + (1 - one) * param.grad).sign()
                param -= group["lr"] * (direction + group["weight_decay"] * param)
                mean.mul_(two).add_(param.grad, alpha=1 - two)


@dataclass(frozen=True)
class Kind:
    """`params` of the config's section beside lr and weight_decay; `plain` takes groups, lr, weight_decay.

    is_given: the engine gets an optimizer, not a section of the config. state: the tensor that gets compared.
    counts: a step depends on how many there were. is_sign: a step has one length, whatever the gradient's.
    reach: how many learning rates the first may be.
    """

    type: str
    params: dict[str, Any]
    plain: Callable[[Any, float, float], torch.optim.Optimizer]
    is_given: bool = False
    state: str | None = None
    is_sign: bool = False
    counts: bool = False
    reach: float = 1.0


OPTIMIZERS: dict[str, Kind] = {
    "AdamW": Kind(
        "AdamW",
        {"eps": EPS},
        lambda groups, lr, decay: torch.optim.AdamW(groups, lr=lr, eps=EPS, weight_decay=decay),
        counts=True,
        state="exp_avg",
    ),
    "Adam": Kind(
        "Adam",
        {"eps": EPS, "betas": [0.8, 0.95], "adam_w_mode": False},
        lambda groups, lr, decay: torch.optim.Adam(
            groups, lr=lr, eps=EPS, betas=(0.8, 0.95), weight_decay=decay
        ),
        counts=True,
        state="exp_avg",
    ),
    "SGD": Kind(
        "SGD",
        {"momentum": 0.9},
        lambda groups, lr, decay: torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=decay),
        state="momentum_buffer",
    ),
    "SGD without momentum": Kind(
        "SGD", {}, lambda groups, lr, decay: torch.optim.SGD(groups, lr=lr, weight_decay=decay)
    ),
    "Lion": Kind(
        "Lion",
        {"betas": [0.9, 0.99]},
        lambda groups, lr, decay: Lion(groups, lr, (0.9, 0.99), decay),
        state="exp_avg",
        is_sign=True,
    ),
    "Adagrad": Kind(
        "Adagrad",
        {"eps": EPS},
        lambda groups, lr, decay: torch.optim.Adagrad(groups, lr=lr, eps=EPS, weight_decay=decay),
        state="sum",
    ),
    "RMSprop": Kind(
        "RMSprop",
        {"eps": EPS},
        lambda groups, lr, decay: torch.optim.RMSprop(groups, lr=lr, eps=EPS, weight_decay=decay),
        state="square_avg",
        reach=10.0,
    ),
    "NAdam, given": Kind(
        "",
        {},
        lambda groups, lr, decay: torch.optim.NAdam(groups, lr=lr, eps=EPS, weight_decay=decay),
        counts=True,
        is_given=True,
    ),
}
