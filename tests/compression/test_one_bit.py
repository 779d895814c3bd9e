"""1-bit Adam: numbers of a reference in float64, bytes, skipped steps, accumulation."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from one_bit_reference import LambReference, Reference
from runs import PRECISIONS, config
from torch import Tensor, nn

import xds
from xds.compression.one_bit.phase import MomentumRange, OneBitState, Phase
from xds.compression.one_bit.reducer import OneBitReducer
from xds.compression.scheme import Buffer
from xds.ops.comm.opening import open_collectives
from xds.ops.optim.freezing import VarianceRule
from xds.zero import get_full_param

CHUNK = 2048
STEPS, FREEZE, SAVED = 12, 5, 10
LR, DECAY = 1e-2, 0.1
MARGIN = 2e-6  # of a value that is packed; fp32 is wrong by a few 1e-7


class Vector(nn.Module):
    """One parameter [n], whose gradient is the input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(numel, generator=generator))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def grad_of(numel: int, step: int, rank: int, micro: int = 0, seed: int = 0) -> Tensor:
    """Some elements never have a gradient."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + 10 * rank + micro)
    grad = torch.randn(numel, generator=generator) + 0.3
    grad[5::97] = 0
    return grad


def config_of(stage: int, kind: str = "OneBitAdam", **more: Any) -> dict[str, Any]:
    params = {"freeze_step": FREEZE, "weight_decay": DECAY}
    return config(stage, samples=1, optimizer=kind, params=params, **more)


def train(stage: int, num_micro: int = 1, kind: str = "OneBitAdam", seed: int = 0) -> Any:
    """The parameter after each step, as forward reads it; and the bytes of each step, by kind."""
    numel = CHUNK * dist.get_world_size()
    engine = xds.initialize(
        Vector(numel), config_of(stage, kind, gradient_accumulation_steps=num_micro)
    )
    values, sent = [], []
    for step in range(STEPS):
        before = engine.bytes_sent()
        for micro in range(num_micro):
            engine.backward(engine(grad_of(numel, step, dist.get_rank(), micro, seed)))
            engine.step()
        values.append(engine.module.weight.detach().clone())
        sent.append({k: v - before.get(k, 0) for k, v in engine.bytes_sent().items()})
    engine.destroy()
    return torch.stack(values), sent


def wanted(stage: int, num_ranks: int, num_micro: int, kind: str) -> tuple[int, Tensor]:
    """A seed, and the parameter after each step. Of seeds whose signs fp32 finds as well, the first."""
    numel = CHUNK * num_ranks
    of_kind = LambReference if kind == "OneBitLamb" else Reference
    for seed in range(50):
        reference = of_kind(Vector(numel).weight.detach(), num_ranks, FREEZE, stage, LR, DECAY)
        values = []
        for step in range(STEPS):
            grads = [
                sum(grad_of(numel, step, rank, micro, seed) for micro in range(num_micro))
                / num_micro
                for rank in range(num_ranks)
            ]
            reference.step(grads)
            values.append(reference.copy)
        if reference.margin > MARGIN:
            return seed, torch.stack(values)
    raise AssertionError("no seed with clear signs")


@pytest.mark.parametrize(
    ("stage", "num_ranks", "num_micro", "kind"),
    [(0, 3, 1, "OneBitAdam"), (2, 2, 3, "OneBitAdam"), (1, 3, 1, "OneBitLamb")],
)
def test_steps_are_those_of_the_reference(
    stage: int, num_ranks: int, num_micro: int, kind: str
) -> None:
    seed, expected = wanted(stage, num_ranks, num_micro, kind)
    found = run_ranks(train, num_ranks, stage, num_micro, kind, seed)
    for values, _ in found:
        assert values.equal(found[0][0])
        error = (values - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(error.max()) <= 1e-5


def test_a_compressed_step_sends_its_formula() -> None:
    num_ranks = 3
    for stage in (0, 1, 2):
        _, sent = run_ranks(train, num_ranks, stage)[0]
        leg = (num_ranks - 1) * (CHUNK // 8 + 4 * CHUNK // 1024)
        second = "one-bit sums" if stage == 0 else "one-bit parameters"
        for one in sent[FREEZE + 1 :]:
            assert one.pop("control") <= 32 * num_ranks
            assert {k: v for k, v in one.items() if v} == {"one-bit gradients": leg, second: leg}
        assert sent[0]["reduce_scatter"] == 4 * (num_ranks - 1) * CHUNK


def held(stage: int) -> list[int]:
    """The bytes of gradients between steps, before the freeze and after the last step."""
    numel = CHUNK * dist.get_world_size()
    engine = xds.initialize(Vector(numel), config_of(stage))
    found = []
    for step in range(STEPS):
        engine.backward(engine(grad_of(numel, step, dist.get_rank())))
        engine.step()
        found.append(engine.memory_plan()["grad"])
    engine.destroy()
    return [found[0], found[-1]]


@pytest.mark.parametrize(("stage", "server"), [(0, 4 * CHUNK), (1, 0)])
def test_what_was_not_sent_counts_as_memory(stage: int, server: int) -> None:
    num_ranks = 2
    for before, after in run_ranks(held, num_ranks, stage):
        assert after - before == 4 * CHUNK * num_ranks + server


class Table(nn.Module):
    """An embedding with a row that stays zero, and rows that are used late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 24, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.head = nn.Linear(24, 40)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def tokens_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(1, 30, (4, 8), generator=generator)
    tokens[:, 0] = 0
    return tokens, (tokens * 3 + 1) % 40


def train_table(stage: int, steps: int, start: int, more: dict[str, Any], *paths: str) -> Any:
    """Losses and norms. paths: where to load from, and where to save after step SAVED, "" for neither."""
    engine = xds.initialize(Table(), config_of(stage, gradient_clipping=1.0, **more))
    load, save = paths or ("", "")
    if load:
        engine.load_checkpoint(load)
    found = []
    for step in range(start, start + steps):
        loss = engine(*tokens_of(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
        if save and step + 1 == SAVED:
            engine.save_checkpoint(save)
    table = get_full_param(engine.module.embed.weight)
    params = torch.cat([param.detach().float().flatten() for param in engine.module.parameters()])
    engine.destroy()
    return found, params, table


def test_stages_1_and_2_have_the_same_bits_and_elements_without_gradients_stay() -> None:
    runs = [run_ranks(train_table, 2, stage, 15, 0, {}) for stage in (1, 2)]
    first = runs[0][0]
    for of_rank in runs:
        for losses, params, table in of_rank:
            assert params.equal(first[1]) and table.equal(first[2])
            assert [norm for _, norm in losses] == [norm for _, norm in first[0]]
    assert not first[2][0].any()  # padding
    # never used: weight decay moves them before the freeze, and nothing after it
    kept = Table().embed.weight.detach()[30:] * (1 - LR * DECAY) ** FREEZE
    torch.testing.assert_close(first[2][30:], kept, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp16")])
def test_a_resumed_run_has_the_same_bits(stage: int, precision: str, tmp_path: Any) -> None:
    more, folder = PRECISIONS[precision], str(tmp_path)
    whole = run_ranks(train_table, 2, stage, 14, 0, more, "", folder)
    resumed = run_ranks(train_table, 2, stage, 4, SAVED, more, folder, "")
    for one, two in zip(whole, resumed, strict=True):
        assert one[0][SAVED:] == two[0]
        assert one[1].equal(two[1])


def errors_after(stage: int, load: str) -> Any:
    """The errors of all ranks, as mean gradients, after a load; and the loss of the next steps."""
    engine = xds.initialize(Table(), config_of(stage))
    engine.load_checkpoint(load)
    total = torch.zeros(())
    for master in engine._parts.updater.masters:
        found = master.grads.reducer.pending_error
        part = found.error.double() * found.unit
        dist.all_reduce(part)
        server = torch.zeros(part.numel() // dist.get_world_size(), dtype=torch.float64)
        if found.server is not None:
            server += (
                found.server.double() * found.unit / 0.1
            )  # momenta are (1 - b) times gradients
        for slot in master.params.layout.slots:
            total = total + part[slot.offset : slot.stop].square().sum()
    losses = []
    for step in range(10, 13):
        loss = engine(*tokens_of(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return float(total), losses


@pytest.mark.parametrize(("stage", "to", "num_ranks"), [(2, 2, 2), (1, 0, 4)])
def test_what_is_owed_is_kept_at_another_number_of_ranks(
    stage: int, to: int, num_ranks: int, tmp_path: Any
) -> None:
    folder = str(tmp_path)
    run_ranks(train_table, 3, stage, SAVED, 0, {}, "", folder)
    expected, _ = run_ranks(errors_after, 3, stage, folder)[0]
    assert expected > 0
    for found, losses in run_ranks(errors_after, num_ranks, to, folder):
        assert found == pytest.approx(expected, rel=1e-5)
        assert max(losses) < 4


def skip(stage: int) -> Any:
    """The error of each rank around a step that one rank's gradients make overflow."""
    numel = CHUNK * dist.get_world_size()
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = xds.initialize(Vector(numel), config_of(stage, fp16=fp16))
    (master,) = engine._parts.updater.masters
    reducer = master.grads.reducer
    for step in range(FREEZE + 2):
        engine.backward(engine(grad_of(numel, step, dist.get_rank()).half()))
        engine.step()
    before = reducer.error.clone() * reducer.pending_error.unit
    server = None if stage else reducer.server_error.clone() * reducer.pending_error.unit
    params = engine.module.weight.detach().clone()
    grad = grad_of(numel, 50, dist.get_rank()).half()
    if dist.get_rank() == 1:
        grad[7] = float("inf")
    engine.backward(engine(grad))
    engine.step()
    assert engine.skipped_steps == 1 and engine.module.weight.equal(params)
    after = reducer.error.clone() * reducer.pending_error.unit
    if server is not None:
        later = reducer.server_error * reducer.pending_error.unit
        assert torch.allclose(later, server, rtol=0, atol=1e-5 * float(server.abs().max()))
    # one more step reads the errors in the unit of the lower scale
    engine.backward(engine(grad_of(numel, 51, dist.get_rank()).half()))
    engine.step()
    assert engine.skipped_steps == 1 and bool(engine.module.weight.isfinite().all())
    engine.destroy()
    return before, after, grad.float() / dist.get_world_size()


def test_a_skipped_step_adds_its_gradients_to_the_errors() -> None:
    for stage in (0, 2):
        for rank, (before, after, grad) in enumerate(run_ranks(skip, 2, stage)):
            expected = before + grad
            if rank == 1:  # the block with inf keeps its error
                expected[:1024] = before[:1024]
            assert torch.allclose(after, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def sums_around_a_step(stage: int, num_backwards: int, load: str, save: str) -> Any:
    """b / (1 - b) m and all errors before a step, its gradient, and the same after it; as mean gradients."""
    numel = CHUNK * dist.get_world_size()
    engine = xds.initialize(Vector(numel), config_of(stage, gradient_clipping=0))
    (master,) = engine._parts.updater.masters
    reducer = master.grads.reducer

    def pending() -> Tensor:
        total = reducer.error.double() * reducer.pending_error.unit
        dist.all_reduce(total)
        if not stage:
            server = [torch.empty(CHUNK, dtype=torch.float64) for _ in range(dist.get_world_size())]
            server_error = reducer.server_error
            own = torch.zeros_like(server[0]) if server_error is None else server_error.double()
            dist.all_gather(server, own * (reducer.pending_error.unit / 0.1))
            total += torch.cat(server)
        return total

    def momentum() -> Tensor:
        return xds.zero.get_full_optimizer_state(engine.module.weight, "exp_avg").double().view(-1)

    if load:
        engine.load_checkpoint(load)
    for step in range(engine.global_steps, FREEZE + 3):
        engine.backward(engine(grad_of(numel, step, dist.get_rank())))
        engine.step()
    if save:
        engine.save_checkpoint(save)
    holds = reducer.pending_error.holds_momentum
    before = pending() if holds else pending() + momentum() * 9
    grads = [grad_of(numel, 70 + at, dist.get_rank()) for at in range(num_backwards)]
    for grad in grads:
        engine.backward(engine(grad))
    engine.step()
    found = sum(grads).double() / dist.get_world_size()
    dist.all_reduce(found)
    after, sent = pending(), momentum()
    engine.destroy()
    return before, before + found, after, sent


@pytest.mark.parametrize(("stage", "to", "num_backwards"), [(0, 2, 1), (0, 2, 2), (1, 0, 2)])
def test_momenta_and_errors_are_kept_by_late_gradients_and_at_another_stage(
    stage: int, to: int, num_backwards: int, tmp_path: Any
) -> None:
    folder = str(tmp_path)
    saved = run_ranks(sums_around_a_step, 2, stage, 1, "", folder)[0][0]
    loaded, *found = run_ranks(sums_around_a_step, 2, to, num_backwards, folder, "")[0]
    assert torch.allclose(loaded, saved, rtol=0, atol=1e-5)
    wanted, after, momentum = found
    assert torch.allclose(after + 10 * momentum * (0.1 if to else 1), wanted, rtol=0, atol=1e-5)
    # and not much more or less than a tenth was sent
    share = float((momentum @ wanted) / (wanted @ wanted))
    assert 0.03 < share < 0.11


def within_a_step(stage: int, kind: str, load: str, save: str) -> Any:
    """The parameter after step FREEZE + 3, of 3 micro-batches each; saved or loaded within step FREEZE + 2."""
    numel = CHUNK * dist.get_world_size()
    engine = xds.initialize(Vector(numel), config_of(stage, kind, gradient_accumulation_steps=3))
    saved_at = 3 * (FREEZE + 1) + 2
    if load:
        engine.load_checkpoint(load)
        assert engine.micro_steps == saved_at
    for at in range(engine.micro_steps, 3 * (FREEZE + 3)):
        if save and at == saved_at:
            engine.save_checkpoint(save)
        engine.backward(engine(grad_of(numel, at // 3, dist.get_rank(), at % 3)))
        engine.step()
    found = xds.zero.get_full_param(engine.module.weight).clone()
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "kind"), [(0, "OneBitAdam"), (1, "OneBitLamb")])
def test_a_run_resumed_within_a_step_has_the_same_bits(
    stage: int, kind: str, tmp_path: Any
) -> None:
    folder = str(tmp_path)
    expected = run_ranks(within_a_step, 2, stage, kind, "", folder)[0]
    for found in run_ranks(within_a_step, 2, stage, kind, folder, ""):
        assert found.equal(expected)


def auto(scheduler: dict[str, Any]) -> Any:
    config = config_of(1, **scheduler)
    config["optimizer"]["params"] |= {"freeze_step": "auto", "betas": [0.9, 0.8]}
    numel = CHUNK * dist.get_world_size()
    engine = xds.initialize(Vector(numel), config)
    frozen = []
    for step in range(30):
        engine.backward(engine(grad_of(numel, step, dist.get_rank())))
        engine.step()
        frozen.append(engine.optimizer.is_frozen)
    engine.destroy()
    return frozen.index(True)


def test_the_variance_freezes_when_it_has_settled_and_the_rate_no_longer_rises() -> None:
    found = run_ranks(auto, 2, {})
    assert found[0] == found[1] and 5 < found[0] < 29 and (found[0] + 1) % 5 == 0
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 22}}}
    assert run_ranks(auto, 2, warmup)[0] >= 24


class Norms:
    """Variances whose 1-norm is given. Also of a checkpoint: it keeps `norm_before`."""

    norm_before: float | None = None
    now = 0.0

    def norm(self) -> float:
        return self.now


def frozen_after(norm_of: Any, warmup_steps: int = 0) -> int:
    """The first step after which the variance stays; 0: it never does. norm_of: corrected, by step."""
    beta2, variances = 0.8, Norms()
    for step in range(1, 31):
        variances.now = norm_of(step) * (1 - beta2**step)
        # a new rule for each step, as after a load
        if VarianceRule(beta2, warmup_steps).after(step, variances):
            return step
    return 0


def test_norms_are_compared_as_if_the_variance_had_not_begun_at_0() -> None:
    assert frozen_after(lambda step: 3.0) == 10  # the second one of every 5 steps
    assert frozen_after(lambda step: 3.0, 20) == 20
    assert frozen_after(lambda step: 0.0) == 0
    for rate, wanted in ((0.97, 10), (1.03, 10), (0.95, 0), (1.05, 0)):
        assert frozen_after(lambda step, rate=rate: rate ** (step // 5)) == wanted, rate


def report(stage: int) -> None:
    numel = CHUNK * dist.get_world_size()
    more = {"comms_logger": {"enabled": True}, "steps_per_print": 1}
    engine = xds.initialize(Vector(numel), config_of(stage, **more))
    for step in range(FREEZE + 2):
        engine.backward(engine(grad_of(numel, step, dist.get_rank())))
        engine.step()
    engine.destroy()


def test_the_report_has_bytes_by_kind_and_what_was_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "xds"):
        run_ranks(report, 2, 2)
    said = [record.getMessage() for record in caplog.records]
    lines = [text for text in said if text.startswith("step ")]
    assert len(lines) == FREEZE + 2  # of rank 0 alone
    assert "sent reduce_scatter 8.19 KB, all_gather 8.19 KB" in lines[0]
    assert "fewer than exact" not in lines[0]
    said = "sent one-bit gradients 264 bytes, one-bit parameters 264 bytes, control 32 bytes, 31.0x fewer"
    assert said in lines[-1] and "not sent yet " in lines[-1]
    assert "to other hosts" not in lines[-1]


# -- what a script writes before the first message ---------------------------------------------------------

EARLY = 3


class Two(nn.Module):
    """Two parameters of odd sizes in one flat buffer, whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.one = nn.Parameter(torch.randn(37, 3, generator=generator))
        self.two = nn.Parameter(torch.randn(203, generator=generator))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        one, two = (torch.randn(p.shape, generator=generator) for p in (self.one, self.two))
        return (self.one * one).sum() + (self.two * two).sum()


def start(stage: int, kind: str, more: dict[str, Any]) -> xds.Engine:
    params = {"freeze_step": EARLY} if kind != "AdamW" else {}
    return xds.initialize(Two(), config(stage, samples=1, optimizer=kind, params=params, **more))


def step(engine: xds.Engine, number: int) -> None:
    engine.backward(engine(number))
    engine.step()


def write(engine: xds.Engine) -> None:
    with torch.no_grad():
        engine.module.one.mul_(1.5)


def masters(engine: xds.Engine) -> list[Tensor]:
    return [get_full_param(param).clone() for param in (engine.module.one, engine.module.two)]


def write_before_the_freeze(stage: int, kind: str, reads: bool) -> list[Tensor]:
    engine = start(stage, kind, {})
    for number in range(EARLY):
        if number == 1:
            write(engine)
            if reads:
                assert get_full_param(engine.module.one).equal(engine.module.one)
        step(engine, number)
    found = masters(engine)
    engine.destroy()
    return found


def test_writes_in_exact_steps_are_those_of_adam() -> None:
    for stage, reads in ((1, False), (2, True)):
        expected = run_ranks(write_before_the_freeze, 2, stage, "AdamW", reads)[0]
        for found in run_ranks(write_before_the_freeze, 2, stage, "OneBitAdam", reads):
            for one, other in zip(found, expected, strict=True):
                assert one.equal(other), stage


def write_at_the_freeze(stage: int, precision: str, folder: str) -> Any:
    """The masters before a write, and after it and a step of rate 0. folder: where to stop between, or ""."""
    more = PRECISIONS[precision]
    engine = start(stage, "OneBitAdam", more)
    for number in range(EARLY):
        step(engine, number)
    if folder:
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = start(stage, "OneBitAdam", more)
        engine.load_checkpoint(folder)
    before = masters(engine)
    write(engine)
    written = engine.module.one.detach().float().clone()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    step(engine, EARLY)
    after = masters(engine)
    engine.destroy()
    return before, written, after


@pytest.mark.parametrize(("stage", "precision", "resumes"), [(1, "fp32", False), (2, "bf16", True)])
def test_a_write_before_the_first_message_leaves_other_masters_exact(
    stage: int, precision: str, resumes: bool, tmp_path: Any
) -> None:
    folder = str(tmp_path) if resumes else ""
    for before, written, after in run_ranks(write_at_the_freeze, 2, stage, precision, folder):
        assert after[0].equal(written)
        assert after[1].equal(before[1])


def betas_of_two(stage: int) -> str:
    """The message for two groups with other first betas."""
    model = Two()
    groups = [{"params": [model.one], "betas": (0.8, 0.99)}, {"params": [model.two]}]
    settings = config(stage, samples=1, optimizer="OneBitAdam", params={"freeze_step": EARLY})
    try:
        xds.initialize(model, settings, model_parameters=groups)
    except xds.UsageError as error:
        return str(error)
    return ""


def test_several_first_betas_are_refused() -> None:
    for stage in (0, 2):
        for message in run_ranks(betas_of_two, 2, stage):
            assert "several first betas (0.8, 0.9)" in message and "the same betas" in message


# -- padding -------------------------------------------------------------------------------------------------

BEFORE, AFTER = 10, 3  # steps before and after the save; the variance freezes at step 12


class Few(nn.Module):
    """Three elements, whose gradient is the input: they are all in the shard of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return (self.weight * (1 + torch.rand(3, generator=generator))).sum()


def train_few(kind: str, stage: int, freeze_step: int | str, folder: str) -> Any:
    """The parameter after each step, and whether the variance was frozen. folder: resumes there, or ""."""

    def build() -> xds.Engine:
        params = {"betas": [0.9, 0.5], "freeze_step": freeze_step}
        return xds.initialize(Few(), config(stage, samples=1, optimizer=kind, params=params))

    engine, found = build(), []
    for step in range(BEFORE + AFTER):
        if step == BEFORE and folder:
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = build()
            engine.load_checkpoint(folder)
        engine.backward(engine(step))
        engine.step()
        found.append((engine.module.weight.detach().clone(), engine.optimizer.is_frozen))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "stage", "freeze_step"), [("OneBitAdam", 2, "auto"), ("OneBitLamb", 1, 3)]
)
def test_a_rank_of_padding_knows_the_step(
    kind: str, stage: int, freeze_step: int | str, tmp_path: Any
) -> None:
    """It has no states of the optimizer in a checkpoint."""
    whole = run_ranks(train_few, 2, kind, stage, freeze_step, "")
    resumed = run_ranks(train_few, 2, kind, stage, freeze_step, str(tmp_path))
    assert whole[0][-1][1]
    for found in (*whole, *resumed):
        for (value, is_frozen), (expected, was_frozen) in zip(found, whole[0], strict=True):
            assert value.equal(expected) and is_frozen == was_frozen


class Frozen(OneBitState):
    """Of an optimizer whose variance stays, on one rank."""

    is_frozen, variance_steps, beta, unit = True, 5, 0.9, 1.0

    def momentum_of(self, buffer: int) -> list[MomentumRange]:
        return []

    def still(self, buffer: int, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.bool)


def kept_errors(num_copies: int) -> Tensor:
    group = open_collectives(dist.group.WORLD, torch.device("cpu"))
    phase = Phase()
    phase.bind(Frozen())
    buffer = Buffer(0, CHUNK, (), torch.float32, is_sharded=True, is_gathered=False)
    reducer = OneBitReducer(group, buffer, phase, num_copies)
    reducer.keep(torch.ones(CHUNK))
    return reducer.error


def test_a_gradient_that_several_ranks_have_is_kept_once() -> None:
    for num_copies in (1, 4):
        (error,) = run_ranks(kept_errors, 1, num_copies)
        assert error.eq(1 / num_copies).all()
