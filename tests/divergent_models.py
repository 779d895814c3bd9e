"""Test helper: models whose graph depends on their input, and their training in plain PyTorch.

Each model maps (x [n, WIDTH], route) to the loss. `route` selects the path of these
samples through the model. Real models decide it from data, or from a random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from runs import Step, config, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH, LR = 12, 3, 1e-2
Route = tuple[int, ...]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Expert(Block):
    """One of several layers, of which a token takes one."""


class MoeBlock(nn.Module):
    """Tokens go to one expert each, as in Mixtral; an expert without tokens is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])

    def forward(self, x: Tensor, chosen: Route) -> Tensor:
        weights = self.gate(x).softmax(-1)
        taken = torch.tensor([chosen[at % len(chosen)] for at in range(len(x))])
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (taken == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return out


class Moe(nn.Module):
    """`route`: the experts that these samples take."""

    depth, reentrant = 2, None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MoeBlock() for _ in range(self.depth)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        h = x.clone().requires_grad_()  # a reentrant checkpoint requires it
        for block in self.blocks:
            if self.reentrant is None:
                h = block(h, route)
            else:
                h = checkpoint(block, h, route, use_reentrant=self.reentrant)
        return (self.head(h) - x).square().mean()


class CheckpointedMoe(Moe):
    """Forward runs again in backward, of more blocks than reductions that may be in flight."""

    depth, reentrant = 8, False


class ReentrantMoe(CheckpointedMoe):
    """Forward runs again in backward, in a graph of its own."""

    reentrant = True


class Vision(nn.Module):
    """A tower that text does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ImageAndText(nn.Module):
    """`route`: (1,) for samples with an image, (2,) for text that calls the tower in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        h = x + self.vision(x) * (route[0] == 1)
        for block in self.blocks:
            h = block(h)
        return (self.head(h) - x).square().mean()


class Skipping(nn.Module):
    """`route`: the blocks that are used. Early exit leaves out the last, stochastic depth any."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        h = x
        for number in route:
            h = self.blocks[number](h)
        return (self.head(h) - x).square().mean()


EXPERTS = (((0, 1), (0, 1, 2, 3), (1,)), ((2,), (0, 3), (1,)), ((0, 2), (1,), (3,)))

# For each kind: its model, and the route of each rank (mod 3) in each step (mod 3).
KINDS: dict[str, tuple[type[nn.Module], Sequence[Sequence[Route]]]] = {
    "unused experts": (Moe, EXPERTS),
    "unused experts, checkpointed": (CheckpointedMoe, EXPERTS),
    "unused experts, reentrant": (ReentrantMoe, EXPERTS),
    "images and zeros": (
        ImageAndText,
        (((1,), (2,), (1,)), ((2,), (2,), (1,)), ((2,), (1,), (2,))),
    ),
    "early exit": (Skipping, (((0, 1, 2), (0, 1), (0,)), ((0,), (0, 1, 2), (0,)), ((0, 1),) * 3)),
    "layers of one unit": (
        Skipping,
        (
            ((0, 1, 2), (0, 2), (1, 2)),
            ((0, 2), (0, 1, 2), (0, 2)),
            ((1, 2), (0, 2), (0, 1, 2)),
        ),
    ),
    "stochastic depth": (Skipping, (((0, 2), (1,), ()), ((1, 2), (0,), ()), ((0, 1, 2), (), (2,)))),
}


def build(kind: str) -> nn.Module:
    """The model, the same values on every call."""
    torch.manual_seed(7)
    return KINDS[kind][0]()


def route_of(kind: str, rank: int, step: int) -> Route:
    """Which way the samples of `rank` go in `step`."""
    return KINDS[kind][1][rank % 3][step % 3]


def samples(rank: int, step: int) -> Tensor:
    """[4, WIDTH], the same for the same arguments."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def config_of(stage: int, **zero: Any) -> dict[str, Any]:
    """Every block a unit of its own, nothing kept whole between steps."""
    return config(stage, samples=4, params={"lr": LR, "weight_decay": 0.0}, zero=zero)


def plain_run(kind: str, world_size: int, num_steps: int) -> list[Step]:
    """Losses and gradient norms of plain PyTorch on the samples of all ranks."""

    def parts(step: int) -> list[Any]:
        return [(samples(rank, step), route_of(kind, rank, step)) for rank in range(world_size)]

    return plain(build(kind), num_steps, parts, zeros=True, lr=LR, weight_decay=0.0)
