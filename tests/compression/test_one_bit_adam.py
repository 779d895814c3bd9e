"""1-bit Adam: numbers of a reference in float64, bytes, skipped steps, accumulation."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_bit_reference import LambReference, Reference
from thinned import pairwise
from torch import Tensor, nn
from warm_ranks import warm

import xds
from xds.zero import get_full_param

CHUNK = 2048
STEPS, FREEZE = 20, 6
LR, DECAY = 1e-2, 0.1
MARGIN = 2e-6  # of a value that is packed; fp32 is wrong by a few 1e-7
SLOW = pytest.mark.slow


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
    params = {"lr": LR, "freeze_step": FREEZE, "weight_decay": DECAY}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
        **more,
    }


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
    [
        (0, 2, 1, "OneBitAdam"),
        (1, 3, 1, "OneBitAdam"),
        (2, 2, 3, "OneBitAdam"),
        (0, 2, 1, "OneBitLamb"),
        (2, 3, 1, "OneBitLamb"),
        *(
            pytest.param(*case, marks=SLOW)
            for case in pairwise((0, 1, 2), (2, 3, 4), (1, 2), ("OneBitAdam", "OneBitLamb"))
        ),
    ],
)
def test_steps_are_those_of_the_reference(
    stage: int, num_ranks: int, num_micro: int, kind: str
) -> None:
    seed, expected = wanted(stage, num_ranks, num_micro, kind)
    found = warm(num_ranks).run(train, stage, num_micro, kind, seed)
    for values, _ in found:
        assert values.equal(found[0][0])
        error = (values - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(error.max()) <= 1e-5


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=SLOW)])
def test_a_compressed_step_sends_its_formula(num_ranks: int) -> None:
    for stage in (0, 1, 2):
        _, sent = warm(num_ranks).run(train, stage)[0]
        leg = (num_ranks - 1) * (CHUNK // 8 + 4 * CHUNK // 1024)
        second = "one-bit sums" if stage == 0 else "one-bit parameters"
        for one in sent[FREEZE + 1 :]:
            assert one.pop("control") <= 16 * num_ranks
            assert {k: v for k, v in one.items() if v} == {"one-bit gradients": leg, second: leg}
        assert sent[0]["reduce_scatter"] == 4 * (num_ranks - 1) * CHUNK


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
    """Losses and norms; paths: where to load from and to save to, "" for neither. more: also `kind`."""
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
    if save:
        engine.save_checkpoint(save)
    table = get_full_param(engine.module.embed.weight)
    params = torch.cat([param.detach().float().flatten() for param in engine.module.parameters()])
    engine.destroy()
    return found, params, table


def test_stages_1_and_2_have_the_same_bits_and_elements_without_gradients_stay() -> None:
    runs = [warm(2).run(train_table, stage, 15, 0, {}) for stage in (1, 2)]
    first = runs[0][0]
    for of_rank in runs:
        for losses, params, table in of_rank:
            assert params.equal(first[1]) and table.equal(first[2])
            assert [norm for _, norm in losses] == [norm for _, norm in first[0]]
    assert not first[2][0].any()  # padding
    # never used: weight decay moves them before the freeze, and nothing after it
    kept = Table().embed.weight.detach()[30:] * (1 - LR * DECAY) ** FREEZE
    torch.testing.assert_close(first[2][30:], kept, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (0, "fp32"),
        (2, "bf16"),
        *(pytest.param(*case, marks=SLOW) for case in ((1, "fp16"), (0, "bf16"), (2, "fp32"))),
    ],
)
def test_a_resumed_run_has_the_same_bits(stage: int, precision: str, tmp_path: Any) -> None:
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    folder = str(tmp_path)
    warm(2).run(train_table, stage, 10, 0, more, "", folder)
    whole = warm(2).run(train_table, stage, 14, 0, more)
    resumed = warm(2).run(train_table, stage, 4, 10, more, folder, "")
    for one, two in zip(whole, resumed, strict=True):
        assert one[0][10:] == two[0]
        assert one[1].equal(two[1])


def owed(stage: int, load: str) -> Any:
    """What all ranks owe, as mean gradients, after a load; and the loss of the next steps."""
    engine = xds.initialize(Table(), config_of(stage))
    engine.load_checkpoint(load)
    total = torch.zeros(())
    for master in engine._parts.updater.masters:
        found = master.grads.reducer.owed
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


@pytest.mark.parametrize(("stage", "to"), [(2, 2), (1, 0)])
def test_what_is_owed_is_kept_at_another_number_of_ranks(
    stage: int, to: int, tmp_path: Any
) -> None:
    folder = str(tmp_path)
    warm(3).run(train_table, stage, 10, 0, {}, "", folder)
    expected, _ = warm(3).run(owed, stage, folder)[0]
    assert expected > 0
    for num_ranks in (2, 4):
        for found, losses in warm(num_ranks).run(owed, to, folder):
            assert found == pytest.approx(expected, rel=1e-5)
            assert max(losses) < 4


def skip(stage: int) -> Any:
    """What is owed by each rank around a step that one rank's gradients make overflow."""
    numel = CHUNK * dist.get_world_size()
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = xds.initialize(Vector(numel), config_of(stage, fp16=fp16))
    (master,) = engine._parts.updater.masters
    reducer = master.grads.reducer
    for step in range(FREEZE + 2):
        engine.backward(engine(grad_of(numel, step, dist.get_rank()).half()))
        engine.step()
    before = reducer.error.clone() * reducer.owed.unit
    server = None if stage else reducer.server_error.clone() * reducer.owed.unit
    params = engine.module.weight.detach().clone()
    grad = grad_of(numel, 50, dist.get_rank()).half()
    if dist.get_rank() == 1:
        grad[7] = float("inf")
    engine.backward(engine(grad))
    engine.step()
    assert engine.skipped_steps == 1 and engine.module.weight.equal(params)
    after = reducer.error.clone() * reducer.owed.unit
    if server is not None:
        later = reducer.server_error * reducer.owed.unit
        assert torch.allclose(later, server, rtol=0, atol=1e-5 * float(server.abs().max()))
    # one more step reads the errors in the unit of the lower scale
    engine.backward(engine(grad_of(numel, 51, dist.get_rank()).half()))
    engine.step()
    assert engine.skipped_steps == 1 and bool(engine.module.weight.isfinite().all())
    engine.destroy()
    return before, after, grad.float() / dist.get_world_size()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_skipped_step_owes_its_gradients_again(stage: int) -> None:
    for rank, (before, after, grad) in enumerate(warm(2).run(skip, stage)):
        expected = before + grad
        if rank == 1:  # the block with inf keeps what it owed
            expected[:1024] = before[:1024]
        assert torch.allclose(after, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def sums_around_a_step(stage: int, num_backwards: int, load: str, save: str) -> Any:
    """b / (1 - b) m and all errors before a step, its gradient, and the same after it; as mean gradients."""
    numel = CHUNK * dist.get_world_size()
    engine = xds.initialize(Vector(numel), config_of(stage, gradient_clipping=0))
    (master,) = engine._parts.updater.masters
    reducer = master.grads.reducer

    def owed() -> Tensor:
        total = reducer.error.double() * reducer.owed.unit
        dist.all_reduce(total)
        if not stage:
            server = [torch.empty(CHUNK, dtype=torch.float64) for _ in range(dist.get_world_size())]
            server_error = reducer.server_error
            own = torch.zeros_like(server[0]) if server_error is None else server_error.double()
            dist.all_gather(server, own * (reducer.owed.unit / 0.1))
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
    holds = reducer.owed.holds_momentum
    before = owed() if holds else owed() + momentum() * 9
    grads = [grad_of(numel, 70 + at, dist.get_rank()) for at in range(num_backwards)]
    for grad in grads:
        engine.backward(engine(grad))
    engine.step()
    found = sum(grads).double() / dist.get_world_size()
    dist.all_reduce(found)
    after, sent = owed(), momentum()
    engine.destroy()
    return before + found, after, sent


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize(("stage", "to"), [(1, 1), (1, 0), (0, 2)])
def test_momenta_and_errors_are_kept_by_late_gradients_and_at_another_stage(
    stage: int, to: int, num_backwards: int, tmp_path: Any
) -> None:
    folder = str(tmp_path)
    warm(2).run(sums_around_a_step, stage, 1, "", folder)
    wanted, after, momentum = warm(2).run(sums_around_a_step, to, num_backwards, folder, "")[0]
    assert torch.allclose(after + 10 * momentum * (0.1 if to else 1), wanted, rtol=0, atol=1e-5)
    # and not much more or less than a tenth was sent
    share = float((momentum @ wanted) / (wanted @ wanted))
    assert 0.03 < share < 0.15


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


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "OneBitAdam"), (1, "OneBitLamb"), (2, "OneBitAdam")]
)
def test_a_run_resumed_within_a_step_has_the_same_bits(
    stage: int, kind: str, tmp_path: Any
) -> None:
    folder = str(tmp_path)
    expected = warm(2).run(within_a_step, stage, kind, "", folder)[0]
    for found in warm(2).run(within_a_step, stage, kind, folder, ""):
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
    found = warm(2).run(auto, {})
    assert found[0] == found[1] and 5 < found[0] < 29 and (found[0] + 1) % 5 == 0
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 22}}}
    assert warm(2).run(auto, warmup)[0] >= 24


def report(stage: int) -> Any:
    """The lines of the step report on rank 0."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("xds")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    numel = CHUNK * dist.get_world_size()
    more = {"comms_logger": {"enabled": True}, "steps_per_print": 1}
    engine = xds.initialize(Vector(numel), config_of(stage, **more))
    for step in range(FREEZE + 2):
        engine.backward(engine(grad_of(numel, step, dist.get_rank())))
        engine.step()
    engine.destroy()
    log.removeHandler(handler)
    log.setLevel(level)
    return [line for line in lines if line.startswith("step ")]


def test_the_report_has_bytes_by_kind_and_what_was_not_sent() -> None:
    lines, others = warm(2).run(report, 2)
    assert not others
    assert "sent reduce_scatter 8.19 KB, all_gather 8.19 KB" in lines[0]
    assert "fewer than exact" not in lines[0]
    said = "sent one-bit gradients 264 bytes, one-bit parameters 264 bytes, control 16 bytes, 31.0x fewer"
    assert said in lines[-1] and "not sent yet " in lines[-1]
    assert "to other hosts" not in lines[-1]
