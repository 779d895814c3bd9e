"""Test helper: trains a model with tiles on an engine, and compares it with plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.tensor import tile_forward, tiled_loss

VOCAB, WIDTH, LENGTH, STEPS = 61, 24, 13, 5  # odd: the last tile is shorter


class Mlp(nn.Module):
    """An MLP that uses one weight twice and one parameter never."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + 0.1 * x @ self.up.weight[:WIDTH]


class Block(nn.Module):
    """Mixes tokens, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.cumsum(1) / LENGTH
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Embedding, blocks, a head that shares its weight. `tiles` is 0 for plain PyTorch."""

    def __init__(self, tiles: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight
        self.blocks[1].mlp.up.weight.requires_grad_(False)
        self.tiles = tiles

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        x, labels = self.norm(x), tokens[:, 1:]
        if self.tiles:
            weight, bias = self.head.weight, self.head.bias
            return tiled_loss(x, weight, labels, tiles=self.tiles, bias=bias, ignore_index=0)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=0)


def models(tiles: int) -> tuple[Model, Model]:
    """The same values in plain PyTorch and with tiles."""
    torch.manual_seed(3)
    plain = Model()
    tiled = copy.deepcopy(plain)
    tiled.tiles = tiles
    for block in tiled.blocks:
        tile_forward(block.mlp, -(-LENGTH // tiles))
    return plain, tiled


def batch(step: int, rank: int) -> Tensor:
    """[2, LENGTH + 1] tokens, the same number of labels other than 0 on each rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(1, VOCAB, (2, LENGTH + 1), generator=generator)
    tokens[:, 2:4] = 0
    return tokens


def compare(stages: list[int], units: str = "blocks.*") -> None:
    """Train five steps at each stage on this rank; assert that loss and norm are those of plain PyTorch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = models(4)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    wanted = []
    for step in range(STEPS):
        losses = torch.stack([plain(batch(step, at)) for at in range(world_size)])
        losses.mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        wanted.append((losses[rank].item(), norm.item()))
    for stage in stages:
        engine = xds.initialize(models(4)[1], _config(stage, units))
        for step, (loss, norm) in enumerate(wanted):
            found = engine(batch(step, rank))
            engine.backward(found)
            engine.step()
            where = f"stage {stage}, step {step}"
            assert abs(found.item() - loss) <= 1e-6 * abs(loss), (where, found.item(), loss)
            got = float(engine.get_global_grad_norm())
            assert abs(got - norm) <= 1e-6 * norm, (where, got, norm)
        engine.destroy()


def gathered_in_backward() -> tuple[list[list[str]], list[list[str]]]:
    """The units that are gathered when backward reaches each block's norm: in plain code, and in tiles."""
    found = []
    for model in models(4):
        for block in model.blocks:
            del block.mlp.unused  # a gradient that never comes keeps its unit gathered
            block.mlp.up.weight.requires_grad_(True)
        section = {"stage": 3, "units": ["Block"], "param_persistence_threshold": 0}
        section |= {"unit_min_numel": 0, "prefetch_bucket_size": 0, "max_reuse_distance": 0}
        engine = xds.initialize(model, _config(3) | {"zero_optimization": section})
        loss = engine(batch(0, 0))
        seen: list[list[str]] = []

        def read(*_: object, engine: Any = engine, seen: list[list[str]] = seen) -> None:
            units = engine._sharded.units
            seen.append([u.name for u in units if any(flat.is_unsharded for flat in u.params)])

        for block in model.blocks:
            block.norm.weight.register_hook(read)
        engine.backward(loss)
        engine.destroy()
        found.append(seen)
    return found[0], found[1]


def _config(stage: int, units: str = "blocks.*") -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "units": [units], "unit_min_numel": 0}
        | ({"param_persistence_threshold": 0, "prefetch_bucket_size": 0} if stage == 3 else {}),
    }
