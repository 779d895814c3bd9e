"""Tests: masters and optimizer states in a file give the bits of a run without offload."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import offload_runs
import pytest
import torch
import torch.distributed as dist
from broken_disk import READ_CALLS, BrokenDisk
from helpers import run_ranks
from models import build, micro_batch
from offload_runs import CPU, PARAMS, check_equal
from test_auto_ratio import EVERYTHING, with_memory
from thinned import few_of

import xds
from xds.engine.optim.state_count import count_states

STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
SLOW = pytest.mark.slow


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder), **more}}


def check(
    world_size: int, case: tuple[Any, ...], offloads: list[dict[str, Any]], seed: int | None = None
) -> None:
    """case: stage, precision, accumulation, optimizer, model."""
    stage, precision, accumulation, *rest = case
    ranks = warm(world_size)
    plain = ranks.run(offload_runs.train, stage, precision, accumulation, None, *rest)
    for offload in offloads:
        run = (offload_runs.train,) if seed is None else (offload_runs.train_late, seed)
        found = ranks.run(*run, stage, precision, accumulation, offload, *rest)
        for one, other in zip(plain, found, strict=True):
            check_equal(one, other)


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "accumulation"),
    [(1, 0, "fp32", 1), (2, 0, "bf16", 2), (2, 1, "fp16", 1), (2, 2, "bf16", 1), (2, 3, "fp32", 2)],
)
def test_the_same_bits(
    tmp_path: Path, world_size: int, stage: int, precision: str, accumulation: int
) -> None:
    check(world_size, (stage, precision, accumulation), [nvme(tmp_path)])
    assert not list(tmp_path.iterdir())


def params_on(folder: Path, keep: int = 0) -> dict[str, Any]:
    section = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": keep}
    return {"offload_param": section}


@pytest.mark.parametrize(
    ("world_size", "precision"),
    [
        (2, "bf16"),
        pytest.param(1, "fp16", marks=SLOW),
        *(pytest.param(*case, marks=SLOW) for case in ((1, "fp32"), (1, "bf16"), (2, "fp32"))),
        pytest.param(2, "fp16", marks=SLOW),
    ],
)
def test_parameters_on_a_disk(tmp_path: Path, world_size: int, precision: str) -> None:
    accumulation = 2 if precision == "bf16" else 1
    params = params_on(tmp_path)
    offloads = [params | nvme(tmp_path), params_on(tmp_path, keep=500) | CPU]
    if precision == "bf16":
        offloads += [params, params | nvme(tmp_path, ratio=0.5)]
    check(world_size, (3, precision, accumulation), offloads)


@pytest.mark.parametrize(
    "optimizer",
    [
        *("Lion", "Lamb", "SGD"),
        *(pytest.param(name, marks=SLOW) for name in ("Muon", "Adagrad", "RMSprop")),
    ],
)
def test_other_optimizers(tmp_path: Path, optimizer: str) -> None:
    precision = "fp32" if optimizer in ("SGD", "RMSprop") else "bf16"
    check(2, (1, precision, 1, optimizer), [nvme(tmp_path)])


@pytest.mark.parametrize("stage", [pytest.param(2, marks=SLOW), 3])
def test_late_reads_and_updates(tmp_path: Path, stage: int) -> None:
    more = PARAMS if stage == 3 else {}
    overlap = nvme(tmp_path, overlap_step=True)
    check(2, (stage, "bf16", 2), [nvme(tmp_path) | more, overlap], seed=0)
    if stage == 3:
        check(2, (stage, "bf16", 2), [nvme(tmp_path) | params_on(tmp_path)], seed=1)
    check(1, (stage, "bf16", 1), [nvme(tmp_path, ratio=0.5)], seed=3)


def test_masters_that_fit_the_device_leave_the_disk(tmp_path: Path) -> None:
    (plain,) = run_ranks(offload_runs.train, 1, 2, "bf16", 1, None)
    for spare in (100_000, EVERYTHING):
        case = (2, "bf16", 1, nvme(tmp_path, ratio="auto"))
        (found,) = run_ranks(with_memory, 1, spare, offload_runs.train, *case)
        check_equal(plain, found)


def test_guesses_leave_masters_on_a_disk_alone(tmp_path: Path) -> None:
    guess = nvme(tmp_path, super_offload=True)
    check(2, (2, "bf16", 1), [guess])
    on_host = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    check(2, (3, "bf16", 1), [guess | params_on(tmp_path), on_host | params_on(tmp_path)])


# -- checkpoints --------------------------------------------------------------------------------------------


def save_and_load(
    offload: dict[str, Any] | None, folder: str, source: str, optimizer: str = "AdamW", **more: Any
) -> dict[str, Any]:
    """Load `source` if there is one, take a step, save to `folder`; what a second engine finds there."""
    config = offload_runs.config_of(1, "bf16", 1, offload, optimizer) | more
    engine = xds.initialize(build("plain"), config)
    if source:
        engine.load_checkpoint(source)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        part = micro_batch(step, 0, offload_runs.SAMPLES).chunk(world_size)[rank]
        engine.backward(engine(part, rank))
        engine.step()
    engine.save_checkpoint(folder)
    param = next(p for p in engine.module.parameters() if p.numel() > 1)
    found = {
        "values": engine.full_state_dict(rank0_only=False, full_precision=True),
        "states": {"exp_avg": xds.zero.get_full_optimizer_state(param, "exp_avg")},
        "steps": engine.global_steps,
    }
    engine.destroy()
    return found


def test_checkpoints_go_from_any_place_to_any_place(tmp_path: Path) -> None:
    disk = nvme(tmp_path / "disk")
    places: dict[str, dict[str, Any] | None] = {"none": None, "cpu": CPU, "nvme": disk}
    for name, place in places.items():
        more = {"checkpoint": {"async_save": True}} if name == "nvme" else {}
        run_ranks(partial(save_and_load, **more), 2, place, str(tmp_path / name), "")
    expected = None
    for source in places:
        for world_size, place in ((1, disk), (2, CPU), (2, disk), (2, None)):
            if world_size == 1 and source != "nvme":
                continue
            found = run_ranks(
                save_and_load, world_size, place, str(tmp_path / "again"), str(tmp_path / source)
            )[0]
            if world_size == 2:
                expected = expected or found
                for kind in ("values", "states"):
                    for key, value in expected[kind].items():
                        assert torch.equal(value, found[kind][key]), (source, place, key)
            assert found["steps"] == 4


def resume(offload: dict[str, Any], folder: str, feature: str) -> dict[str, Any]:
    """Save, and load into a new engine with other values."""
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        engine = xds.initialize(
            build(feature), offload_runs.config_of(3, "bf16", 1, offload, "AdamW")
        )
        for step in range(2 + seed):
            rank, world_size = dist.get_rank(), dist.get_world_size()
            part = micro_batch(step, seed, offload_runs.SAMPLES).chunk(world_size)[rank]
            engine.backward(engine(part, rank))
            engine.step()
        engines.append(engine)
    saved, loaded = engines
    saved.save_checkpoint(folder)
    loaded.load_checkpoint(folder)
    values = [engine.full_state_dict(rank0_only=False, full_precision=True) for engine in engines]
    computed = [engine.full_state_dict(rank0_only=False) for engine in engines]
    for one, other in (values, computed):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
    for engine in engines:
        engine.destroy()
    return computed[0]


@pytest.mark.parametrize("feature", ["plain", "frozen"])
def test_a_checkpoint_of_parameters_on_a_disk(tmp_path: Path, feature: str) -> None:
    disk = nvme(tmp_path / "disk") | params_on(tmp_path / "disk")
    found = run_ranks(resume, 2, disk, str(tmp_path / "one"), feature)[0]
    plain = run_ranks(resume, 2, CPU | PARAMS, str(tmp_path / "two"), feature)[0]
    for name, value in plain.items():
        assert torch.equal(value, found[name]), name


# -- what a script sees -------------------------------------------------------------------------------------


def look(folder: str) -> dict[str, Any]:
    config = offload_runs.config_of(2, "bf16", 1, nvme(Path(folder)), "AdamW")
    engine = xds.initialize(build("plain"), config)

    def train() -> None:
        engine.backward(engine(micro_batch(0, 0, offload_runs.SAMPLES), 0))
        engine.step()

    train()
    assert not list(Path(folder).iterdir())  # a SIGKILL leaves nothing
    states = list(engine.optimizer.state.values())
    tensors = [value for state in states for value in state.values() if value.dim()]
    assert len(tensors) == 2 * len(states) and all(value.isnan().all() for value in tensors)
    plan = engine.memory_plan()
    sums = [master.grads.home.host_bytes for master in engine._parts.updater.masters]
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
    config = offload_runs.config_of(stage, "bf16", 1, places, "AdamW")
    engine = xds.initialize(build("plain"), config)
    said: list[str] = []

    def train() -> None:
        for step in range(3):
            part = micro_batch(step, 0, offload_runs.SAMPLES).chunk(world_size)[rank]
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


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_disk_that_fails_is_an_error_on_every_rank(
    tmp_path: Path, stage: int, fails_at: int
) -> None:
    for said in run_ranks(fail, 2, str(tmp_path), stage, fails_at, READ_CALLS):
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


def refused(offload: dict[str, Any], free_bytes: int) -> str:
    from xds.offload.disk import creation

    with mock.patch.object(creation, "_free_bytes", lambda fd: free_bytes):
        try:
            xds.initialize(build("plain"), offload_runs.config_of(1, "bf16", 1, offload, "AdamW"))
        except xds.UsageError as error:
            return str(error)
    return ""


def test_too_little_space_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(refused, 2, nvme(tmp_path), 8192):
        assert re.search(
            r"nvme_path = .*rank 0 needs .* \(\d+ bytes\) there, and .* \(8192 bytes\)", said
        )


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
    config = offload_runs.config_of(0, "bf16", 1, offload, "AdamW")
    del config["scheduler"]
    engine = xds.initialize(build("plain"), config, optimizer=ManyStates)
    for step in range(3):
        engine.backward(engine(micro_batch(step, 0, offload_runs.SAMPLES), 0))
        engine.step()
    values = list(engine.full_state_dict(full_precision=True).values())
    engine.destroy()
    return values


def test_more_states_than_space_stay_in_memory(tmp_path: Path) -> None:
    (plain,), (found,) = (run_ranks(train_many, 1, place) for place in (None, nvme(tmp_path)))
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


@pytest.mark.parametrize(
    ("given", "num_states"),
    [
        ("SGD", 1),
        ("Adagrad", 1),
        ("NAdam", 2),
        (torch.optim.SGD, 0),
        (torch.optim.AdamW, 2),
        (torch.optim.RMSprop, 1),
        (ManyStates, 2),
    ],
)
def test_states_are_counted_before_the_optimizer_is_built(given: Any, num_states: int) -> None:
    section = SimpleNamespace(type=given, params={"lr": 0.1}) if isinstance(given, str) else None
    assert count_states(section, None if section else given) == num_states


MODELS = [("plain", 1), ("tied", 2), ("lora", 2), ("plain", 4)]  # feature, world_size
PLACES = ("disk", "half", "overlap", "params on disk", "params on disk, states on cpu")
CHOSEN = few_of(
    [
        (model, stage, precision, place)
        for model, stage, precision, place in product(MODELS, STAGES, PRECISIONS, PLACES)
        if (place not in ("half", "overlap") if stage == 3 else "params" not in place)
    ],
    tuple,
)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "world_size"), MODELS)
def test_combinations(tmp_path: Path, feature: str, world_size: int) -> None:
    disk = nvme(tmp_path)
    offloads = [disk, nvme(tmp_path, ratio=0.5), nvme(tmp_path, overlap_step=True)]
    offloads += [disk | params_on(tmp_path), CPU | params_on(tmp_path, keep=500)]
    for model, stage, precision, place in CHOSEN:
        if model == (feature, world_size):
            case = (stage, precision, 2 if precision == "bf16" else 1, "AdamW", feature)
            check(world_size, case, [offloads[PLACES.index(place)]])


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_state_dicts_of_the_optimizer_alone_are_refused(tmp_path: Path, call: str) -> None:
    zero = {"stage": 2, **nvme(tmp_path)}
    section = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": section, "zero_optimization": zero}
    engine = xds.initialize(torch.nn.Linear(4, 4), config)
    engine.backward(engine(torch.ones(4, 4)).square().mean())
    engine.step()
    given = [{"state": {}, "param_groups": []}] if call == "load_state_dict" else []
    with pytest.raises(xds.UsageError, match=rf"optimizer\.{call}\(\) with .*nvme"):
        getattr(engine.optimizer, call)(*given)
    engine.destroy()
