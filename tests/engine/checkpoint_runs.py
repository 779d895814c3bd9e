"""Test helper: a model with all that a checkpoint holds, and what its engine has before and after a load."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from runs import config, of_rank
from saved_checkpoints import values_of
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.zero.checkpoint.ranges import pieces
from xds.zero.checkpoint.snapshot import Snapshot

WIDTH = 11
ARGUMENTS = ("optimizer", "lr_scheduler", "training_data", "model_parameters")  # of initialize
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}

States = dict[tuple[str, str], list[tuple[int, Tensor]]]
Whole = dict[tuple[str, str], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.2))


class Net(nn.Module):
    """Blocks with buffers and random draws, a frozen layer, a tied weight; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.inner(x.to(self.inner.bias.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.outer(self.frozen(x)).float().square().mean()


def engine_of(stage: int, seed: int = 0, model: nn.Module | None = None, **more: Any) -> Any:
    """more: sections of the config, and arguments of `initialize`."""
    torch.manual_seed(seed)
    random.seed(seed)
    arguments = {key: more.pop(key) for key in ARGUMENTS if callable(more.get(key))}
    for key in ("training_data", "model_parameters"):
        if key in more:
            arguments[key] = more.pop(key)
    section = more.pop("optimizer", None)
    settings = config(stage, samples=4, **more)
    if "optimizer" in arguments:
        del settings["optimizer"]
    elif section:
        settings["optimizer"] = section
    return xds.initialize(model or Net(), settings, **arguments)


def inputs(number: int) -> Tensor:
    """This rank's part of 12 samples."""
    return of_rank(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(number)))


def train(engine: Any, start: int, stop: int) -> list[float]:
    """Micro-batches `start` to `stop`; what each shows, and a random draw after it."""
    found = []
    for number in range(start, stop):
        loss = engine(inputs(number))
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm() if engine.was_step_applied() else 0.0
        found += [loss.item(), norm, engine.loss_scale, engine.get_lr()[0], random.random()]
    return found


def states_of(engine: Any) -> States:
    """By name and key: this rank's parts of values and optimizer states, and where each begins."""
    parts = engine._parts
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater)
    found: States = {}
    for block in (*snapshot.values, *snapshot.states):
        flat = values_of(block)
        for piece in pieces(snapshot.flats[block.flat], block.start, block.stop):
            values = flat[piece.target : piece.target + piece.stop - piece.start].clone()
            found.setdefault((piece.name, block.key), []).append((piece.start, values))
    for one in snapshot.constants:
        for piece in pieces(snapshot.flats[one.flat], one.start, one.stop):
            value = torch.tensor([float(one.value)])
            found.setdefault((piece.name, one.key), []).append((0, value))
    for name, param in engine.module.named_parameters():
        if not parts.sharded.policy.shards_params:
            found[name, "param"] = [(0, param.detach().reshape(-1).clone())]
    return found


def whole(results: list[States]) -> Whole:
    """The ranks' `states_of`, put together. Buffers are those of rank 0, as a load gives them to all."""
    found: dict[tuple[str, str], dict[int, Tensor]] = {}
    for states in results[::-1]:
        for place, parts in states.items():
            found.setdefault(place, {}).update(dict(parts))
    return {
        place: torch.cat([parts[start] for start in sorted(parts)])
        for place, parts in found.items()
    }


def same(one: Whole, two: Whole) -> None:
    """The same values and states; what parameters hold in 16 bits follows from them."""
    one, two = ({p: v for p, v in w.items() if p[1] != "param"} for w in (one, two))
    assert one.keys() == two.keys()
    for place, value in one.items():
        assert torch.equal(value, two[place]), place


def check_same(one: States, two: States) -> None:
    """What a rank has in `one` it has in `two`."""
    for place, parts in one.items():
        for (start, first), (other, second) in zip(parts, two[place], strict=True):
            assert start == other and torch.equal(first, second), place


def counters(engine: Any) -> list[int]:
    return [
        *(engine.global_steps, engine.micro_steps),
        *(engine.skipped_steps, engine.global_samples),
    ]


def resume(folder: str, stage: int, more: dict[str, Any], middle: int = 3, end: int = 5) -> None:
    """Save after `middle` micro-batches and go on; a fresh engine that loads does the same, bit for bit."""
    first = engine_of(stage, **more)
    train(first, 0, middle)
    first.save_checkpoint(folder)
    saved, wanted = counters(first), train(first, middle, end)
    second = engine_of(stage, seed=9, **more)
    path, client_state = second.load_checkpoint(folder)
    assert (path, client_state) == (f"{folder}/{Path(path).name}", {})
    assert counters(second) == saved
    assert train(second, middle, end) == wanted, (stage, more)
    assert counters(second) == counters(first)
    check_same(states_of(first), states_of(second))


def resume_each(folder: str, cases: list[tuple[Any, ...]]) -> None:
    for at, case in enumerate(cases):
        resume(f"{folder}/{at}", *case)


def save_at(folder: str, stage: int, more: dict[str, Any]) -> States:
    engine = engine_of(stage, **more)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, "here")
    return states_of(engine)


def load_at(folder: str, stage: int, more: dict[str, Any]) -> States:
    """The states after the load; then the engine must train and save."""
    engine = engine_of(stage, seed=9, **more)
    engine.load_checkpoint(folder, "here")
    states = states_of(engine)
    train(engine, 2, 4)
    engine.save_checkpoint(folder, "there")
    return states


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
