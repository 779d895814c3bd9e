"""A run that was saved and loaded goes on as if it had never stopped: numbers, random draws, data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks, run_ranks
from threaded_ranks import run_threads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import xds

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3}},
}
WIDTH, SAMPLES, MICRO_BATCH, ACCUMULATION, STEPS = 12, 53, 2, 2, 20


class Points(Dataset[Tensor]):
    """Sample i begins with i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat(
            [torch.tensor([float(index)]), torch.sin(torch.arange(WIDTH - 1.0) * index)]
        )


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (Points()[index] for index in range(SAMPLES))


class Net(nn.Module):
    """Dropout, a running mean; remembers the samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.dropout = 0.25
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [round(first) for first in x[:, 0].tolist()]
        x = (x / SAMPLES).to(self.norm.weight.dtype)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), self.dropout)
        if self.dropout:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.norm(x - self.mean).float().pow(4).mean()


def start(stage: int, precision: str, seed: int, data: Any, **config: Any) -> Any:
    torch.manual_seed(seed + dist.get_rank())
    random.seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": 60},
        },
        "zero_optimization": {"stage": stage, "unit_min_numel": 0},
        **PRECISIONS[precision],
        **config,
    }
    return xds.initialize(Net(), config, training_data=data)


def go_on(engine: Any, batches: Iterator[Any], micro_steps: int) -> list[Any]:
    """What each micro-step shows: loss, norm, rate, scale, samples, draws of every generator."""
    numpy = pytest.importorskip("numpy")
    log: list[Any] = []
    for _ in range(micro_steps):
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm() if engine.was_step_applied() else None
        scalars = [loss.item(), norm, engine.get_lr(), engine.loss_scale]
        draws = [random.random(), numpy.random.rand(), torch.rand(2).tolist()]
        log.append([*map(str, scalars), *draws, engine.module.seen[-MICRO_BATCH:]])
    return log


def forever(engine: Any) -> Iterator[Any]:
    while True:
        yield from engine.training_dataloader


def resume(folder: str, stage: int, precision: str, before: int) -> None:
    """`before` micro-steps, a save, 20 steps more; the same 20 steps by an engine that loads."""
    first = start(stage, precision, 0, Points())
    batches = forever(first)
    go_on(first, batches, before)
    first.save_checkpoint(folder)
    wanted = go_on(first, batches, STEPS * ACCUMULATION)
    second = start(stage, precision, 7, Points())
    second.load_checkpoint(folder)
    found = go_on(second, forever(second), STEPS * ACCUMULATION)
    for number, (one, two) in enumerate(zip(wanted, found, strict=True)):
        assert one == two, (stage, precision, before, number)
    if precision == "fp16":
        assert first.skipped_steps == second.skipped_steps > 0
    states = [
        engine.full_state_dict(rank0_only=False, full_precision=True) for engine in (first, second)
    ]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def resume_each(folder: str, stage: int) -> None:
    # 53 samples, 2 ranks: 27 items or 14 micro-batches an epoch
    for precision in PRECISIONS:
        for before in (5, 8, 14):  # within an accumulation; within an epoch; at its end
            resume(f"{folder}/{precision}-{before}", stage, precision, before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.slow
def test_twenty_steps_are_those_of_the_run_that_never_stopped(tmp_path: Path, stage: int) -> None:
    run_ranks(resume_each, 2, str(tmp_path), stage)


# -- another layout -----------------------------------------------------------------------------------------


def elsewhere(folder: str, stage: int, steps: tuple[int, int]) -> list[float]:
    """Losses and norms of four samples a step, at any number of ranks; without what is a rank's own."""
    world_size = dist.get_world_size()
    more = {"train_micro_batch_size_per_gpu": 4 // world_size, "gradient_accumulation_steps": 1}
    engine = start(stage, "fp32", 3, None, **more)
    engine.module.dropout = 0.0
    if steps[0]:
        engine.load_checkpoint(folder)
        assert engine.global_steps == steps[0]
    points = torch.stack([Points()[index] for index in range(SAMPLES)])
    log = []
    for step in range(*steps):
        at = torch.arange(4 * step, 4 * step + 4) % SAMPLES
        loss = engine(points[at].chunk(world_size)[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        losses = engine._parts.sharded.collectives.gather_small(loss.detach().double().view(1))
        log += [losses.mean().item(), engine.get_global_grad_norm()]
        if step == 9 and not steps[0]:
            engine.save_checkpoint(folder)
    return log


def elsewhere_each(folder: str, stages: tuple[int, ...]) -> list[list[float]]:
    return [elsewhere(folder, stage, (10, 10 + STEPS)) for stage in stages]


def test_at_another_layout_the_numbers_agree(tmp_path: Path) -> None:
    folder = str(tmp_path)
    wanted = run_threads(elsewhere, 4, folder, 2, (0, 10 + STEPS))[0][20:]
    found = [
        *run_threads(elsewhere_each, 1, folder, (0, 3))[0],
        *run_ranks(elsewhere_each, 2, folder, (0, 1, 3))[0],  # stages 0 and 1 sum in place
        *run_threads(elsewhere_each, 2, folder, (2, 3))[0],
        *run_threads(elsewhere_each, 4, folder, (3,))[0],
    ]
    for log in found:
        assert log == pytest.approx(wanted, rel=1e-5)


# -- data ---------------------------------------------------------------------------------------------------


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [round(first) for first in x[:, 0].tolist()]
        return self.weight * x.mean()


def data_engine(data: Any, num_workers: int) -> Any:
    from xds.engine.data.loaders import build_loader

    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    engine = xds.initialize(Numbered(), config, training_data=data)
    if num_workers:
        engine.training_dataloader = engine._parts.loader = build_loader(
            data,
            micro_batch_size=MICRO_BATCH,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            num_workers=num_workers,
        )
    return engine


def read(folder: str, kind: Any, num_workers: int, steps: int, loads: bool) -> list[int]:
    """Take `steps` micro-batches, after loading, and save. The samples of this rank."""
    engine = data_engine(kind(), num_workers)
    if loads:
        engine.load_checkpoint(folder)
    batches = forever(engine)
    for _ in range(steps):
        engine.backward(engine(next(batches)))
        engine.step()
    engine.save_checkpoint(folder)
    return list(engine.module.seen)


def read_both(folder: str, kind: Any, first: int, second: int) -> list[list[list[int]]]:
    """Without and with workers, in one piece and in two."""
    found = []
    for num_workers in (0, 2):
        here = f"{folder}/{num_workers}"
        whole = read(f"{here}-whole", kind, num_workers, first + second, False)
        before = read(here, kind, num_workers, first, False)
        after = read(here, kind, num_workers, second, True)
        found.append([whole, before + after])
    return found


def read_kinds(folder: str) -> list[list[list[list[int]]]]:
    return [read_both(f"{folder}/{kind.__name__}", kind, 5, 27) for kind in (Points, Stream)]


@pytest.mark.slow
def test_workers_that_read_ahead_do_not_move_the_position(tmp_path: Path) -> None:
    for kinds in run_new_ranks(read_kinds, 2, str(tmp_path)):  # which may start workers
        for without, with_workers in kinds:
            assert without[0] == without[1] == with_workers[0] == with_workers[1]


@pytest.mark.parametrize("kind", [Points, Stream])
def test_no_sample_is_seen_twice_or_left_out_at_another_number_of_ranks(
    tmp_path: Path, kind: Any
) -> None:
    folder = str(tmp_path)
    seen = run_threads(read, 2, folder, kind, 0, 4, False)  # 16 samples
    seen += run_threads(read, 3, folder, kind, 0, 3, True)  # 18
    seen += run_threads(read, 1, folder, kind, 0, 9, True)  # 18
    everything = Counter(sum(seen, []))
    assert sum(everything.values()) == 52 and max(everything.values()) == 1
    last = run_threads(read, 1, folder, kind, 0, 1, True)[0]
    assert set(last) == set(range(SAMPLES)) - set(everything)


class OwnLoader:
    """A loader of the user's, with torchdata's protocol: its position is this rank's alone."""

    def __init__(self) -> None:
        self.at = dist.get_rank() * 100

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.at += 1
            yield torch.full((1, WIDTH), float(self.at - 1))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["random"].tolist() == [state["at"]]
        self.at = state["at"]


def own_loader(folder: str, steps: int, loads: bool) -> list[int]:
    engine = data_engine(OwnLoader(), 0)
    if loads:
        engine.load_checkpoint(folder)
    for _ in range(steps):
        engine.train_batch()
    engine.save_checkpoint(folder)
    return list(engine.module.seen)


def test_a_loader_with_a_state_of_its_own_goes_on(tmp_path: Path) -> None:
    run_threads(own_loader, 2, str(tmp_path), 3, False)
    assert run_threads(own_loader, 2, str(tmp_path), 2, True) == [[3, 4], [103, 104]]
    assert run_threads(own_loader, 1, str(tmp_path), 2, True) == [[0, 1]]  # with a warning


def test_loading_holds_no_copy_of_what_is_alive(tmp_path: Path) -> None:
    status = Path("/proc/self/status")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of memory cannot be reset here")
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = xds.initialize(model, config)
    engine.backward(engine(torch.randn(4, 1024)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)  # 100 MiB

    def kib(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().split("\n") if name in line)

    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    engine.load_checkpoint(tmp_path)
    assert kib("VmHWM") - before < 64 * 1024
