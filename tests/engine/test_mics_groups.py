"""MiCS: gathers in two levels, several replicas, hosts that groups cut, messages in few bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from mics_runs import check_near, config_of, same_bits, train_each
from models import build
from placed_ranks import placed

import xds
from xds.engine.parallel.flat_groups import RankHost, ranks_of_host
from xds.ops.mesh import Mesh

TWO_LEVELS = {"mics_hierarchical_params_gather": True}


# -- gathers in two levels ------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (1, "bf16")])
@pytest.mark.quick("3-fp32")
def test_two_levels_send_one_lth_across_hosts_and_the_same_bits(stage: int, precision: str) -> None:
    places = (0, 0, 1, 1)
    pairwise = config_of(stage, 4, precision, 2)
    levels = config_of(stage, 4, precision, 2, **TWO_LEVELS)
    for config in (pairwise, levels):
        config["communication"] = {"hierarchical": False}
    cases = [(one, "plain", 3, places) for one in (pairwise, levels)]
    for one, two in run_ranks(train_each, 4, *cases):
        same_bits(one, two)
        assert two["sent"] == one["sent"]
        across = one["across"]["all_gather"]
        assert across > 0 and two["across"]["all_gather"] * 2 == across
        assert two["across"]["reduce_scatter"] == one["across"]["reduce_scatter"]


def three_replicas(stage: int) -> Any:
    """Ranks use different blocks, and every second step has two backward passes: gradients are late."""
    runs = []
    for size in (0, 2):
        config = config_of(stage, size, accumulation=2)
        engine = xds.initialize(build("divergent" if stage < 3 else "plain"), config)
        norms = []
        for step in range(3):
            for micro in range(2):
                seed = torch.Generator().manual_seed(100 * step + 10 * micro + engine.global_rank)
                tokens = torch.randint(0, 61, (2, 9), generator=seed)
                loss = engine(tokens, engine.global_rank)
                if step % 2 and micro:
                    engine.backward(loss * 0.5, retain_graph=True)
                    loss = loss * 0.5
                engine.backward(loss)
                engine.step()
            norms.append(engine.get_global_grad_norm())
        values = engine.full_state_dict(rank0_only=False, full_precision=True)
        sent = engine.bytes_sent()
        sizes = [flat.layout.shard_numel for flat in engine._sharded.reduction.order]
        engine.destroy()
        runs.append((norms, values, sent, sizes))
    return runs


@pytest.mark.slow
def test_three_replicas() -> None:
    ranks = run_ranks(three_replicas, 6, 2)
    for zero, mics in ranks:
        assert mics[0] == ranks[0][1][0]
        for one, two in zip(mics[0], zero[0], strict=True):
            assert abs(one - two) <= 1e-5 * two
        for name, value in mics[1].items():
            assert torch.equal(value, ranks[0][1][1][name]), name
            assert (value - zero[1][name]).norm() <= 1e-5 * value.norm() + 1e-6, name
        assert mics[2]["all_reduce"] >= 3 * sum(2 * 2 * numel * 4 // 3 for numel in mics[3])


def started(config: dict[str, Any], hosts: tuple[int, ...]) -> str:
    """The error of an engine."""
    text = ""
    with placed(hosts):
        try:
            xds.initialize(build("plain"), config).destroy()
        except xds.XdsError as error:
            text = str(error)
        dist.barrier()
    return text


@pytest.mark.parametrize(
    ("size", "hosts", "why"),
    [(2, (0, 0, 1, 1), "in one host"), (4, (0, 1, 2, 3), "with one rank on each host")],
)
def test_two_levels_without_effect_are_noted_once(
    size: int, hosts: tuple[int, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "xds"):
        assert run_ranks(started, 4, config_of(3, size, **TWO_LEVELS), hosts) == [""] * 4
    (line,) = [line for line in caplog.messages if "mics" in line]
    assert line.endswith(why) and "has no effect" in line


def test_hosts_that_a_group_cuts_unevenly_are_named_on_all_ranks() -> None:
    for text in run_ranks(started, 4, config_of(3, 4, **TWO_LEVELS), (0, 0, 0, 1)):
        assert "mics_hierarchical_params_gather = true" in text and "mics_shard_size = 4" in text
        assert "ranks 0, 1, 2 on host" in text and "and 3 on host" in text
        assert "; set mics_shard_size to" in text


def test_ranks_of_a_host_in_a_mesh() -> None:
    mesh = Mesh(pipe=2, data=4, tensor=2)
    hosts = [RankHost(rank // 8, "") for rank in range(16)]
    assert ranks_of_host(mesh, 4, hosts) == 4
    assert ranks_of_host(mesh, 4, [RankHost(rank // 4, "") for rank in range(16)]) == 2
    assert ranks_of_host(mesh, 4, [RankHost(rank // 2, "") for rank in range(16)]) == 1
    with pytest.raises(
        xds.UsageError, match=r"the group of rank 0 has ranks 0, 2, 4 on host a and 6 on host b"
    ):
        ranks_of_host(mesh, 4, [RankHost(rank // 6, "ab"[rank // 6 % 2]) for rank in range(16)])


@pytest.mark.slow
def test_another_optimizer_is_that_of_plain_zero() -> None:
    cases = []
    for size in (0, 2):
        config = config_of(3, size)
        config["optimizer"] = {"type": "Lamb", "params": {"lr": 1e-3}}
        cases.append(config)
    ranks = run_ranks(train_each, 4, *cases)
    for zero, mics in ranks:
        same_bits(mics, ranks[0][1])
        check_near(mics, zero, 1e-5)


WEIGHTS, GRADS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.6, "reset_T": 7}}
HOSTS = (0, 0, 1, 1)


@pytest.mark.slow
def test_few_bits_inside_a_shard_group() -> None:
    stage, precision, size, zero = 3, "bf16", 2, WEIGHTS | GRADS | LOCO
    exact = config_of(stage, size, precision, 2)
    few = config_of(stage, size, precision, 2, **zero)
    ranks = run_ranks(train_each, 4, *((one, "plain", 8, HOSTS) for one in (exact, few)))
    for wanted, found in ranks:
        same_bits(found, ranks[0][1])
        for one, two in zip(found["losses"], wanted["losses"], strict=True):
            assert abs(one - two) <= 0.02 * two
        assert found["sent"]["all_reduce"] == wanted["sent"]["all_reduce"]
        assert not found["across"].get("int4 gradients")


def errors_in_all(folder: str, stage: int, size: int, does_save: bool) -> Any:
    """The sum of errors over the ranks, per parameter that is named; and whether losses stay finite."""
    torch.manual_seed(0)
    config = config_of(stage, size, **GRADS, **LOCO)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 8))
    engine = xds.initialize(model, config)
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(engine.global_rank))
    if does_save:
        for _ in range(3):
            engine.backward(engine(x).square().mean())
            engine.step()
        engine.save_checkpoint(folder, "here")
    else:
        engine.load_checkpoint(folder, "here")
    found: dict[str, torch.Tensor] = {}
    for grads in engine._sharded.reduction.order:
        pending = grads.reducer.pending_error
        assert pending is not None
        for slot in grads.layout.slots:
            found[slot.name] = pending.error[slot.offset : slot.stop].double() * pending.unit
    engine.destroy()
    return found


@pytest.mark.parametrize(("old", "new"), [((4, 2), (2, 0)), ((2, 0), (4, 2))])
def test_what_is_errors_in_all_is_kept_in_other_groups(
    tmp_path: Path, old: tuple[int, int], new: tuple[int, int]
) -> None:
    """Each is the number of ranks and the size. Means over the ranks: their number is in the unit."""
    sums = []
    for (world_size, size), does_save in ((old, True), (new, False)):
        ranks = run_ranks(errors_in_all, world_size, str(tmp_path), 2, size, does_save)
        sums.append({name: sum(found[name] for found in ranks) for name in ranks[0]})
    for name, value in sums[0].items():
        assert value.norm() > 0
        assert (value - sums[1][name]).norm() <= 1e-5 * value.norm(), name
