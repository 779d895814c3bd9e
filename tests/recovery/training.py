"""A script for `xds --recover`. The environment says which ranks end in which step."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import xds

UNIT, OUT = int(os.environ["RANK"]), Path(os.environ["OUT"])
DEATHS = json.loads(os.environ["DEATHS"])  # by unit: [step, where, signal, or "raise"]
SIZES = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
STEPS = int(os.environ.get("STEPS", "12"))
OPTIMIZER = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
OPTIMIZER = json.loads(os.environ.get("OPTIMIZER", json.dumps(OPTIMIZER)))
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds of each step
WAITS, SHARD = "WAITS" in os.environ, int(os.environ.get("SHARD", "1"))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3)
    )


def dataset() -> torch.utils.data.Dataset:
    torch.manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))


def die(where: str, step: int) -> None:
    when, place, how = DEATHS.get(str(UNIT), [None, "", ""])
    if (when, place) == (step, where) and "XDS_JOINS" not in os.environ:
        if how == "raise":
            raise RuntimeError("planned")
        os.kill(os.getpid(), getattr(signal, how))


def main() -> None:
    from xds.zero.model.update import Updater

    print("the script runs")
    model = build()
    config = {
        **SIZES,
        "optimizer": OPTIMIZER,
        "recovery": {"enabled": True},
        "report_folder": str(OUT / "report"),
        "zero_optimization": {"stage": 2 if SHARD > 1 else 0, "mics_shard_size": SHARD},
    }
    engine = xds.initialize(model.eval(), config, training_data=dataset())
    update = Updater.step

    def step(self, *args, **kwargs):
        die("norm", engine.global_steps - 1)  # this rank has the message of the norm
        return update(self, *args, **kwargs)

    Updater.step = step
    losses, drawn, num_repeated = [], {}, 0
    while engine.global_steps < STEPS:
        for x, y in engine.training_dataloader:
            place, number = (engine.global_steps, engine.micro_steps), torch.rand(()).item()
            num_repeated += place in drawn
            assert drawn.setdefault(place, number) == number, (
                "a step is repeated with other numbers"
            )
            loss = nn.functional.cross_entropy(engine(x), y)
            die("forward", engine.global_steps)
            engine.backward(loss)
            before = engine.global_steps
            engine.step()
            if engine.global_steps > before:
                losses.append(engine._parts.means.loss)
            if (engine.global_rank, engine.global_steps) == (0, 10) and not PAUSE:
                time.sleep(1.2)  # longer than groups may take to open
            if PAUSE:
                (OUT / f"step{engine.global_steps}").touch()
                time.sleep(PAUSE)
            if WAITS and 3 < engine.global_steps < 55 and engine.world_size < 3:
                time.sleep(0.25)  # a new process has to take part before the end
            if engine.global_steps == STEPS:
                break
    engine.save_checkpoint(OUT / "saved")
    values = torch.cat([param.detach().flatten() for param in model.parameters()])
    found = {
        "losses": losses[-3:],
        "values": values.tolist(),
        "samples": engine.global_samples,
        "repeated": num_repeated,
        "ranks": [engine.global_rank, engine.world_size],
    }
    (OUT / f"unit{UNIT}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
