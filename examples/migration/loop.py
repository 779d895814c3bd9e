"""A training loop written for DeepSpeed: `deepspeed loop.py`, or `xds --as-deepspeed loop.py`.

xds --as-deepspeed examples/migration/loop.py --deepspeed_config examples/migration/loop.json
"""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=20)
args = deepspeed.add_config_arguments(parser).parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
engine, optimizer, _, scheduler = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters()
)
generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
for _ in range(args.steps):
    x = torch.randn(4, 32, generator=generator).to(engine.device)
    loss = (engine(x).squeeze(-1) - x.sum(dim=-1)).square().mean()
    engine.backward(loss)
    engine.step()
if deepspeed.comm.get_rank() == 0:
    print(f"loss {loss.item():.4f} after {engine.global_steps} steps")
