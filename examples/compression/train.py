"""Trains a classifier of digits, then compresses it in four ways: trains, cleans and exports each.

xds examples/compression/train.py
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import xds

HERE = Path(__file__).resolve().parent
WAYS = ("w8a8", "sparse", "rows", "heads")
WIDTH, NUM_HEADS, DEPTH = 64, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = NUM_HEADS  # `redundancy_clean` writes the number that is left
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Images [n, 8, 8], whose rows are tokens, to logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, WIDTH)
        self.place = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.lift(images) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def digits() -> tuple[Tensor, Tensor, int]:
    """Images, labels, and how many of them are for training: 60 %."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit('the digits need scikit-learn: pip install -e ".[vision]"') from None
    found = load_digits()
    order = torch.randperm(len(found.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[order] / 16
    return images, torch.tensor(found.target)[order], int(0.6 * len(images))


def train(model: nn.Module, config: Any, epochs: int, teacher: nn.Module | None = None) -> Any:
    """The engine after `epochs` passes over the digits. With a teacher its logits are learned as well."""
    images, labels, count = digits()
    engine = xds.initialize(model, config)
    size, ranks = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        for step in range(count // (size * ranks)):
            start = (step * ranks + engine.dp_rank) * size
            rows = order[start : start + size]
            x, y = images[rows].to(engine.device), labels[rows].to(engine.device)
            logits = engine(x)
            loss = F.cross_entropy(logits, y)
            if teacher is not None:
                with torch.no_grad():
                    told = teacher(x)
                loss = loss + xds.compression.distillation_loss(logits, told, temperature=2.0)
            engine.backward(loss)
            engine.step()
    return engine


@torch.no_grad()
def accuracy(model: Any) -> float:
    """Percent of the images that are not for training. At stage 3 all ranks call it."""
    images, labels, count = digits()
    model.eval()
    device = next(model.parameters()).device
    return (
        100
        * (model(images[count:].to(device)).argmax(1).cpu() == labels[count:]).float().mean().item()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--epochs", type=int, default=20, help="of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/compression")
    args = parser.parse_args()
    out, begun = Path(args.out), time.perf_counter()
    base = json.loads((HERE / "base.json").read_text())
    torch.manual_seed(args.seed)
    dense = Classifier()
    engine = train(dense, base, args.epochs)
    rows = [("dense", accuracy(engine), 0.0)]
    engine.destroy()  # leaves the whole model
    write(dense, out / "dense")
    sizes = [(out / "dense" / "model.safetensors").stat().st_size]
    for way in args.ways:
        config = {**base, **json.loads((HERE / f"{way}.json").read_text())}
        torch.manual_seed(args.seed)
        model = xds.compression.init_compression(copy.deepcopy(dense), config)
        engine = train(model, config, args.epochs, teacher=dense)
        trained = accuracy(engine)
        engine.destroy()
        xds.compression.redundancy_clean(model, config)
        rows.append((way, trained, accuracy(model)))
        write(model, out / way, bits=8 if way == "w8a8" else None)
        sizes.append((out / way / "model.safetensors").stat().st_size)
    if dist.get_rank() == 0:
        print(f"{'':8} trained %  cleaned %   bytes of the file")
        for (name, trained, cleaned), size in zip(rows, sizes, strict=True):
            print(f"{name:8} {trained:9.2f} {cleaned or trained:10.2f} {size:19,}")
        (out / "results.json").write_text(json.dumps({"rows": rows, "bytes": sizes}) + "\n")
        print(f"{time.perf_counter() - begun:.0f} s; files in {out}")
    dist.destroy_process_group()


def write(model: nn.Module, folder: Path, bits: int | None = None) -> None:
    """The weights as safetensors, by rank 0; with `bits` through torchao, if it is installed."""
    if dist.get_rank() == 0:
        if bits is not None and has_torchao():
            xds.compression.save_quantized(
                model.state_dict(), folder, bits, keep="norm", overwrite=True
            )
        else:
            from safetensors.torch import save_file

            folder.mkdir(parents=True, exist_ok=True)
            save_file(model.state_dict(), folder / "model.safetensors")
    dist.barrier()


def has_torchao() -> bool:
    from importlib.util import find_spec

    if find_spec("torchao") is None:
        print('w8a8: the file has fp32 values of 8 bits; pip install -e ".[torchao]" for int8')
        return False
    return True


if __name__ == "__main__":
    main()
