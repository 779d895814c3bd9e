"""MiCS: numbers of plain PyTorch, bytes and states of the formulas; scripts, offload, overflows on replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from mics_runs import (
    RANKS,
    SAMPLES,
    STEPS,
    a_step,
    check_near,
    config_of,
    plain,
    same_bits,
    train_each,
)
from models import build, micro_batch
from runs import differing
from torch import Tensor, nn

import xds
from xds.zero import (
    GatheredParameters,
    get_full_grad,
    get_full_param,
    set_full_grad,
    set_full_param,
)

R, S = 2, 2  # replicas, ranks of a shard group
CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "feature"),
    [
        (1, "fp32", 2, "frozen"),
        (3, "fp32", 3, "mixed_shapes"),
        (2, "fp16", 1, "tied"),
    ],
)
def test_steps_are_those_of_plain_pytorch(
    stage: int, precision: str, accumulation: int, feature: str
) -> None:
    config = config_of(stage, S, precision, accumulation)
    ranks = [found[0] for found in run_ranks(train_each, 4, (config, feature, STEPS))]
    for found in ranks:
        same_bits(found, ranks[0])
    wanted = plain(feature, accumulation, STEPS)
    if precision == "fp32":
        return check_near(ranks[0], wanted, 1e-5)
    for one, two in zip(ranks[0]["losses"], wanted["losses"], strict=True):
        assert abs(one - two) <= 0.02 * two


def test_groups_of_all_ranks_or_of_one_are_zero_and_stage_0() -> None:
    stage = 3
    cases = [config_of(stage, 4, "bf16", 2), config_of(stage, 0, "bf16", 2)]
    cases += [config_of(stage, 1, "bf16", 2), config_of(0, 0, "bf16", 2)]
    for all_ranks, zero, one_rank, stage_0 in run_ranks(train_each, 4, *cases):
        same_bits(all_ranks, zero)
        same_bits(one_rank, stage_0)
        assert all_ranks["sent"] == zero["sent"] and one_rank["sent"] == stage_0["sent"]
        assert all_ranks["held"] == zero["held"] and one_rank["held"] == stage_0["held"]


def test_bytes_and_states_are_those_of_the_formulas() -> None:
    """Gathers stay inside; only sums cross, once in a step, whatever the number of micro-batches."""
    precision, count, size = "bf16", 3, 2
    cases = [(config_of(stage, S, precision, count), "plain", 3, (0, 0, 1, 1)) for stage in (1, 3)]
    for results in run_ranks(train_each, 4, *cases):
        for stage, found in zip((1, 3), results, strict=True):
            numel = sum(whole for whole, _ in found["sizes"])
            shard = sum(part for _, part in found["sizes"])
            assert shard * S == numel
            inside = shard * (S - 1)
            sent = found["sent"]
            assert sent["reduce_scatter"] == inside * size * (1 if stage == 1 else count)
            assert sent["all_reduce"] == 2 * (R - 1) * shard * 4 // R
            if stage < 3:
                assert sent["all_gather"] == inside * size
            crossing = {kind for kind, bytes_ in found["across"].items() if bytes_}
            assert crossing <= {"all_reduce", "control", "access"}
            held = found["held"]
            assert held["param"] == (shard if stage == 3 else numel) * size
            assert held["master"] == (shard * 2 if precision == "bf16" else 0)
            constant = held["optimizer"] - 2 * 4 * shard
            assert 0 <= constant <= 64 * len(found["sizes"])


def all_values(engine: Any) -> dict[str, Tensor]:
    """What this rank's replica has, gathered inside of it."""
    return engine.full_state_dict(rank0_only=False, full_precision=True)


def check_same(ranks: list[dict[str, Tensor]]) -> None:
    for found in ranks:
        assert not differing(found, ranks[0])


# -- one model on all replicas --------------------------------------------------------------------------


def differently_built(stage: int, how: str) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    config, given = config_of(stage, 2, "bf16"), {}
    if how == "meta":
        with torch.device("meta"):
            model: Any = build("plain")
        torch.manual_seed(dist.get_rank())
    elif how == "init":
        with xds.zero.Init(config=config):
            model = nn.Sequential(nn.Linear(9, 30), nn.LayerNorm(30), nn.Linear(30, 5))
    else:
        model = nn.Sequential(nn.Linear(9, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))
        model[0].requires_grad_(False)
        model[1].running_mean.fill_(dist.get_rank())
    if how == "weights":
        values = {name: torch.full(p.shape, 3.0) for name, p in model.state_dict().items()}
        values["1.num_batches_tracked"] = torch.tensor(3)
        given["weights"] = values
    engine = xds.initialize(model, config, **given)
    found = all_values(engine)
    engine.destroy()
    return found


def build_in_every_way() -> list[dict[str, Tensor]]:
    ways = ((1, "built"), (3, "built"), (3, "init"), (3, "meta"), (2, "weights"))
    return [differently_built(*way) for way in ways]


def test_values_of_rank_0_win_on_all_replicas() -> None:
    ranks = run_processes(build_in_every_way, RANKS)
    for found in zip(*ranks, strict=True):
        check_same(list(found))
    assert all((value == 3).all() for value in ranks[3][-1].values())


# -- edits ----------------------------------------------------------------------------------------------


def edit(stage: int, precision: str) -> Any:
    engine = xds.initialize(build("mixed_shapes"), config_of(stage, 2, precision))
    rank, model = engine.global_rank, engine.module
    a_step(engine, 0)
    weight, bias, gain = model.head.weight, model.head.bias, model.gain
    with GatheredParameters([weight, bias], modifier_rank=3):
        if rank == 3:
            weight.data.fill_(0.5)
            bias.data[2] = 7.0
    set_full_param(gain, torch.tensor(2.0))
    before = all_values(engine)
    batch = micro_batch(1, 0, SAMPLES).chunk(RANKS)[rank]
    engine.backward(engine(batch, rank))
    grad = get_full_grad(bias)
    set_full_grad(weight, torch.zeros(weight.shape))
    zero = get_full_grad(weight)
    engine.step()
    after = all_values(engine)
    only_first = engine.full_state_dict(rank0_only=True)
    a_step(engine, 2)
    found = {"grad": grad, "zero": zero, "value": get_full_param(weight)}
    engine.destroy()
    return before, after, found, bool(only_first)


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp16"), (3, "bf16")])
def test_edits_reach_all_replicas(stage: int, precision: str) -> None:
    ranks = run_ranks(edit, RANKS, stage, precision)
    for number in range(3):
        check_same([found[number] for found in ranks])
    before = ranks[0][0]
    assert before["head.weight"].unique().tolist() == [0.5]
    assert before["head.bias"][2] == 7.0 and before["gain"] == 2.0
    assert ranks[0][2]["zero"].count_nonzero() == 0
    assert [found[3] for found in ranks] == [True, False, False, False]


def write_on_one_replica(stage: int) -> str:
    engine = xds.initialize(
        build("plain"), config_of(stage, 2, stage3_param_persistence_threshold=10**6)
    )
    a_step(engine, 0)
    with torch.no_grad():
        if engine.global_rank >= 2:
            engine.module.head.weight.add_(1.0)
    try:
        a_step(engine, 1)
    except xds.UsageError as error:
        return str(error)
    finally:
        dist.barrier()
        engine.destroy()
    return ""


def test_a_write_on_one_replica_only_is_refused_on_all_ranks() -> None:
    for text in run_ranks(write_on_one_replica, RANKS, 1):
        assert text.startswith("head.weight was written on some ranks only: rank 0 and rank 2 have")


# -- gradients between micro-batches, and late ones -----------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, uses_two: bool) -> Tensor:
        x = self.body(x).tanh()
        return (self.two if uses_two else self.one)(x).square().mean()


def late(stage: int, size: int) -> Any:
    """The script runs two backwards a step, and the second one brings gradients to what was sent."""
    torch.manual_seed(0)
    config = config_of(stage, size)
    engine = xds.initialize(TwoHeads(), config)
    norms = []
    for step in range(3):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        first = engine(x, engine.global_rank % 2 == 0)
        second = engine(x, engine.global_rank >= 2)
        first.backward(retain_graph=True)
        second.backward()
        engine.step()
        norms.append(engine.get_global_grad_norm())
    found = all_values(engine)
    engine.destroy()
    return norms, found


def test_several_backwards_of_a_step_count_once() -> None:
    stage = 3
    zero = run_ranks(late, RANKS, stage, 0)[0]
    ranks = run_ranks(late, RANKS, stage, 2)
    check_same([values for _, values in ranks])
    for norms, values in ranks:
        assert norms == ranks[0][0]
        for one, two in zip(norms, zero[0], strict=True):
            assert abs(one - two) <= 1e-6 * two
        for name, value in values.items():
            assert (value - zero[1][name]).norm() <= 1e-5 * value.norm(), name


# -- skipped steps, evaluation, offload -----------------------------------------------------------------


def overflow(stage: int) -> Any:
    """One rank of the second replica has an infinite gradient: all skip the step."""
    config = config_of(stage, 2, "fp16")
    engine = xds.initialize(build("plain"), config)
    applied = []
    for step in range(4):
        rank = engine.global_rank
        loss = engine(micro_batch(step, 0, SAMPLES).chunk(RANKS)[rank], rank)
        engine.backward(loss * (float("inf") if (step, rank) == (1, 3) else 1.0))
        engine.step()
        applied.append(engine.was_step_applied())
    engine.eval()
    with torch.no_grad():
        loss = engine(micro_batch(9, 0, 2), 0)
    with engine.uneven_forwards(), torch.no_grad():
        for step in range(rank):
            engine(micro_batch(step, 0, 2), 0)
    found = all_values(engine)
    result = applied, engine.loss_scale, float(loss), found
    engine.destroy()
    return result


def test_an_overflow_on_one_replica_skips_the_step_on_all() -> None:
    ranks = run_ranks(overflow, RANKS, 3)
    check_same([found[3] for found in ranks])
    for applied, scale, loss, _ in ranks:
        assert applied == [True, False, True, True]
        assert (scale, loss) == ranks[0][1:3]


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "offload"),
    [
        (2, "bf16", 1, {"offload_optimizer": {**CPU, "overlap_step": True}}),
        (3, "fp32", 2, {"offload_param": CPU, "offload_optimizer": CPU}),
    ],
)
@pytest.mark.quick("3-fp32-2-offload1")
def test_offload_is_the_same_model(
    stage: int, precision: str, accumulation: int, offload: dict[str, Any]
) -> None:
    """Bit for bit where each buffer is reduced once in a step; else sums cross before they leave, each time."""
    config = config_of(stage, 2, precision, accumulation)
    moved = config_of(stage, 2, precision, accumulation, **offload)
    ranks = run_ranks(train_each, RANKS, config, moved)
    for found, away in ranks:
        same_bits(away, ranks[0][1])
        if accumulation == 1 or stage == 1:
            same_bits(found, away)
        check_near(away, plain("plain", accumulation), 1e-5 if precision == "fp32" else 0.05)
