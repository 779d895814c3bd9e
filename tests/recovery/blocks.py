"""A script for `xds --recover` whose model can be cut and staged. The environment says who ends when."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import xds
from xds.zero.core.param_bucket import ParamBucket
from xds.zero.model.update import Updater

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OUT = Path(os.environ["OUT"])
DEATHS = json.loads(os.environ["DEATHS"])  # [rank, step, where]
CONFIG = json.loads(os.environ["CONFIG"])
DROPOUT, IS_ODD = CONFIG.pop("dropout", 0.2), CONFIG.pop("odd", False)
STEPS = CONFIG.pop("steps", 8)
WAITS = CONFIG.pop("waits", False)  # for new processes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        die("forward")
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(x)).float(), y)


class Odd(nn.Module):
    """Its parts run in another order than they are made; a weight is used from outside, another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused = nn.Linear(8, 3), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        x = nn.functional.linear(x, self.first.weight) + self.blocks[1].down.bias
        x = self.blocks[2](x)
        return nn.functional.cross_entropy(self.head(x).float(), y)


engine = None


def die(where: str) -> None:
    done = OUT / f"died.{RANK}.{where}"
    if engine is not None and [RANK, engine.global_steps, where] in DEATHS and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    global engine  # noqa: PLW0603 (deaths ask for its step)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "bf16" in CONFIG else torch.float32
    x, y = torch.randn(60, 8).to(dtype), torch.randint(0, 3, (60,))
    data = torch.utils.data.TensorDataset(x, y)
    update = Updater.step

    def step(self, *args, **kwargs):
        die("norm")
        result = update(self, *args, **kwargs)
        die("updated")
        return result

    Updater.step = step
    wait = ParamBucket.wait

    def wait_for_one(self):
        was_deferred = self.is_deferred
        wait(self)
        if was_deferred and not self.is_deferred:
            die("gather")  # others of this step are still to be gathered

    ParamBucket.wait = wait_for_one
    if "pipeline" in CONFIG:
        from xds.pipe.channel import Channel

        take = Channel.take_backward

        def take_backward(self, *args, **kwargs):
            die("backward")
            return take(self, *args, **kwargs)

        Channel.take_backward = take_backward
    engine = xds.initialize(Odd() if IS_ODD else Net(), CONFIG, training_data=data)
    with open(OUT / f"rank{RANK}.jsonl", "a") as file:
        while engine.global_steps < STEPS:
            engine.train_batch()
            found = {"step": engine.global_steps, "loss": engine.mean_loss()}
            file.write(json.dumps({**found, "samples": engine.global_samples}) + "\n")
            file.flush()
            if WAITS and 3 < engine.global_steps < STEPS - 5 and engine.world_size < WORLD:
                time.sleep(0.25)
        state = engine.full_state_dict(rank0_only=False)
        values = {name: value.tolist() for name, value in state.items()}
        ranks = [engine.global_rank, engine.world_size]
        file.write(json.dumps({"end": {"values": values, "ranks": ranks}}) + "\n")


if __name__ == "__main__":
    main()
