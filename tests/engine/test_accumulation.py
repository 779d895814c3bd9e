"""Which gradients a step is made of: batch sizes that change, the script's own backward passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xds
from xds.engine.counters import Accumulation
from xds.zero import get_full_grad, get_full_param

WIDE = 136  # a block's weight has more elements than the threshold below which gradients wait in `.grad`
NARROW = 4


class Blocks(nn.Module):
    """Two blocks around a shared width; `reentrant` checkpoints them so."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Linear(NARROW, WIDE)
        self.blocks = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(2)])
        self.head = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return self.head(x.tanh()).float().square().mean()


def model_of(**options: Any) -> Blocks:
    torch.manual_seed(0)
    return Blocks(**options)


def engine_of(stage: int, model: nn.Module | None = None, **more: Any) -> xds.Engine:
    changed = config(stage, optimizer="SGD", params={"lr": 0.5}, **more)
    return xds.initialize(model_of() if model is None else model, changed)


def part(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, NARROW, generator=generator)


def engine_backward(engine: xds.Engine, loss: Tensor) -> None:
    engine.backward(loss)


def bare(engine: xds.Engine, loss: Tensor) -> None:
    loss.backward()


def scaled(engine: xds.Engine, loss: Tensor) -> None:
    engine.scale(loss).backward()


def mixed(engine: xds.Engine, loss: Tensor) -> None:
    (engine_backward, bare, scaled)[engine.micro_steps % 3](engine, loss)


Backward = Callable[[xds.Engine, Tensor], None]


def plain_gradient(steps: list[list[int]], divisor: int) -> list[list[Tensor]]:
    """Gradients of each step at the initial values, averaged over ranks."""
    found = []
    for step in steps:
        model = model_of()
        for micro_batch in step:
            (model(part(micro_batch)) / divisor).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        found.append([param.grad for param in model.parameters()])
    return found


def updates_of(engine: xds.Engine) -> list[Tensor]:
    """What a step with lr 0.5 has taken off, as gradients."""
    after = [get_full_param(param) for param in engine.module.parameters()]
    dtype = next(engine.module.parameters()).dtype
    engine.destroy()
    before = [param.detach().to(dtype).float() for param in model_of().parameters()]
    return [(old - new) / 0.5 for old, new in zip(before, after, strict=True)]


def close(got: list[Tensor], want: list[Tensor], tolerance: float, what: object) -> None:
    for one, other in zip(got, want, strict=True):
        error = (one - other).norm() / max(float(other.norm()), 1e-3)
        assert error < tolerance, (what, float(error))


# -- backward passes of the script's own ------------------------------------------------------------------


def own_backwards(stage: int) -> None:
    """However a backward is started, the step and what is read before it are the mean of its micro-batches."""
    cases: list[tuple[str, Backward, int, str, float]] = [
        ("bare", bare, 1, "fp32", 1e-5),
        ("mixed", mixed, 4, "fp32", 1e-5),
        ("mixed", mixed, 3, "bf16", 0.05),
        ("scaled", scaled, 4, "fp16", 0.02),
    ]
    for name, backward, steps, precision, tolerance in cases:
        engine = engine_of(stage, precision=precision, accumulation=steps)
        for micro_batch in range(steps):
            backward(engine, engine(part(micro_batch)))
            if engine.is_gradient_accumulation_boundary():
                grads = [get_full_grad(param).float() for param in engine.module.parameters()]
            engine.step()
            assert engine.was_step_applied() == (micro_batch == steps - 1)
        (want,) = plain_gradient([list(range(steps))], steps)
        close(grads, want, tolerance, (stage, name, steps, precision, "read"))
        close(updates_of(engine), want, max(tolerance, 1e-4), (stage, name, steps, precision))


def own_backwards_held_back(stage: int) -> None:
    """In no_sync, with reentrant checkpoints, and where every step() is a boundary."""
    engine = engine_of(stage, accumulation=2)
    sent = engine.bytes_sent().get("reduce_scatter", 0)
    with engine.no_sync():
        engine(part(0)).backward()
    assert engine.bytes_sent().get("reduce_scatter", 0) == sent
    engine.step()
    engine(part(1)).backward()
    engine.step()
    (want,) = plain_gradient([[0, 1]], 2)
    close(updates_of(engine), want, 1e-4, (stage, "no_sync"))

    engine = engine_of(stage, model_of(reentrant=True), accumulation=2)
    for micro_batch in (0, 1):
        engine(part(micro_batch).requires_grad_()).backward()
        engine.step()
    close(updates_of(engine), want, 1e-4, (stage, "reentrant"))

    engine = engine_of(stage, accumulation=2, managed_gradient_accumulation=False)
    for micro_batch in (0, 1):
        engine(part(micro_batch)).backward()
    engine.step()
    assert engine.micro_steps == 2
    close(updates_of(engine), want, 1e-4, (stage, "unmanaged"))

    engine = engine_of(stage, accumulation=2, managed_gradient_accumulation=False)
    with engine.no_sync():  # nothing but this: step() reduces it
        engine(part(0)).backward()
        engine(part(1)).backward()
    engine.step()
    close(updates_of(engine), want, 1e-4, (stage, "all of it in no_sync"))


def unscaled_fp16(stage: int) -> None:
    """A bare backward in fp16 raises before it takes anything; what earlier ones brought is kept."""
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = engine_of(stage, accumulation=2, fp16=fp16)
    engine.backward(engine(part(0)))
    engine.step()
    with pytest.raises(xds.UsageError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        engine(part(5)).backward()
    engine.scale(engine(part(1))).backward()
    engine.step()
    (want,) = plain_gradient([[0, 1]], 2)
    close(updates_of(engine), want, 0.02, (stage, "after the refusal"))

    engine = engine_of(stage, fp16=fp16)
    with pytest.raises(xds.UsageError, match="in fp16, on a loss without the loss scale"):
        engine(part(0)).backward()
    with pytest.raises(xds.UsageError, match="without engine.backward"):
        engine.step()
    x = part(0).requires_grad_()
    torch.autograd.grad(engine(x).float(), x)  # no gradient of a parameter: nothing to refuse
    engine.destroy()
    static = engine_of(stage, fp16={"enabled": True, "loss_scale": 1})
    static(part(0)).backward()
    static.step()
    (want,) = plain_gradient([[0]], 1)
    close(updates_of(static), want, 0.02, (stage, "a loss scale of 1"))


class Words(nn.Module):
    """A table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words)).square().mean()


def sparse(stage: int) -> None:
    """The gradients of a table's rows, in the first micro-batch of a step and in the second."""
    micro_batches = [torch.tensor([number, number, 4 + dist.get_rank()]) for number in range(3)]
    plain = Words()
    for words in micro_batches:
        (plain(words) / 3).backward()
    want = plain.table.weight.grad.to_dense()
    dist.all_reduce(want)
    for backward in (bare, engine_backward, mixed):
        engine = engine_of(stage, Words(), accumulation=3)
        for words in micro_batches:
            backward(engine, engine(words))
            engine.step()
        got = (plain.table.weight.detach() - get_full_param(engine.module.table.weight)) / 0.5
        close([got], [want / dist.get_world_size()], 1e-5, (stage, backward.__name__))
        engine.destroy()


def through_another_engine(stage: int) -> None:
    """An engine whose gradients come out of another engine's backward unscales them by that one's scale."""
    scales = ({"enabled": True, "initial_scale_power": power} for power in (4, 9))
    first, second = (engine_of(stage, fp16=fp16) for fp16 in scales)
    first.backward(first(part(0)) + second(part(0)))
    first.step()
    second.step()
    (want,) = plain_gradient([[0]], 1)
    for engine in (first, second):
        close(updates_of(engine), want, 0.02, (stage, "two engines"))


def measured_between(clips: bool) -> float:
    """The norm of a step with backward passes of the script's own, after a step whose norm was asked for."""
    engine = engine_of(0, accumulation=2)
    for step in range(2):
        engine(part(step)).backward()
        if clips and step == 0:
            engine.clip_grad_norm(1e9)
        engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm


class Factor(nn.Module):
    """Its gradient is the input, for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, c: float) -> Tensor:
        return (self.weight * c).sum().float()


def sum_beyond_bf16(stage: int) -> None:
    """In bf16 256 + 1 is 256: sums of micro-batches are wider."""
    engine = xds.initialize(Factor(), config(stage, "bf16", optimizer="SGD", accumulation=4))
    for c in (256.0, 1.0, 1.0, 1.0):
        engine.backward(engine(c))
        engine.step()
    assert engine.get_global_grad_norm() == 259 / 2, stage
    engine.destroy()


# -- batch sizes that change ------------------------------------------------------------------------------


def changed_batch(stage: int) -> None:
    """Every step is the mean of whole micro-batches, whenever the size changes."""
    world = dist.get_world_size()
    engine = engine_of(stage)
    each = 2 * world
    applied: list[bool] = []

    def micro_batch() -> None:
        engine.backward(engine(part(0)))
        engine.step()
        applied.append(engine.was_step_applied())

    for _ in range(3):
        micro_batch()
    with pytest.raises(xds.UsageError, match="must be a multiple of micro-batch"):
        engine.set_train_batch_size(2 * each + 1)
    engine.set_train_batch_size(2 * each)
    for _ in range(3):
        micro_batch()
    engine.set_train_batch_size(3 * each)  # in the middle: from the next step on
    assert engine.gradient_accumulation_steps() == 3 and engine.train_batch_size() == 3 * each
    for _ in range(4):
        micro_batch()
    engine.set_train_batch_size(each)
    micro_batch()
    assert applied == [True] * 3 + [False, True, False, True, False, False, True, True]
    assert engine.global_steps == 7 and engine.micro_steps == 11
    engine.set_train_micro_batch_size(1)
    assert engine.train_batch_size() == world
    engine.destroy()

    (want,) = plain_gradient([[0, 1, 2, 3]], 4)
    for backward in (engine_backward, bare, scaled):
        engine = engine_of(stage, accumulation=4)
        for number in range(4):
            backward(engine, engine(part(number)))
            engine.step()
            engine.set_train_batch_size((number + 5) * each)
        close(updates_of(engine), want, 1e-4, (stage, "changed in the middle", backward.__name__))


def resumed(stage: int, folder: str) -> None:
    """A checkpoint from the middle of a step, after the size has changed, goes on where it was."""
    engine = engine_of(stage)
    engine.backward(engine(part(0)))
    engine.step()
    engine.set_train_batch_size(2 * 2 * dist.get_world_size())
    engine.backward(engine(part(1)))
    engine.step()
    engine.save_checkpoint(f"{folder}/{stage}")
    new = engine_of(stage, accumulation=2)
    new.load_checkpoint(f"{folder}/{stage}")
    for one in (engine, new):
        assert one.is_gradient_accumulation_boundary()
        one.backward(one(part(2)))
        one.step()
        assert one.was_step_applied() and one.micro_steps == 3
        one.destroy()
    for one, other in zip(engine.module.parameters(), new.module.parameters(), strict=True):
        assert one.equal(other)


# -- counters -----------------------------------------------------------------------------------------------


def counted(stage: int) -> None:
    """Where the script says when a step ends, samples are counted by backward passes."""
    samples = 2 * dist.get_world_size()
    unmanaged = engine_of(stage, managed_gradient_accumulation=False)
    forced = engine_of(stage, accumulation=3)
    for engine in (unmanaged, forced):
        for number in range(3):
            if engine is forced:
                engine.set_gradient_accumulation_boundary(number == 2)
            engine.backward(engine(part(number)))
        engine.step()
        assert (engine.micro_steps, engine.global_samples) == (3, 3 * samples)
        loss = engine(part(0))  # two losses of one forward are one micro-batch
        engine.backward(loss * 0.5, retain_graph=True)
        engine.backward(loss * 0.5)
        engine.step()
        assert (engine.micro_steps, engine.global_samples) == (4, 4 * samples)
        engine.destroy()


def at_several_stages(folder: str) -> None:
    for stage in (0, 1, 3):
        own_backwards(stage)
    for stage in (2, 3):
        own_backwards_held_back(stage)
        resumed(stage, folder)
        sum_beyond_bf16(stage)
    for stage in (0, 3):
        unscaled_fp16(stage)
        sparse(stage)
    changed_batch(1)
    through_another_engine(3)
    counted(2)


def test_a_step_is_the_mean_of_its_micro_batches(tmp_path: Path) -> None:
    run_ranks(at_several_stages, 2, str(tmp_path))


def test_a_norm_is_measured_anew_after_a_backward() -> None:
    assert run_ranks(measured_between, 1, True) == run_ranks(measured_between, 1, False)


def test_a_step_that_has_begun_ends_as_it_began() -> None:
    counts = Accumulation(2, is_managed=True)
    counts.backward()
    counts.count()
    counts.steps = 1
    assert counts.is_last() and counts.steps_now == 2
    counts.end_step()
    assert counts.steps_now == 1 and counts.is_last()
    counts.backward()
    counts.steps = 5
    counts.forget()  # its gradients were dropped
    assert counts.steps_now == 5 and not counts.is_last()
