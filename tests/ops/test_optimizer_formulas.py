"""Optimizers beside Adam against the formulas of their papers: stages, ranks, resumes, exports."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config, differing, of_rank, train
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.engine.checkpoint.io.reader import CheckpointReader

Values = dict[str, Tensor]
STEPS, HALF, SAMPLES, WIDTH, VOCABULARY = 6, 3, 4, 15, 37


@dataclass(frozen=True)
class Formula:
    """`update(name, param, grad, state, step)` changes a parameter; `shown` gives what is exported of it."""

    params: dict[str, Any]
    update: Callable[[str, Tensor, Tensor, dict[str, Any], int], None]
    shown: Callable[[Tensor, dict[str, Any]], Tensor] = lambda param, state: param


def rate_of(step: int) -> float:
    """The learning rate of schedule-free AdamW, which a script lowers."""
    return 1e-2 if step < STEPS - 1 else 4e-3


def schedule_free(name: str, y: Tensor, g: Tensor, state: dict[str, Any], step: int) -> None:
    """Algorithm 1 of the paper, with all three sequences."""
    lr, beta1, beta2 = rate_of(step) * min(1.0, step / 3), 0.8, 0.99
    if not state:
        state.update(z=y.clone(), x=y.clone(), v=torch.zeros_like(y), total=0.0, largest=0.0)
    v, z, x = state["v"], state["z"], state["x"]
    v.mul_(beta2).add_(g * g, alpha=1 - beta2)
    z.sub_(lr * (g / ((v / (1 - beta2**step)).sqrt() + 1e-3) + 0.1 * y))
    state["largest"] = max(lr, state["largest"])
    weight = step**1.0 * state["largest"] ** 2
    state["total"] += weight
    share = weight / state["total"]
    x.mul_(1 - share).add_(z, alpha=share)
    y.copy_((1 - beta1) * z + beta1 * x)


def adafactor(name: str, p: Tensor, g: Tensor, state: dict[str, Any], step: int) -> None:
    """torch's own class."""
    if not state:
        state["optimizer"] = torch.optim.Adafactor([p], lr=0.02, d=1.5, weight_decay=0.1)
    state["optimizer"].step()


def adam_mini(name: str, p: Tensor, g: Tensor, state: dict[str, Any], step: int) -> None:
    """Algorithm 2 of the paper; keys have 3 heads of 5 rows."""
    lr, beta1, beta2 = 1e-2, 0.9, 0.99
    rows = 5 if name.endswith("k_proj.weight") else 1
    blocks = g.reshape(1 if p.dim() < 2 else p.shape[0] // rows, -1)
    if not state:
        state.update(m=torch.zeros_like(blocks), v=torch.zeros(len(blocks), 1))
    m, v = state["m"], state["v"]
    m.mul_(beta1).add_(blocks, alpha=1 - beta1)
    v.mul_(beta2).add_((blocks * blocks).mean(1, keepdim=True), alpha=1 - beta2)
    step_of = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + 1e-6)
    p.mul_(1 - lr * 0.1).sub_(lr * step_of.view(p.shape))


def adamw(p: Tensor, g: Tensor, state: dict[str, Any], step: int) -> None:
    """What updates all but matrices."""
    if not state:
        state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
    m, v = state["m"].lerp_(g, 0.1), state["v"].lerp_(g * g, 0.01)
    p.mul_(1 - 1e-2 * 0.1).sub_(
        1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-3)
    )


def low_rank(
    name: str, p: Tensor, g: Tensor, state: dict[str, Any], step: int, draws: bool
) -> None:
    """GaLore's algorithm 2, or with `draws` APOLLO's algorithm 1; a tall matrix is transposed."""
    if p.dim() != 2 or "embed" in name:
        return adamw(p, g, state, step)
    rank, gap = 4, 2
    wide = g if p.shape[0] < p.shape[1] else g.T
    if (step - 1) % gap == 0:
        seed = zlib.crc32(f"7 {(step - 1) // gap} {name}".encode())
        drawn = torch.randn(len(wide), rank, generator=torch.Generator().manual_seed(seed))
        vectors = torch.linalg.svd(g, full_matrices=False)
        singular = vectors[0] if wide is g else vectors[2].T
        state["projector"] = drawn / rank**0.5 if draws else singular[:, :rank]
    low = state["projector"].T @ wide
    if "m" not in state:
        state.update(m=torch.zeros_like(low), v=torch.zeros_like(low), last=0.0)
    m, v = state["m"].lerp_(low, 0.1), state["v"].lerp_(low * low, 0.01)
    direction = m / (v.sqrt() + 1e-3)
    if draws:
        found = wide * direction.norm(dim=0) / (low.norm(dim=0) + 1e-8)
        norm = found.norm().item()
        if state["last"] and norm > 1.01 * state["last"]:
            found *= 1.01 * state["last"] / norm
        state["last"] = found.norm().item()
    else:
        found = 0.5 * state["projector"] @ direction
    p.sub_((found if wide is g else found.T) * 1e-2 * (1 - 0.99**step) ** 0.5 / (1 - 0.9**step))
    p.mul_(1 - 1e-2 * 0.1)


ADAM = {"betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
FORMULAS = {
    "GaLore": Formula(
        {**ADAM, "rank": 4, "update_proj_gap": 2, "scale": 0.5}, partial(low_rank, draws=False)
    ),
    "Apollo": Formula(
        {**ADAM, "rank": 4, "update_proj_gap": 2, "seed": 7}, partial(low_rank, draws=True)
    ),
    "AdamMini": Formula(
        {
            **ADAM,
            "eps": 1e-6,
            "dim": WIDTH,
            "n_heads": 3,
        },
        adam_mini,
    ),
    "Adafactor": Formula({"lr": 0.02, "d": 1.5, "weight_decay": 0.1}, adafactor),
    "AdamWScheduleFree": Formula(
        {"betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1, "warmup_steps": 3, "r": 1.0},
        schedule_free,
        lambda y, state: state["x"],
    ),
}


class Layer(nn.Module):
    """A norm, a projection to keys of 3 heads, a wide matrix, a stack of matrices, a tall matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.stack = nn.Parameter(torch.randn(2, 12, 5) * 0.1)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.k_proj(self.norm(x)))
        return x + self.down((inner @ self.stack).transpose(0, 1).flatten(1).tanh())


class Gain(nn.Module):
    """One number, of which most ranks have no part."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    """Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Gain(), Layer()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.T).float(), tokens.roll(1, 1).flatten())


def model_of() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> Tensor:
    """Tokens [samples, 6] of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SAMPLES, 6), generator=generator)


def oracle(name: str) -> tuple[Values, Values]:
    """What training and what the export has after the steps, in one process."""
    model, formula = model_of(), FORMULAS[name]
    states: dict[str, dict[str, Any]] = {key: {} for key, _ in model.named_parameters()}
    for step in range(STEPS):
        model(batch(step)).backward()
        with torch.no_grad():
            for key, param in model.named_parameters():
                formula.update(key, param, param.grad, states[key], step + 1)
                param.grad = None
    named = [(key, param.detach()) for key, param in model.named_parameters()]
    return dict(named), {key: formula.shown(param, states[key]) for key, param in named}


def engine_of(name: str, stage: int, precision: str = "fp32", **more: Any) -> xds.Engine:
    samples, params = SAMPLES // dist.get_world_size(), FORMULAS[name].params
    settings = config(stage, precision, samples=samples, optimizer=name, params=params, **more)
    return xds.initialize(model_of(), settings)


def advance(engine: xds.Engine, start: int, stop: int) -> None:
    for step in range(start, stop):
        if "weight_lr_power" in engine.optimizer.param_groups[0]:
            for group in engine.optimizer.param_groups:
                group["lr"] = rate_of(step + 1)
        train(engine, [step], lambda step, _: of_rank(batch(step)))


def switch(engine: xds.Engine, mode: str) -> None:
    getattr(engine.optimizer, mode, lambda: None)()


def weights(engine: xds.Engine) -> Values:
    return engine.full_state_dict(rank0_only=False, full_precision=True)


def at_stages(name: str, *stages: int) -> list[Values]:
    """The weights for training; those for evaluation are the formula's as well."""
    trained, shown = oracle(name)
    results = []
    for stage in stages:
        engine = engine_of(name, stage)
        switch(engine, "train")
        advance(engine, 0, STEPS)
        results.append(weights(engine))
        assert not differing(results[-1], trained, 1e-6), stage
        switch(engine, "eval")
        assert not differing(weights(engine), shown, 1e-6), stage
        engine.destroy()
    return results


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.quick("AdamWScheduleFree", "GaLore")
def test_every_stage_and_number_of_ranks_computes_the_formula(name: str) -> None:
    for num_ranks, stages in ((1, (0,)), (2, (0, 1, 2, 3)), (4, (3,))):
        for results in run_ranks(at_stages, num_ranks, name, *stages):
            assert not any(differing(values, results[0]) for values in results)


def in_16_bits(name: str) -> None:
    wanted, _ = oracle(name)
    start = dict(model_of().named_parameters())
    results = []
    for stage, zero in ((1, {}), (3, {}), (2, {"offload_optimizer": {"device": "cpu"}})):
        engine = engine_of(name, stage, "bf16", zero=zero)
        advance(engine, 0, STEPS)
        results.append(weights(engine))
        engine.destroy()
    moved = torch.cat([(wanted[key] - param).flatten() for key, param in start.items()])
    seen = torch.cat([(results[0][key] - p.bfloat16()).flatten() for key, p in start.items()])
    assert (seen - moved).norm() <= 0.25 * moved.norm()  # gradients have three digits
    assert not any(differing(values, results[0]) for values in results)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.quick("Adafactor")
def test_16_bits_are_close_and_equal_at_all_stages_and_on_the_host(name: str) -> None:
    run_ranks(in_16_bits, 2, name)


def save_half(name: str, folder: str, stage: int) -> Values:
    """Train, save in the middle, go on from there; the weights at the end."""
    engine = engine_of(name, stage)
    advance(engine, 0, HALF - 1)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # changes nothing
    advance(engine, HALF - 1, HALF)
    switch(engine, "eval")
    engine.save_checkpoint(folder, "evaluated")
    exported = weights(engine)
    switch(engine, "train")
    engine.save_checkpoint(folder, "trained")
    advance(engine, HALF, STEPS)
    found = weights(engine)
    engine.destroy()
    if not dist.get_rank():
        assert not differing(xds.get_fp32_state_dict(folder, "evaluated"), exported)
    return found


def go_on(name: str, folder: str, stage: int, tag: str) -> Values:
    engine = engine_of(name, stage)
    switch(engine, "train")
    engine.load_checkpoint(folder, tag)
    switch(engine, "train")
    advance(engine, HALF, STEPS)
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.quick("GaLore")
def test_a_run_resumes_exactly_and_at_any_layout(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    wanted = run_ranks(save_half, 2, name, folder, 2)[0]
    for num_ranks, stage, tag in ((2, 3, "evaluated"), (4, 1, "trained"), (1, 0, "evaluated")):
        found = run_ranks(go_on, num_ranks, name, folder, stage, tag)[0]
        assert not differing(found, wanted, 0 if num_ranks == 2 else 1e-6), (num_ranks, tag)


def torchs_class(folder: str, stage: int, number: int) -> Values:
    """Half of the steps, with torch's class for `number` 0; then those of the config go on."""
    settings = config(stage, samples=SAMPLES // dist.get_world_size(), optimizer="Adafactor")
    settings["optimizer"]["params"] = FORMULAS["Adafactor"].params
    given = None
    if not number:
        params = settings.pop("optimizer")["params"]
        given = partial(torch.optim.Adafactor, **params)
    engine = xds.initialize(model_of(), settings, optimizer=given)
    if number:
        engine.load_checkpoint(folder)
    advance(engine, number * HALF, (number + 1) * HALF)
    engine.save_checkpoint(folder)
    found = weights(engine)
    engine.destroy()
    return found


def test_adafactor_goes_on_from_a_checkpoint_of_torchs_class(tmp_path: Path) -> None:
    run_ranks(torchs_class, 2, str(tmp_path), 0, 0)
    found = run_ranks(torchs_class, 2, str(tmp_path), 3, 1)[0]
    assert not differing(found, oracle("Adafactor")[0], 1e-6)


# -- bytes of states ------------------------------------------------------------------------------------------

PARAMETERS = {name: tuple(param.shape) for name, param in model_of().named_parameters()}


def numel_of_states(name: str, key: str) -> tuple[int, int]:
    """The numbers in the states that belong to the whole parameter `key`, and states of its size."""
    shape = PARAMETERS[key]
    if name == "AdamWScheduleFree":
        return 0, 2
    if name == "AdamMini":
        return 3 if key.endswith("k_proj.weight") else shape[0] if len(shape) > 1 else 1, 1
    if name == "Adafactor":
        return math.prod(shape[:-2]) * sum(shape[-2:]) if len(shape) > 1 else math.prod(shape), 0
    if len(shape) != 2 or "embed" in key:
        return 0, 2
    return 2 * 4 * max(shape) + (4 * min(shape) if name == "GaLore" else 1), 0


def bytes_held(name: str, stage: int) -> tuple[int, int]:
    """Bytes of the states on this rank, and by the formula for the parts that it has."""
    engine = engine_of(name, stage)
    advance(engine, 0, 1)
    held, wanted = engine.memory_plan()["optimizer"], 0
    for master in engine._parts.updater.masters:
        for item in master.items:
            numels = [numel_of_states(name, part.name) for part in item.parts]
            parts = engine._parts.updater.world.flat_of(item).parts  # of all ranks
            each = next(numel_of_states(name, p.name)[1] for p in parts if p.group == item.group)
            wanted += sum(whole for whole, _ in numels) + item.master.numel() * each
            wanted += isinstance(engine.optimizer.state[item.master]["step"], Tensor)  # AdamW's
    engine.destroy()
    return held, 4 * wanted


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.quick("AdamMini", "Apollo")
def test_states_take_the_bytes_of_the_formula(name: str) -> None:
    for num_ranks, stage in ((1, 0), (4, 3)):
        for held, wanted in run_ranks(bytes_held, num_ranks, name, stage):
            assert held == wanted, (num_ranks, stage)


# -- frozen parameters, modes --------------------------------------------------------------------------------


def freezes(name: str, folder: str) -> None:
    """A parameter that is frozen for a step keeps its values and states."""
    engine = engine_of(name, 2)
    switch(engine, "train")
    advance(engine, 0, 2)
    before, frozen = weights(engine), "layers.0.down.weight"
    engine.save_checkpoint(folder, "before")
    engine.module.get_parameter(frozen).requires_grad_(False)
    advance(engine, 2, 3)
    engine.module.get_parameter(frozen).requires_grad_(True)
    engine.save_checkpoint(folder, "after")
    assert differing(weights(engine), before) == sorted(before.keys() - {frozen})
    engine.destroy()
    if not dist.get_rank():
        readers = [CheckpointReader(folder, tag) for tag in ("before", "after")]
        states = [reader.states(frozen) for reader in readers]
        for key in states[0].keys() - {"step", "lr_max", "weight_sum"}:
            kept = [reader.read(state[key]) for reader, state in zip(readers, states, strict=True)]
            assert torch.equal(*kept), key


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.quick("AdamMini", "GaLore")
def test_a_frozen_parameter_keeps_its_values_and_states(name: str, tmp_path: Path) -> None:
    run_ranks(freezes, 2, name, str(tmp_path))


def reads_factors() -> str:
    engine = engine_of("Adafactor", 3)
    advance(engine, 0, 1)
    param = engine.module.get_parameter("layers.0.down.weight")
    with pytest.raises(xds.UsageError) as caught:
        xds.zero.get_full_optimizer_state(param, "row_var")
    engine.destroy()
    return str(caught.value)


def test_a_state_of_a_whole_parameter_is_not_gathered() -> None:
    for text in run_ranks(reads_factors, 4):
        assert 'state "row_var" of layers.0.down.weight belongs to the whole parameter' in text


def steps_in_evaluation() -> str:
    engine = engine_of("AdamWScheduleFree", 3)
    advance(engine, 0, 1)
    switch(engine, "eval")
    before = weights(engine)
    engine.backward(engine(of_rank(batch(1))))
    with pytest.raises(xds.UsageError) as caught:
        engine.step()
    assert not differing(weights(engine), before)
    engine.destroy()
    return str(caught.value)


def test_a_step_with_the_weights_for_evaluation_is_refused_on_every_rank() -> None:
    for text in run_ranks(steps_in_evaluation, 2):
        assert text.startswith("engine.step() after optimizer.eval()")


def test_an_export_says_that_it_has_the_weights_for_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(save_half, 1, "AdamWScheduleFree", str(tmp_path), 0)
    assert "schedule-free" not in caplog.text
    xds.get_fp32_state_dict(tmp_path, "trained")
    assert "call optimizer.eval() before save_checkpoint" in caplog.text
