"""States in a file: what a script sees of them, disks that fail, and optimizers with other states."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from broken_disk import READ_CALLS, BrokenDisk
from helpers import run_processes, run_ranks
from models import build, micro_batch
from offload_runs import SAMPLES, config_of, nvme, params_on
from runs import config
from torch import nn

import xds
from xds.engine.optim.optimizers import count_states
from xds.offload.disk import creation


def look(folder: str) -> dict[str, Any]:
    engine = xds.initialize(build("plain"), config_of(2, "bf16", 1, nvme(Path(folder)), "AdamW"))

    def train() -> None:
        engine.backward(engine(micro_batch(0, 0, SAMPLES), 0))
        engine.step()

    train()
    assert not list(Path(folder).iterdir())  # a SIGKILL leaves nothing
    states = list(engine.optimizer.state.values())
    tensors = [value for state in states for value in state.values() if value.dim()]
    assert len(tensors) == 2 * len(states) and all(value.isnan().all() for value in tensors)
    plan = engine.memory_plan()
    sums = [master.grads.total.store.host_bytes for master in engine._parts.updater.masters]
    numels = [master.raw.numel() for master in engine._parts.updater.masters]
    assert plan["disk"] == 12 * sum(numels)
    slots = 3 * 3 * (-(-4 * max(numels) // 4096) * 4096)
    assert plan["host"] == sum(sums) + slots + 4 * len(states) + 2 * 2 * max(numels)
    for param in engine.module.parameters():  # more than stay in memory
        value = xds.zero.get_full_optimizer_state(param, "exp_avg")
        assert value.isfinite().all()
        xds.zero.set_full_optimizer_state(param, value + 1, "exp_avg")
    for param in engine.module.parameters():
        assert xds.zero.get_full_optimizer_state(param, "exp_avg").mean() > 0.5
    train()
    for tensor in tensors:
        assert tensor.isnan().all()
    with pytest.raises(RuntimeError):
        tensors[0].add_(1)
    tensors[0].zero_()
    with pytest.raises(xds.UsageError, match="while it was on the disk: the value is lost"):
        train()
    engine.destroy()
    return {}


def test_states_on_a_disk_read_as_nan(tmp_path: Path) -> None:
    run_ranks(look, 1, str(tmp_path))


def kept(folder: str, max_in_cpu: int) -> tuple[int, list[int]]:
    """The bytes of parameters on the disk, and the elements of each unit's shard."""
    zero = params_on(Path(folder), keep=max_in_cpu)
    engine = xds.initialize(build("plain"), config(3, zero=zero))
    shards = [unit.params[0].layout.shard_numel for unit in engine._sharded.units]
    disk_bytes = engine.memory_plan()["disk"]
    engine.destroy()
    return disk_bytes, shards


def test_max_in_cpu_is_the_sum_of_what_stays_in_memory(tmp_path: Path) -> None:
    disk_bytes, shards = kept(str(tmp_path), 0)
    assert disk_bytes == 4 * sum(shards)
    limit, left, on_disk = 2 * max(shards), 2 * max(shards), 0
    for numel in shards:
        stays = numel <= left
        left -= numel if stays else 0
        on_disk += 0 if stays else numel
    assert 0 < on_disk < sum(shards)
    assert kept(str(tmp_path), limit)[0] == 4 * on_disk


# -- disks that fail ----------------------------------------------------------------------------------------


def fail(
    folder: str,
    stage: int,
    fails_at: int,
    calls: tuple[str, ...],
    offload: dict[str, Any] | None = None,
) -> list[str]:
    """Train while the disk of the last rank fails; the error of each of two steps on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = offload or nvme(Path(folder))
    engine = xds.initialize(build("plain"), config_of(stage, "bf16", 1, places, "AdamW"))
    said: list[str] = []

    def train() -> None:
        for step in range(3):
            part = micro_batch(step, 0, SAMPLES).chunk(world_size)[rank]
            engine.backward(engine(part, rank))
            engine.step()

    train()
    broken = BrokenDisk(Path(folder), fails_at, "eio", calls)
    with broken.in_place() if rank == world_size - 1 else nullcontext():
        for _ in range(2):
            try:
                train()
            except xds.XdsError as error:
                said.append(str(error))
    engine.destroy()
    return said


@pytest.mark.parametrize(("stage", "fails_at"), [(0, 3), (3, 0)])
def test_a_disk_that_fails_is_an_error_on_every_rank(
    tmp_path: Path, stage: int, fails_at: int
) -> None:
    for said in run_processes(fail, 2, str(tmp_path), stage, fails_at, READ_CALLS):
        assert len(said) == 2, said
        for text in said:
            assert re.search(
                r"failed on rank 1: cannot (read|write) \d+ bytes at byte \d+ of the file of rank 1 in "
                r".*: EIO, .*look at the kernel log.*start again from the last checkpoint",
                text,
            ), text


@pytest.mark.parametrize("calls", [READ_CALLS, ()])
def test_parameters_on_a_disk_that_fails(tmp_path: Path, calls: tuple[str, ...]) -> None:
    """One rank: reads fail in forward, writes are an error of a later step."""
    (said,) = run_ranks(fail, 1, str(tmp_path), 3, 0, calls, params_on(tmp_path))
    assert len(said) == 2 and all("EIO" in text for text in said), said


def refused(offload: dict[str, Any]) -> str:
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(build("plain"), config_of(1, "bf16", 1, offload, "AdamW"))
    return str(caught.value)


def test_too_little_space_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with mock.patch.object(creation, "_free_bytes", lambda fd: 8192):
        for said in run_ranks(refused, 2, nvme(tmp_path)):
            assert re.search(
                r"nvme_path = .*rank 0 needs .* \(\d+ bytes\) there, and .* \(8192 bytes\)", said
            )


def states_of_two_groups(offload: dict[str, Any], folder: str) -> list[torch.Tensor]:
    """Saved with `offload`, and loaded without: a buffer has the tensors of both groups."""
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    for zero in (offload, {}):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))  # more than stay in memory
        groups = [
            {
                "params": [param for param in model.parameters() if param.dim() == dim],
                "lr": dim / 100,
            }
            for dim in (1, 2)
        ]
        engine = xds.initialize(model, config(1, "bf16", zero=zero), model_parameters=groups)
        if zero is offload:
            for _ in range(2):
                engine.backward(engine(x).float().square().mean())
                engine.step()
            engine.save_checkpoint(folder)
            engine.destroy()
    engine.load_checkpoint(folder)
    found = [
        xds.zero.get_full_optimizer_state(param, key)
        for param in model.parameters()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    engine.destroy()
    return found


def test_states_of_several_groups_are_saved_from_their_place(tmp_path: Path) -> None:
    wanted = run_ranks(states_of_two_groups, 2, {}, str(tmp_path / "plain"))
    disk = nvme(tmp_path / "disk")
    found = run_ranks(states_of_two_groups, 2, disk, str(tmp_path / "saved"))
    for one, other in zip(wanted, found, strict=True):
        assert all(map(torch.equal, one, other))


class ManyStates(torch.optim.Optimizer):
    """Keeps three states, one more than there is space for."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                for number in range(3):
                    state.setdefault(f"sum{number}", torch.zeros_like(param)).add_(param.grad)
                param.sub_(state["sum2"], alpha=group["lr"])


def train_many(offload: dict[str, Any] | None) -> list[torch.Tensor]:
    settings = config(0, "bf16", zero=offload)
    engine = xds.initialize(build("plain"), settings, optimizer=ManyStates)
    for step in range(3):
        engine.backward(engine(micro_batch(step, 0, SAMPLES), 0))
        engine.step()
    values = list(engine.full_state_dict(full_precision=True).values())
    engine.destroy()
    return values


def test_more_states_than_space_stay_in_memory(tmp_path: Path) -> None:
    (plain,), (found,) = (run_ranks(train_many, 1, place) for place in (None, nvme(tmp_path)))
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


def test_states_are_counted_before_the_optimizer_is_built() -> None:
    for given, number in {"SGD": 1, "Adagrad": 1, "NAdam": 2}.items():
        section = SimpleNamespace(type=given, params={"lr": 0.1})
        assert count_states(section, None) == number, given
    for kind, number in {torch.optim.SGD: 0, torch.optim.AdamW: 2, ManyStates: 2}.items():
        assert count_states(None, kind) == number, kind


def test_state_dicts_of_the_optimizer_alone_are_refused(tmp_path: Path) -> None:
    engine = xds.initialize(nn.Linear(4, 4), config(2, samples=4, zero=nvme(tmp_path)))
    engine.backward(engine(torch.ones(4, 4)).square().mean())
    engine.step()
    with pytest.raises(xds.UsageError, match=r"optimizer\.state_dict\(\) with .*nvme"):
        engine.optimizer.state_dict()
    with pytest.raises(xds.UsageError, match=r"optimizer\.load_state_dict\(\) with .*nvme"):
        engine.optimizer.load_state_dict({"state": {}, "param_groups": []})
    engine.destroy()
