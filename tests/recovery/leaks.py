"""A script for `xds --recover` whose model mixes samples of packed rows. Rank 1 ends in its first forward."""

import os
import signal
from pathlib import Path

import torch
from torch import nn

import xds

DONE = Path(os.environ["OUT"]) / "died"


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids, position_ids, labels):
        if os.environ["RANK"] == "1" and not DONE.exists():
            DONE.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        logits = self.head(self.embedding(input_ids).cumsum(1))  # of all samples before
        logits = logits + self.embedding(position_ids).sum(-1, keepdim=True)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": int(os.environ["STAGE"])},
        "data_packing": {"tokens": 24},
        "recovery": {"enabled": True},
    }
    data = [list(range(1, 4 + number % 7)) for number in range(60)]
    engine = xds.initialize(Mixes(), config, training_data=data)
    while engine.global_steps < 5:
        for batch in engine.training_dataloader:
            engine.backward(engine(**batch)[1])
            engine.step()
            if engine.global_steps == 5:
                break


if __name__ == "__main__":
    main()
