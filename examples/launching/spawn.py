"""torch.multiprocessing starts the ranks: `python spawn.py`. A failed rank ends the others; nothing restarts.

`xds.launch(train, nproc=2)` does the same, with the launcher's report of a failure.
"""

import os
import socket

import torch
import torch.multiprocessing as mp

import xds


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def train(rank, world_size, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    engine = xds.initialize(torch.nn.Linear(16, 16), config)
    for _ in range(20):
        x = torch.randn(8, 16, device=engine.device)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
    if rank == 0:
        print(f"{world_size} ranks: loss {loss.item():.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    ranks = torch.cuda.device_count() or 2
    mp.spawn(train, (ranks, free_port()), ranks)
