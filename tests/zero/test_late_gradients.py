"""Gradients that arrive more than once in a backward, or after their buffer was sent: none is lost.

A reentrant checkpoint runs a graph of its own for every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import SMALL_NUMEL, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xds
from xds.compression.replicas import ReplicatedReducer
from xds.ops.comm.handles import Handle
from xds.zero.core.arrivals import Added, Arrivals

WIDTH = 12
assert WIDTH < SMALL_NUMEL < WIDTH**2  # gradients are copied in both ways


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.last = nn.Linear(width, 1)

    def run(self, x: Tensor, calls: list[nn.Module], reentrant: bool) -> Tensor:
        x = self.first(x)
        for block in calls:
            x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant))
        return self.last(x)


class Twice(Net):
    """Every block is used twice in a forward."""

    def forward(self, x: Tensor, reentrant: bool = True) -> Tensor:
        return self.run(x, [*self.blocks, *self.blocks], reentrant).square().mean()


class Pairs(Net):
    """Two forwards in one backward."""

    def forward(self, x: Tensor, reentrant: bool = True) -> Tensor:
        one = self.run(x, list(self.blocks), reentrant)
        return (one - self.run(-x * 0.5, list(self.blocks), reentrant)).square().mean()


class Inner(Net):
    """A block checkpoints a part of itself; the weight of one is used by the model as well."""

    def forward(self, x: Tensor, reentrant: bool = True) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(nn.Sequential(block, nn.Tanh()), x, use_reentrant=reentrant)
        return self.last(x @ self.blocks[0].weight).square().mean()


class Beside(Net):
    """One checkpoint calls a block twice, and neither call needs the other's output."""

    def forward(self, x: Tensor, reentrant: bool = True) -> Tensor:
        x = self.first(x)
        for block in self.blocks:

            def both(x: Tensor, block: nn.Module = block) -> Tensor:
                return torch.tanh(block(x)) + torch.tanh(block(-0.5 * x))

            x = checkpoint(both, x, use_reentrant=reentrant)
        return self.last(x).square().mean()


class Part(nn.Linear):
    """`stops`: the weight gets no gradient of this call, only the input does."""

    def forward(self, x: Tensor, stops: bool = False) -> Tensor:
        weight, bias = (p.detach() if stops else p for p in (self.weight, self.bias))
        return nn.functional.linear(x, weight, bias)


class Stops(Net):
    """One checkpoint calls the inner layer of a block twice: its gradients arrive between the two."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.blocks = nn.ModuleList([nn.Sequential(Part(width, width)) for _ in range(3)])

    def forward(self, x: Tensor, reentrant: bool = True) -> Tensor:
        x = self.first(x)
        for block in self.blocks:

            def both(x: Tensor, part: nn.Module = block[0]) -> Tensor:
                return torch.tanh(part(torch.tanh(part(x, stops=True))))

            x = checkpoint(both, x, use_reentrant=reentrant)
        return self.last(x).square().mean()


MODELS: list[type[Net]] = [Twice, Pairs, Inner]


def build(kind: type[Net] = Twice) -> Net:
    torch.manual_seed(0)
    return kind(WIDTH)


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(kind: type[Net], micro: int, world_size: int = 3) -> list[float]:
    """Norms of two steps."""

    def parts(step: int) -> list[Any]:
        numbers = range(micro * step, micro * (step + 1))
        return [(samples(at, rank), False) for at in numbers for rank in range(world_size)]

    return [one.norm for one in runs.plain(build(kind), 2, parts, optimizer="SGD", lr=0.1)]


def start(
    model: nn.Module, stage: int, micro: int = 1, is_managed: bool = True, **zero: Any
) -> xds.Engine:
    params = {"lr": 0.1}
    config = runs.config(stage, accumulation=micro, optimizer="SGD", params=params, zero=zero)
    return xds.initialize(model, config | {"managed_gradient_accumulation": is_managed})


def ours(kind: type[Net], case: Case) -> list[float]:
    engine = start(build(kind), case.stage, case.micro, case.is_managed, **case.zero)
    norms = []
    rank = dist.get_rank()
    for step in range(2):
        for part in range(case.micro):
            loss = engine(samples(case.micro * step + part, rank), case.reentrant(rank))
            if case.by_script:
                loss.backward()
            else:
                engine.backward(loss)
            if part + 1 == case.micro and case.reads:
                grads = [xds.zero.get_full_grad(param) for param in engine.module.parameters()]
                read = torch.sqrt(sum(grad.square().sum() for grad in grads))  # type: ignore[arg-type]
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        if case.reads:
            assert read.item() == pytest.approx(norm, rel=1e-5)
        norms.append(norm)
    engine.destroy()
    return norms


class Case:
    """How a model is trained; `reentrant` says which ranks use a reentrant checkpoint.

    is_managed: the engine knows which backward is the last of its step.
    """

    def __init__(
        self,
        stage: int,
        *,
        micro: int = 1,
        reads: bool = False,
        by_script: bool = False,
        is_managed: bool = True,
        reentrant: Callable[[int], bool] = lambda rank: True,
        **zero: Any,
    ) -> None:
        self.stage = stage
        self.micro = micro
        self.reads = reads
        self.by_script = by_script
        self.is_managed = is_managed
        self.reentrant = reentrant
        self.zero = zero


def cases() -> list[Case]:
    on_host = {"device": "cpu"}
    found = [Case(stage) for stage in range(4)]
    found += [Case(stage, micro=2, reads=True) for stage in (0, 1, 3)]
    found += [Case(stage, by_script=True, micro=2) for stage in (0, 2)]
    # ranks whose graphs differ send the same messages
    found += [Case(stage, reentrant=lambda rank: rank == 0) for stage in (0, 2)]
    found += [Case(3, unit_min_numel=1 << 20)]
    # the sums leave for the host, and late gradients come after them
    found += [Case(2, offload_optimizer=on_host)]
    found += [Case(0, offload_optimizer=on_host, reentrant=lambda rank: rank == 0)]
    return found


def called_twice() -> list[list[float]]:
    cases = [Case(3, stage3_max_reuse_distance=0), Case(3, overlap_comm=False)]
    return [ours(kind, case) for kind in (Beside, Stops) for case in cases]


def test_a_checkpoint_that_calls_a_unit_twice_keeps_it_for_both() -> None:
    want = [pytest.approx(plain(kind, 1), rel=1e-4) for kind in (Beside, Stops)]
    for norms in run_ranks(called_twice, 3):
        assert norms == [want[0], want[0], want[1], want[1]]


def train() -> list[list[float]]:
    return [ours(MODELS[number % 3], case) for number, case in enumerate(cases())]


def test_norms_are_those_of_plain_torch() -> None:
    wanted = {(kind, micro): plain(kind, micro) for kind in MODELS for micro in (1, 2)}
    for of_rank in run_ranks(train, 3):
        for number, (case, norms) in enumerate(zip(cases(), of_rank, strict=True)):
            kind = MODELS[number % 3]
            assert norms == pytest.approx(wanted[kind, case.micro], rel=1e-4), (kind, vars(case))


def test_a_second_gradient_of_one_slot_does_not_stand_for_another_slot() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    arrivals = Arrivals(params, [False, False], [False, False])
    arrivals.begin_backward()
    arrivals.open()
    added = [arrivals.add(position) for position in (0, 0, 1)]
    assert added == [Added.NOT_READY, Added.NOT_READY, Added.READY]
    arrivals.begin_backward()
    arrivals.open()  # two gradients of slot 0 are expected now
    added = [arrivals.add(position) for position in (0, 1, 0, 0)]
    assert added == [Added.NOT_READY, Added.NOT_READY, Added.READY, Added.NOT_READY]


class AtWait(Handle):
    """A slow network: the sum over replicas starts when somebody waits for it."""

    def __init__(self, start: Callable[[], Handle]) -> None:
        self._start: Callable[[], Handle] | None = start

    def wait(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            start().wait()


def train_replicas() -> list[list[float]]:
    cases = [Case(1, mics_shard_size=2), Case(3, mics_shard_size=2)]
    return [ours(Twice, case) for case in (*cases, Case(2, is_managed=False, mics_shard_size=2))]


def test_a_late_gradient_waits_for_the_sum_over_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    cross = ReplicatedReducer._cross
    slow = lambda self, sums: AtWait(lambda: cross(self, sums))  # noqa: E731
    monkeypatch.setattr(ReplicatedReducer, "_cross", slow)
    want = pytest.approx(plain(Twice, 1, 4), rel=1e-4)
    for norms in run_ranks(train_replicas, 4):
        assert norms == [want, want, want]


def leave_nothing() -> list[list[bool]]:
    """Which parameters have a gradient after a hook of the script has raised in a backward."""
    found = []
    for stage in (0, 2, 3):
        engine = start(build(), stage)
        raises = engine.module.blocks[0].weight.register_post_accumulate_grad_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine(samples(0, dist.get_rank()), False))
        raises.remove()
        found.append([param.grad is not None for param in engine.module.parameters()])
        engine.destroy()
    return found


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError


def test_a_hook_that_raises_leaves_no_gradient() -> None:
    for found in run_ranks(leave_nothing, 2):
        assert not any(any(of_stage) for of_stage in found)


def hooks_of_the_script() -> None:
    """They see every gradient, and what they write to it counts."""
    seen: list[bool] = []

    def halve(param: Tensor) -> None:
        seen.append(param.grad is not None and param.grad.shape == param.shape)
        param.grad.mul_(0.5)  # type: ignore[union-attr]

    for stage in (0, 1, 3):
        norms = []
        for halves in (False, True):
            engine = start(build(), stage)
            for param in engine.module.parameters() if halves else ():
                param.register_post_accumulate_grad_hook(halve)
            engine.backward(engine(samples(0, dist.get_rank()), False))
            engine.step()
            norms.append(engine.get_global_grad_norm())
            engine.destroy()
        assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-6)
    assert seen == [True] * 3 * len(list(build().parameters()))


def test_hooks_of_the_script_see_and_change_every_gradient() -> None:
    run_ranks(hooks_of_the_script, 2)
