"""Test helper: saves a small mixture of experts cut in any way, and loads it cut in another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from helpers import run_processes, run_ranks
from pipeline_checkpoints import PRECISIONS, Held, Saved, held_by, samples
from torch import Tensor, nn
from torch.nn.functional import linear

import xds
from xds.ops.mesh import Mesh

VOCAB, WIDTH, INNER, EXPERTS, TOP = 48, 6, 5, 4, 2
STEPS, COUNT = 2, 4
LOADS_OF_ONE = 5  # checkpoints that one engine loads


class Experts(nn.Module):
    """Gated experts with biases, called as transformers calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.3)
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, place = torch.where(top_k_index == expert)
            both = linear(
                hidden_states[tokens], self.gate_up_proj[expert], self.gate_up_bias[expert]
            )
            gate, up = both.chunk(2, -1)
            output = linear(torch.nn.functional.silu(gate) * up, self.down_proj[expert])
            result = result.index_add(0, tokens, output * top_k_weights[tokens, place, None])
        return result


class Block(nn.Module):
    """A router, its experts, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, index = self.router(rows).softmax(-1).topk(TOP, -1)
        return x + self.experts(rows, index, weights).view(x.shape) * self.scale


class Net(nn.Module):
    """Embeddings, three blocks of experts, a head. frozen: blocks whose experts are not trained."""

    def __init__(self, *, tied: bool, frozen: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for block in self.blocks[:frozen]:
            block.experts.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Cut:
    """How the model is cut over ranks, where its states are, and how they are saved and loaded.

    experts: how many ranks share experts; 0: the config has no such section.
    """

    pipe: int
    ranks: int
    experts: int
    stage: int
    tied: bool = False
    frozen: int = 0
    precision: str = "fp32"
    offload: str = "none"
    is_async: bool = False
    tensor: int = 1

    @property
    def mesh(self) -> Mesh:
        data = self.ranks // self.tensor
        return Mesh(self.pipe, data, tensor=self.tensor, experts=max(self.experts, 1))

    @property
    def data(self) -> int:
        return self.mesh.data

    @property
    def world_size(self) -> int:
        return self.pipe * self.ranks

    @property
    def tag(self) -> str:
        layout = f"{self.pipe}x{self.ranks}x{self.tensor}-of-{self.experts}-zero{self.stage}"
        kind = f"{'tied' if self.tied else 'apart'}-{self.frozen}-{self.precision}"
        return f"{layout}-{kind}-{self.offload}{'-async' if self.is_async else ''}"


def engine_of(cut: Cut, seed: int, in_init: bool = False, **changes: Any) -> Any:
    """in_init: the model is built in `zero.Init`."""
    zero: dict[str, Any] = {
        "stage": cut.stage,
        "unit_min_numel": 0,
        "stage3_param_persistence_threshold": 0,
    }
    if cut.offload != "none":
        zero["offload_optimizer"] = {"device": cut.offload}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
        "checkpoint": {"async_save": cut.is_async},
        **PRECISIONS[cut.precision],
    }
    if cut.experts:
        config["expert_parallel"] = {"enabled": True, "autoep_size": cut.experts}
    if cut.pipe > 1:
        config["pipeline"] = {"stages": cut.pipe}
    if cut.tensor > 1:
        config["tensor_parallel"] = {
            "tp_size": cut.tensor,
            "plan": {"head": "colwise_gather_output"},
        }
    torch.manual_seed(seed)
    with xds.zero.Init(config | changes, enabled=in_init):
        model = Net(tied=cut.tied, frozen=cut.frozen)
    return xds.initialize(model, config | changes, training_data=samples())


def values_of(cut: Cut) -> list[dict[str, Tensor]]:
    """The values of a model that is built in plain PyTorch, and of the same in `zero.Init`."""
    found = []
    for in_init in (False, True):
        engine = engine_of(cut, 0, in_init)
        found.append(engine.full_state_dict(rank0_only=False))
        engine.destroy()
    return found


def write(folder: str, cut: Cut) -> Held:
    """Train two steps and save."""
    engine = engine_of(cut, seed=0)
    for _ in range(STEPS):
        engine.train_batch()
    torch.manual_seed(100 + torch.distributed.get_rank())
    engine.save_checkpoint(folder, cut.tag)
    held = held_by(engine)
    engine.destroy()
    return held


def read(folder: str, cut: Cut, tags: list[str], module_only: bool = False) -> list[Held]:
    """Load the checkpoints, one over the other."""
    engine = engine_of(cut, seed=9)
    held = []
    for tag in tags:
        engine.load_checkpoint(folder, tag, load_module_only=module_only)
        held.append(held_by(engine))
    engine.destroy()
    return held


def compare(folder: str, cut: Cut, saved: list[Saved], module_only: bool = False) -> list[str]:
    """Load what was saved at `cut`; a name for each difference."""
    tags = [one.cut.tag for one in saved]
    ranks = run_ranks(read, cut.world_size, folder, cut, tags, module_only)
    differences = []
    for number, one in enumerate(saved):
        held = [of_rank[number] for of_rank in ranks]
        differences += [
            f"{one.cut.tag} at {cut.tag}{', module only' if module_only else ''}: {text}"
            for text in one.differences(cut, held, values_only=module_only)
        ]
    return differences


def save(folder: str, cut: Cut) -> Saved:
    run = run_processes if cut.is_async else run_ranks  # a save in the background needs processes
    return Saved(cut, run(write, cut.world_size, folder, cut))


def random_cut(draw: random.Random, tied: bool, frozen: int, tensor: tuple[int, ...]) -> Cut:
    layouts = [
        (pipe, ranks, experts, slices)
        for pipe, ranks, experts, slices in product((1, 2), (1, 2, 4), (0, 1, 2, 4), tensor)
        if ranks % max(experts, 1) == 0 and ranks % slices == 0
    ]
    pipe, ranks, experts, slices = draw.choice(layouts)
    stage = draw.randrange(4)
    offload = draw.choice(["none", "none", "cpu"]) if stage else "none"
    is_async = draw.random() < 0.2
    precision = draw.choice(list(PRECISIONS))
    return Cut(
        pipe, ranks, experts, stage, tied, frozen, precision, offload, is_async, tensor=slices
    )


def random_loads(
    folder: str, count: int, seed: int, tensor: tuple[int, ...] = (1,)
) -> Iterator[list[str]]:
    """Save random cuts and load them at others; for each group of loads the differences.

    tensor: the numbers of tensor ranks to draw from.
    """
    draw = random.Random(seed)
    kinds = ((False, 0), (True, 0), (False, 1))
    for number in range(-(-count // LOADS_OF_ONE)):
        kind = kinds[number % len(kinds)]
        cuts = {random_cut(draw, *kind, tensor) for _ in range(LOADS_OF_ONE)}
        saved = [save(folder, cut) for cut in sorted(cuts, key=lambda cut: cut.tag)]
        saved = [saved[at % len(saved)] for at in range(LOADS_OF_ONE)]
        yield compare(folder, random_cut(draw, *kind, tensor), saved, draw.random() < 0.2)
