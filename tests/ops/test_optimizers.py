"""Tests of xds's optimizers against plain references, whole and sharded."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from models import build, micro_batch
from runs import config, differing, of_rank, train

import xds
from xds.engine import initialize
from xds.engine.config.optimizer import OPTIMIZERS
from xds.engine.model.precision import policy_of
from xds.ops.optim import config as optim_config
from xds.ops.optim.config import REGISTERED
from xds.ops.optim.scale import Scale
from xds.ops.optim.shard_optimizer import (
    VECTOR_NUMEL,
    Flat,
    Item,
    ParamPart,
    ShardOptimizer,
    Update,
    World,
)

LR = 1e-2


def run(name: str, params: dict[str, Any], stage: int, precision: str) -> dict[str, torch.Tensor]:
    samples = 4 // dist.get_world_size()
    settings = config(stage, precision, samples=samples, optimizer=name, params=params)
    engine = xds.initialize(build("plain"), settings)
    train(engine, 3, lambda step, _: of_rank(micro_batch(step, 0, 4)))
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return found


def reference(update: Any) -> dict[str, torch.Tensor]:
    """Three steps of `update(name, param, grad, state, step)` on whole parameters, one process."""
    model = build("plain")
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name, _ in model.named_parameters()}
    for step in range(3):
        model(micro_batch(step, 0, 4)).backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                update(name, param, param.grad, states[name], step + 1)
                param.grad = None
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def lion(name: str, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], step: int) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    p.mul_(1 - LR * 0.1).sub_((0.9 * m + 0.1 * g).sign(), alpha=LR)
    m.mul_(0.999).add_(g, alpha=0.001)


def lamb(name: str, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], step: int) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    v = state.setdefault("v", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    direction = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8) + 0.1 * p
    weight, length = p.norm().item(), direction.norm().item()
    ratio = min(max(weight / length, 0.01), 10.0) if weight and length else 1.0
    p.sub_(direction, alpha=LR * ratio)


def no_correction(
    name: str, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], step: int
) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    v = state.setdefault("v", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.mul_(1 - LR * 0.1).sub_(m / (v.sqrt() + 1e-8), alpha=LR)


def of_torch(kind: Any, **more: Any) -> dict[str, torch.Tensor]:
    model = build("plain")
    optimizer = kind(model.parameters(), lr=LR, weight_decay=0.1, **more)
    for step in range(3):
        model(micro_batch(step, 0, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


MUON_DECAY = 3.0  # a smaller one is within the tolerance


def muon_reference() -> dict[str, torch.Tensor]:
    model = build("plain")
    # DeepSpeed's choice: every matrix whose name contains neither "embed" nor "lm_head"
    hidden = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for p in model.parameters() if all(p is not h for h in hidden)]
    muon = torch.optim.Muon(hidden, lr=LR, momentum=0.95, weight_decay=MUON_DECAY)
    more = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": MUON_DECAY}
    adam = torch.optim.AdamW(others, lr=1e-3, fused=True, **more)
    for step in range(3):
        model(micro_batch(step, 0, 4)).backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in want.items():
        scale = max(value.norm().item(), LR * value.numel() ** 0.5)
        error = (got[name].float() - value).norm().item()
        assert error <= tolerance * scale, (name, error, scale)


SECTIONS = {
    "Lamb": ({"lr": LR, "weight_decay": 0.1}, lambda: reference(lamb), 1e-5),
    "Lion": ({"lr": LR, "weight_decay": 0.1}, lambda: reference(lion), 2e-2),
    "AdamW": (
        {"lr": LR, "weight_decay": 0.1, "bias_correction": False},
        lambda: reference(no_correction),
        1e-5,
    ),
    "SGD": (
        {"lr": LR, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        lambda: of_torch(torch.optim.SGD, momentum=0.9, nesterov=True),
        1e-5,
    ),
    "Adagrad": (
        {"lr": LR, "lr_decay": 0.1, "weight_decay": 0.1},
        lambda: of_torch(torch.optim.Adagrad, lr_decay=0.1),
        1e-5,
    ),
    "Muon": ({"lr": LR, "adam_lr": 1e-3, "weight_decay": MUON_DECAY}, muon_reference, 1e-2),
}


def signum(name: str, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], step: int) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    m.lerp_(g, 0.1)
    p.mul_(1 - LR * 0.1).sub_(m.sign(), alpha=LR)


ELSEWHERE = {"Adam", "OneBitAdam", "OneBitLamb"}  # tests/engine, tests/compression
ELSEWHERE |= {
    "AdamWScheduleFree",
    "Adafactor",
    "AdamMini",
    "GaLore",
    "Apollo",
}  # test_optimizer_formulas.py


def test_every_optimizer_is_compared_with_a_reference() -> None:
    assert REGISTERED.keys() == SECTIONS.keys() | ELSEWHERE


def test_the_optimizer_of_the_guide_for_contributors_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file and its row, as they are on the page. The row of the test is this one."""
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    section = page.partition("## Add an optimizer")[2].partition("\n## ")[0]
    module = ModuleType("xds.ops.optim.signum")
    exec(section.partition("```python\n")[2].partition("```")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    name, _, row = section.partition('   `"')[2].partition(",`")[0].partition('": ')
    registered = eval(row, vars(optim_config))
    monkeypatch.setitem(REGISTERED, name, registered)
    monkeypatch.setitem(OPTIMIZERS.built_in, name, registered.arguments)  # type: ignore[index]
    section_of_test = {"lr": LR, "weight_decay": 0.1}
    monkeypatch.setitem(SECTIONS, name, (section_of_test, lambda: reference(signum), 1e-5))
    run_ranks(every, 2, name)


def every(name: str) -> None:
    params, make, tolerance = SECTIONS[name]
    want = make()
    seen = [run(name, params, stage, "fp32") for stage in (0, 1, 3)]
    for found in seen:
        close(found, want, tolerance)
    low = [run(name, params, stage, "bf16") for stage in (1, 3)]
    start = dict(build("plain").named_parameters())
    found = torch.cat(
        [(low[0][n].float() - p.bfloat16().float()).flatten() for n, p in start.items()]
    )
    moved = torch.cat([(want[n] - p).flatten() for n, p in start.items()])
    assert (found - moved).norm() <= 0.25 * moved.norm()  # gradients have three digits
    for one, other in ((seen[1], seen[2]), low):
        assert not differing(one, other)  # the sharded stages do the very same work


@pytest.mark.parametrize("name", list(SECTIONS))
@pytest.mark.quick("AdamW", "SGD", "Muon")
def test_sharded_equals_whole(name: str) -> None:
    run_ranks(every, 2, name)


def dtypes_of(kind: Any) -> tuple[set[torch.dtype], ...]:
    """The dtypes of masters and of momentums after two steps."""
    whole = {"enabled": True, "master_weights": "fp32"}
    engine = xds.initialize(build("plain"), config(2, bf16=whole), optimizer=kind)
    train(engine, 2, lambda step, _: of_rank(micro_batch(step, 0, 4)))
    momentums = {state["m"].dtype for state in engine.optimizer.state.values()}
    masters = {tensor.dtype for tensor in engine.optimizer.state}
    engine.destroy()
    return masters, momentums


class Momentum(ShardOptimizer):
    num_states = 1
    rounds_masters = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})

    def states_before(self, item: Item) -> dict[str, Any]:
        return {"m": item.new_state()}

    def update(self, updates: Any, scale: Any, world: Any) -> None:
        for update in updates:
            momentum = self.state_of(update.item)["m"].mul_(0.9).add_(update.grad * scale.value)
            update.item.master.sub_(momentum, alpha=LR)


@pytest.mark.parametrize(
    ("dtypes", "masters", "states"),
    [
        ({}, torch.float32, torch.float32),
        ({"states": torch.bfloat16}, torch.float32, torch.bfloat16),
        ({"masters": torch.bfloat16}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_masters_and_states_have_the_dtypes_of_the_policy(
    dtypes: Any, masters: torch.dtype, states: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"splits_masters": False} | dtypes  # `Momentum` does not take halves
    monkeypatch.setattr(initialize, "policy_of", lambda *args: replace(policy_of(*args), **whole))
    assert run_ranks(dtypes_of, 2, Momentum) == [({masters}, {states})] * 2


TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
    ("Adam", {"betas": (0.8, 0.9), "eps": 1e-3}),
    ("AdamW", {"weight_decay": 0.1, "eps": 1e-3}),
]


@pytest.mark.parametrize(("name", "params"), TORCHS, ids=str)
def test_the_steps_of_a_class_are_those_of_torchs(name: str, params: dict[str, Any]) -> None:
    """On masters in fp32, whose values are cast, with gradients that are scaled."""
    numel, draw = 37, torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=draw)
    part = ParamPart("weight", (numel,), 0, 0, numel, 0)
    item = Item(start.clone(), 0, (part,), 0, 0, torch.float32)
    alone: Any = SimpleNamespace(world_size=1)
    world = World(alone, (Flat(0, numel, (part,), alone, is_sharded=False, dtype=torch.float32),))
    ours = REGISTERED[name].load()([item.master], lr=LR, **params)
    plain = torch.nn.Parameter(start.clone())
    torchs = getattr(torch.optim, name)([plain], lr=LR, **params)
    out = torch.empty(numel, dtype=torch.bfloat16)
    for _ in range(3):
        plain.grad = torch.randn(numel, generator=draw)
        update = Update(item, 4 * plain.grad, out, ours.param_groups[0], has_old=False)
        ours.update([update], Scale(0.25), world)
        torchs.step()
        torch.testing.assert_close(item.master, plain.detach(), rtol=1e-5, atol=1e-6)
        assert out.equal(item.master.bfloat16())


COUNTED = [name for name, row in REGISTERED.items() if row.load().counts_together]


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=str)
@pytest.mark.parametrize("name", COUNTED)
def test_a_step_counts_once(name: str, zero: dict[str, Any]) -> None:
    # Lion counts steps where it rounds at random
    params = {"state_dtype": "bf16"} if REGISTERED[name].rounds_masters else {}
    settings = config(1, "bf16", optimizer=name, params=params, zero=zero)
    engine = xds.initialize(build("plain"), settings)
    for taken in (1, 2, 3):
        train(engine, 1, lambda step, _: micro_batch(step, 0))
        states = engine.optimizer.state.values()
        assert [float(state["step"]) for state in states] == [taken] * len(states)
    engine.destroy()


@given(st.lists(st.integers(1, 5 * VECTOR_NUMEL), min_size=1, max_size=6))
def test_a_run_goes_on_only_after_whole_vectors(lengths: list[int]) -> None:
    """Parameters of any length, each on a boundary of 64 bytes."""
    parts, start = [], 0
    for number, numel in enumerate(lengths):
        parts.append(ParamPart(str(number), (numel,), 0, start, start + numel, 0))
        start += -(-numel // VECTOR_NUMEL) * VECTOR_NUMEL
    runs = Item(torch.zeros(start), 0, tuple(parts), 0, 0, torch.float32).runs
    ends = {part.stop for part in parts if part.stop % VECTOR_NUMEL} | {parts[-1].stop}
    assert {run.stop for run in runs} == ends
    assert all(any(run.start <= p.start and p.stop <= run.stop for run in runs) for p in parts)
