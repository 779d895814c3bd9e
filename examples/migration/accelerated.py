"""A stock accelerate script: a DeepSpeedPlugin with --stage, DDP without it.

xds --as-deepspeed examples/migration/accelerated.py --stage 2
torchrun --nproc-per-node 2 examples/migration/accelerated.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=None)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

plugin = None if args.stage is None else DeepSpeedPlugin(zero_stage=args.stage)
accelerator = Accelerator(deepspeed_plugin=plugin)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
x = torch.randn(64, 16)
loader = DataLoader(TensorDataset(x, x[:, :4]), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(args.epochs):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
mean = accelerator.reduce(loss.detach(), reduction="mean")
accelerator.print(f"loss {mean.item():.4f}")
accelerator.end_training()  # ends the process group, as PyTorch advises
