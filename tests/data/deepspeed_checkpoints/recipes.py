"""The runs behind the checkpoints in this folder, for DeepSpeed and for xds: models, data, groups, configs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_ROWS = 12  # of a global batch: the ranks may be 1, 2, 3
STEPS_BEFORE, STEPS_AFTER = 3, 3
WIDTH = 5
LR = 1e-2
CLIENT_STATE = {"epoch": 2, "note": "half-way", "seen": [1, 2.5, None]}


class Plain(nn.Module):
    """Odd sizes, so that every cut between ranks has padding."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up.weight.dtype)
        return F.mse_loss(self.down(F.gelu(self.up(x))).float(), x.float().flip(-1))


class Rich(nn.Module):
    """A tied weight, a frozen layer, buffers of two dtypes, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.mid = nn.Linear(7, 7, bias=False)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.mid.weight
        self.register_buffer("factor", torch.linspace(0.5, 1.5, 7))
        self.register_buffer("seen", torch.tensor(11))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up.weight.dtype)
        y = F.gelu(self.frozen(self.up(x))) * self.gain
        y = self.tied(F.gelu(self.mid(y))) * self.factor.to(y.dtype)
        return F.mse_loss(self.down(y).float(), x.float().flip(-1))


class Mixture(nn.Module):
    """Two layers of four experts, which two ranks share."""

    def __init__(self) -> None:
        super().__init__()
        if find_spec("deepspeed"):
            from deepspeed.moe.layer import MoE
        else:
            from xds.deepspeed.moe.layer import MoE
        wide = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))
        self.first = MoE(WIDTH, wide, num_experts=4, ep_size=2, use_rts=False, min_capacity=2)
        self.second = MoE(
            WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2, k=2, min_capacity=2
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, first, _ = self.first(x.to(self.last.weight.dtype))
        y, second, _ = self.second(y)
        loss = F.mse_loss(self.last(y).float(), x.float().flip(-1))
        return loss + 0.01 * (first + second)


def build(name: str) -> nn.Module:
    """The model of a recipe, always with the same numbers."""
    torch.manual_seed(5)
    return {"plain": Plain, "rich": Rich, "moe": Mixture}[name]()


def groups_of(name: str, model: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups that the recipe trains; "rich" has two, and leaves the frozen layer out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "moe":
        if find_spec("deepspeed"):
            from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        else:
            from xds.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": trained, "name": "all"}
        )
    if name == "plain":
        return [{"params": trained}]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def batch_of(step: int, rank: int, world_size: int) -> Tensor:
    """This rank's rows of global batch number `step` [NUM_ROWS / world_size, WIDTH]."""
    rows = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows.chunk(world_size)[rank]


def config_of(name: str, stage: int, precision: str, world_size: int) -> dict[str, Any]:
    """What both engines are told."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": NUM_ROWS // world_size,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.8, 0.95]}},
        "zero_optimization": {"stage": stage},
    }
    if name == "rich":
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": LR, "warmup_num_steps": 5, "warmup_type": "linear"},
        }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        scale = {"initial_scale_power": 5, "loss_scale_window": 2, "hysteresis": 2}
        config["fp16"] = {"enabled": True, **scale}
    return config
