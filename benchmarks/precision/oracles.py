"""AdamW with states of 8 bits, of xds and other libraries: how far weights are from those with fp32 states.

    python benchmarks/precision/oracles.py [--libraries torchao bitsandbytes]

Prints |w - w32| / |w32 - w0| after 20 steps on one matrix, the mean of three seeds. Its gradients are noise
whose columns differ in size by up to 100 times. Masters are fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from xds.ops.coded import new_codes
from xds.ops.kernels.adam import adam_
from xds.ops.libraries import load
from xds.ops.rounding import draw_rows

STEPS, SEEDS, ROWS, COLUMNS = 20, 3, 128, 512
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
Train = Callable[[Tensor, list[Tensor], int], Tensor]


def own(weight: Tensor, grads: list[Tensor], seed: int) -> Tensor:
    flat = weight.clone().view(-1)
    codes = [new_codes(flat.numel(), flat.device, of_squares=squares) for squares in (False, True)]
    draws = draw_rows([(0, flat.numel(), 0, "w")], seed)
    for at, grad in enumerate(grads):
        constants = (LR, *BETAS, EPS, DECAY, True, True)
        count = torch.tensor(at + 1.0)
        adam_(flat, grad.view(-1), *codes, None, count, None, None, *constants, draws=draws)
    return flat.view_as(weight)


def of_library(module: str, name: str) -> Train:
    kind = getattr(import_module(module), name)

    def train(weight: Tensor, grads: list[Tensor], seed: int) -> Tensor:
        param = torch.nn.Parameter(weight.clone())
        optimizer = kind([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        return param.data

    return train


LIBRARIES = {
    "torchao": ("torchao.optim", "AdamW8bit"),
    "bitsandbytes": ("bitsandbytes.optim", "AdamW8bit"),
}


def distance(train: Train) -> float:
    """Of its weights to those with fp32 states, as a share of the way."""
    exact, total = of_library("torch.optim", "AdamW"), 0.0
    for seed in range(SEEDS):
        random = torch.Generator().manual_seed(seed)
        weight = torch.randn(ROWS, COLUMNS, generator=random)
        sizes = 10 ** -(2 * torch.rand(COLUMNS, generator=random))
        grads = [torch.randn(ROWS, COLUMNS, generator=random) * sizes for _ in range(STEPS)]
        wanted = exact(weight, grads, seed)
        found = train(weight, grads, seed)
        total += float((found - wanted).norm() / (wanted - weight).norm())
    return total / SEEDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", nargs="*", default=[], choices=sorted(LIBRARIES))
    load("cpu")
    print(f"{'xds':12} {distance(own):.4f}")
    for name in parser.parse_args().libraries:
        print(f"{name:12} {distance(of_library(*LIBRARIES[name])):.4f}", flush=True)


if __name__ == "__main__":
    main()
