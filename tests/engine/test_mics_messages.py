"""MiCS with messages in few bits: inside a shard group only, the same model on all replicas, errors kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import resume_each
from helpers import run_ranks
from mics_runs import config_of, same_bits, train_each

import xds

WEIGHTS, GRADS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.6, "reset_T": 7}}
HOSTS = (0, 0, 1, 1)


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


def test_a_resumed_run_keeps_the_errors_of_each_rank(tmp_path: Path) -> None:
    zero = config_of(2, 2, **GRADS, **LOCO)["zero_optimization"]
    more = {"zero_optimization": zero, "bf16": {"enabled": True}}
    run_ranks(resume_each, 4, str(tmp_path), [(2, more)])


def owed_in_all(folder: str, stage: int, size: int, does_save: bool) -> Any:
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
    for grads in engine._sharded.flat_grads:
        owed = grads.reducer.owed
        assert owed is not None
        for slot in grads.layout.slots:
            found[slot.name] = owed.error[slot.offset : slot.stop].double() * owed.unit
    engine.destroy()
    return found


@pytest.mark.parametrize(("old", "new"), [((4, 2), (2, 0)), ((2, 0), (4, 2))])
def test_what_is_owed_in_all_is_kept_in_other_groups(
    tmp_path: Path, old: tuple[int, int], new: tuple[int, int]
) -> None:
    """Each is the number of ranks and the size. Means over the ranks: their number is in the unit."""
    sums = []
    for (world_size, size), does_save in ((old, True), (new, False)):
        ranks = run_ranks(owed_in_all, world_size, str(tmp_path), 2, size, does_save)
        sums.append({name: sum(found[name] for found in ranks) for name in ranks[0]})
    for name, value in sums[0].items():
        assert value.norm() > 0
        assert (value - sums[1][name]).norm() <= 1e-5 * value.norm(), name
