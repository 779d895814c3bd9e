"""submitit starts the ranks: `python with_submitit.py` in a Slurm cluster; `--cluster local` is for a trial.

Slurm sends SIGUSR2 before a job ends or is preempted. submitit then submits `checkpoint` again, and the new job
resumes from the newest checkpoint: save regularly, on storage that all machines reach.
"""

from argparse import ArgumentParser
from pathlib import Path

import submitit
import torch

import xds

FOLDER = Path("checkpoints").absolute()


class Training:
    def __call__(self, steps):
        submitit.helpers.TorchDistributedEnvironment().export()
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
        }
        engine = xds.initialize(torch.nn.Linear(16, 16), config)
        if (FOLDER / "latest").exists():
            engine.load_checkpoint(FOLDER)
        while engine.global_steps < steps:
            x = torch.randn(8, 16, device=engine.device)
            loss = (engine(x) - x).square().mean()
            engine.backward(loss)
            engine.step()
            if engine.global_steps % 10 == 0:
                engine.save_checkpoint(FOLDER)
        return engine.world_size, loss.item()

    def checkpoint(self, steps):
        return submitit.helpers.DelayedSubmission(self, steps)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="of a machine")
    args = parser.parse_args()
    executor = submitit.AutoExecutor(folder="submitit", cluster=args.cluster)
    gpus = args.ranks if args.cluster == "slurm" else 0
    executor.update_parameters(
        nodes=args.nodes, tasks_per_node=args.ranks, gpus_per_node=gpus, timeout_min=60
    )
    print(executor.submit(Training(), 20).results())
