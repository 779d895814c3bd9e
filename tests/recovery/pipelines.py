"""A script for `xds --recover` with a model in two pipeline stages. The environment says who ends when."""

import json
import os
import signal
from pathlib import Path

import torch
from torch import nn

import xds
from xds.pipe.channel import Channel
from xds.zero.model.update import Updater

RANK, OUT = int(os.environ["RANK"]), Path(os.environ["OUT"])
DEATH = json.loads(os.environ["DEATH"])  # [rank, step, where]; or [] for none


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(x)), y)


def dies_in(owner: type, name: str, where: str, engine: xds.Engine) -> None:
    inner = getattr(owner, name)

    def outer(self, *args, **kwargs):
        if DEATH == [RANK, engine.global_steps, where]:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *args, **kwargs)

    setattr(owner, name, outer)


def main() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.randint(0, 3, (60,)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "pipeline": {"stages": 2},
        "recovery": {"enabled": True},
    }
    engine = xds.initialize(Net(), config, training_data=data)
    dies_in(Channel, "take_backward", "backward", engine)
    dies_in(Updater, "step", "norm", engine)
    losses = []
    while engine.global_steps < 8:
        engine.train_batch()
        losses.append(engine.mean_loss())
    state = engine.full_state_dict(rank0_only=False)
    found = {
        "losses": losses,
        "values": torch.cat([value.flatten() for value in state.values()]).tolist(),
        "samples": engine.global_samples,
        "ranks": [engine.global_rank, engine.world_size],
    }
    (OUT / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
