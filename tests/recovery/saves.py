"""A script for `xds --recover` whose saves take a second. The environment says where it saves, and who ends."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import xds
from xds.engine.checkpoint import saver

RANK, OUT = int(os.environ["RANK"]), Path(os.environ["OUT"])
WHERE = os.environ["WHERE"]  # "after step 2", and waits there; "after step 3"; "at the end"
DEATHS = json.loads(os.environ["DEATHS"])  # rank, and in which write of its process
STEPS = 4
num_writes = 0


def write_slowly(write, *args):
    global num_writes  # noqa: PLW0603
    num_writes += 1
    time.sleep(0.3)
    done = OUT / f"died{RANK}"
    if [RANK, num_writes] in DEATHS and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.7)
    return write(*args)


def save(engine: xds.Engine) -> None:
    steps, metric = engine.global_steps, torch.tensor(0.5)
    engine.save_checkpoint(OUT / "saved", client_state={"steps": steps}, metric=metric)


def main() -> None:
    saver.write_image = partial(write_slowly, saver.write_image)
    saver.write_tensors = partial(write_slowly, saver.write_tensors)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
    engine = xds.initialize(model, json.loads(os.environ["CONFIG"]), training_data=data)
    while engine.global_steps < STEPS:
        for x, y in engine.training_dataloader:
            before = engine.global_steps
            engine.backward(nn.functional.cross_entropy(engine(x), y))
            engine.step()
            if engine.global_steps > before and WHERE == f"after step {engine.global_steps}":
                save(engine)
                if engine.global_steps == 2:
                    engine.wait_for_checkpoint()
            if engine.global_steps == STEPS:
                break
    if WHERE == "at the end":
        save(engine)
    engine.wait_for_checkpoint()
    state = engine.full_state_dict(rank0_only=False)
    sums = {name: value.sum().item() for name, value in state.items()}
    found = {"sums": sums, "since_best": engine.saves_since_best, "world_size": engine.world_size}
    (OUT / f"rank{RANK}.json").write_text(json.dumps(found))
    engine.destroy()


if __name__ == "__main__":
    main()
