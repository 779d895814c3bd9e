"""Ray Train starts the ranks: `python ray_train.py`, on a Ray cluster or on one machine.

A worker that is lost ends the others, and Ray starts all of them again, at most MAX_FAILURES times. They resume
from the newest checkpoint, so FOLDER has to be on storage that every worker reaches.
"""

from pathlib import Path

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import xds

FOLDER = Path("checkpoints").absolute()
MAX_FAILURES = 3


def train(settings):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": settings["stage"]},
    }
    engine = xds.initialize(torch.nn.Linear(16, 16), config)
    if (FOLDER / "latest").exists():
        engine.load_checkpoint(FOLDER)
    loss = torch.zeros(1)
    while engine.global_steps < settings["steps"]:
        x = torch.randn(8, 16, device=engine.device)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 10 == 0:
            engine.save_checkpoint(FOLDER)
            ray.train.report({"loss": loss.item()})
    if engine.global_rank == 0:
        print(f"{engine.world_size} ranks: loss {loss.item():.3f}")


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"stage": 3, "steps": 20},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=MAX_FAILURES)),
    )
    trainer.fit()
