"""Tests of zero_optimization.shared_parameters: the bits of a copy in each rank, in one memory."""

from __future__ import annotations

import faulthandler
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import run_new_ranks, run_processes, run_ranks
from placed_ranks import placed
from torch import Tensor, nn

import xds
from xds.utils.errors import ConfigError, UsageError

NUM_STEPS = 4


class Net(nn.Module):
    """Blocks, a tied weight, a parameter of one element, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        logits = self.head(self.frozen(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


def config_of(
    stage: int, precision: str = "fp32", *, shares: bool = True, **more: Any
) -> dict[str, Any]:
    zero = {"shared_parameters": shares, **more.pop("zero", {})}
    params = more.pop("params", {"weight_decay": 0.1})
    return runs.config(stage, precision, samples=3, params=params, zero=zero, **more)


def start(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return xds.initialize(Net(), config)


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Any, first: int, num_steps: int = NUM_STEPS) -> list[float]:
    rank = dist.get_rank()
    steps = range(first, first + num_steps)
    return [one.loss for one in runs.train(engine, steps, lambda *at: ids_of(sum(at), rank))]


def values_of(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def place_of(param: Tensor) -> tuple[int, str]:
    """The file that holds a parameter, and the rights to its memory."""
    at = param.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode = line.split()[:5]
        low, high = (int(text, 16) for text in addresses.split("-"))
        if low <= at < high:
            return int(inode), rights
    raise AssertionError("no such memory")


def results(config: dict[str, Any], folder: str) -> tuple[list[float], list[Tensor], Any, Any]:
    """Training with every access that a script has."""
    rank = dist.get_rank()
    engine = start(config)
    net = engine.module
    losses = train(engine, 0)
    frozen_bytes = sum(param.nbytes for param in net.frozen.parameters())  # not shared
    plan = engine.memory_plan()["param"] - frozen_bytes
    with xds.zero.GatheredParameters(net.blocks[1].parameters(), modifier_rank=1):
        if rank == 1:
            nn.init.constant_(net.blocks[1].weight, 0.01)
            net.blocks[1].bias.data.add_(0.5)
    losses += train(engine, 10, 1)
    xds.zero.set_full_param(net.head.weight, xds.zero.get_full_param(net.head.weight) * 0.9)
    if rank == 0:  # alone, while the other one goes on to its step
        with torch.no_grad():
            losses += [float(net(ids_of(at, 7))) for at in range(5)]
    losses += train(engine, 20, 1)
    engine.save_checkpoint(folder, tag="one")
    kept = engine.full_state_dict()
    losses += train(engine, 30, 1)
    engine.load_checkpoint(folder, tag="one")
    losses += train(engine, 40, 1)
    if kept is not None or dist.get_world_size() == 1:
        kept = {name: value.clone() for name, value in (kept or {}).items()}
    everyone = [kept]
    dist.broadcast_object_list(everyone, 0)
    engine.load_state_dict(everyone[0])
    losses += train(engine, 50, 1)
    values, place = values_of(net), place_of(net.embed.weight)
    engine.destroy()
    with torch.no_grad():
        net.embed.weight.mul_(0.5)  # the script's own again
    values.append(net.embed.weight.detach().clone())
    return losses, values, place, plan


CASES = [
    (2, 1, "fp32", {"clip": 0.1, "zero": {"overlap_comm": False}}),
    (4, 2, "bf16", {"accumulation": 2, "zero": {"mics_shard_size": 2}}),
]


@pytest.mark.parametrize(("size", "stage", "precision", "more"), CASES)
@pytest.mark.quick("2-1-fp32-more0")
def test_training_and_every_access_have_the_bits_of_a_copy_in_each_rank(
    tmp_path: Path, size: int, stage: int, precision: str, more: dict[str, Any]
) -> None:
    own, shared = (
        run_processes(
            results, size, config_of(stage, precision, shares=on, **more), str(tmp_path / str(on))
        )
        for on in (False, True)
    )
    for one, other in zip(own, shared, strict=True):
        assert one[0] == other[0]
        assert all(a.equal(b) for a, b in zip(one[1], other[1], strict=True))
    group = more.get("zero", {}).get("mics_shard_size", size)
    assert all(place[1] == "r--s" for _, _, place, _ in shared)
    assert len({place[0] for _, _, place, _ in shared}) == size // group
    assert shared[0][3] < own[0][3] * (1 / group + 0.05)  # of padding


def on_machines(layout: str, config: dict[str, Any]) -> tuple[list[float], list[Tensor], int, Any]:
    with placed(layout):
        engine = start(config)
    losses = train(engine, 0)
    sent = engine.bytes_sent()["all_gather"]
    net = engine.module
    xds.zero.set_full_param(net.embed.weight, torch.linspace(-1, 1, 960).view(40, 24))
    losses.append(float(net(ids_of(1, 0))))
    with xds.zero.GatheredParameters(net.blocks[1].weight, modifier_rank=1):
        nn.init.eye_(net.blocks[1].weight)
    losses.append(float(net(ids_of(2, 0))))
    engine.load_state_dict({name: value * 0.5 for name, value in engine.state_dict().items()})
    losses += [float(net(ids_of(3, 0))), *train(engine, 9, 1)]
    return losses, values_of(engine.module), sent, place_of(engine.module.embed.weight)


def test_each_machine_has_one_copy() -> None:
    layout = "abab"
    size = len(layout)
    own = run_processes(on_machines, size, layout, config_of(1, "bf16", shares=False))
    shared = run_processes(on_machines, size, layout, config_of(1, "bf16"))
    for one, other in zip(own, shared, strict=True):
        assert one[0] == other[0]
        assert all(a.equal(b) for a, b in zip(one[1], other[1], strict=True))
        # a shard goes to the other machine once, and not to the ranks of its own
        assert other[2] * (size - 1) <= one[2] * 1.05
    assert len({place[0] for *_, place in shared}) == 2


class Odd(nn.Module):
    """Strided, 0-dim and empty parameters, fp64, channels-last, and a weight of `rows` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(7, 32).t() * 0.1)
        self.every_second = nn.Parameter((torch.randn(5, 32) * 0.1)[::2])
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.wide = nn.Parameter(torch.randn(32).double())
        self.large = nn.Linear(32, rows)
        self.image = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.turned @ self.turned.t() * self.scalar + self.every_second.sum(0)
        x = torch.tanh(x + (x.double() * self.wide).float())
        return self.large(x).pow(2).mean() + self.image(x.view(-1, 1, 4, 8)).pow(2).mean()


def odd_samples(step: int, rank: int) -> Tensor:
    return torch.randn(3, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def train_odd(rows: int, stage: int, folder: str, first: int, num_steps: int) -> list[Tensor]:
    """From the checkpoint, unless `first` is 0, which saves one."""
    torch.manual_seed(0)
    settings = config_of(stage, optimizer="SGD", params={"lr": 0.1})
    engine = xds.initialize(Odd(rows), settings)
    if first:
        engine.load_checkpoint(folder, tag="one")
    for step in range(first, first + num_steps):
        engine.backward(engine(odd_samples(step, dist.get_rank())))
        engine.step()
    if not first:
        engine.save_checkpoint(folder, tag="one")
    return values_of(engine.module)


def test_odd_tensors_and_another_number_of_ranks_are_as_in_plain_pytorch(tmp_path: Path) -> None:
    rows = 512  # SMALL_NUMEL = 16 Ki elements
    torch.manual_seed(0)
    plain = Odd(rows)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for first, size, stage in ((0, 3, 2), (3, 2, 1)):
        for step in range(first, first + 3):
            optimizer.zero_grad()
            losses = [plain(odd_samples(step, rank)) for rank in range(size)]
            torch.stack(losses).mean().backward()
            optimizer.step()
        args = (rows, stage, str(tmp_path), first, 3)
        for values in run_processes(train_odd, size, *args, small_numel=None):
            for one, other in zip(values, plain.parameters(), strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)


# -- what a script may not do ---------------------------------------------------------------------------------


def refusals() -> None:
    def is_refused(text: str, do: Any) -> None:
        with pytest.raises(UsageError, match=text):
            do()

    engine = start(config_of(1, "bf16"))
    net = engine.module
    is_refused("engine.load_state_dict", lambda: net.load_state_dict(Net().state_dict()))
    before = values_of(net)
    net.blocks[0].weight.data = net.blocks[0].weight.data * 2
    is_refused("blocks.0.weight.data was assigned", lambda: train(engine, 0, 1))
    net.float()
    is_refused("changed their dtype", lambda: train(engine, 0, 1))
    assert values_of(net)[0].dtype == torch.bfloat16
    assert all(a.equal(b) for a, b in zip(before, values_of(net), strict=True))
    weight = net.blocks[1].weight
    with xds.zero.GatheredParameters(weight, modifier_rank=0):  # it ends before a step
        weight.data.fill_(0.25)
        xds.zero.set_full_param(weight, torch.full((24, 24), 0.5))
        is_refused(r"engine.step\(\).*blocks.1.weight", lambda: train(engine, 0, 1))
    assert (weight == 0.5).all()
    engine.zero_grad()
    train(engine, 0, 1)
    if dist.get_rank() == 0:
        net.blocks[2].share_memory()
    is_refused(r"failed on rank 0(.|\n)*share_memory\(\)", lambda: train(engine, 0, 1))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 8, max_norm=0.1), nn.Linear(8, 8))
    is_refused("max_norm of 0", lambda: xds.initialize(net, config_of(1)))


def test_what_would_write_on_one_rank_is_refused_on_all() -> None:
    run_new_ranks(refusals, 2)


def write_in_place(folder: str) -> None:
    rank = dist.get_rank()
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    engine = start(config_of(1))
    train(engine, 0, 1)
    faulthandler.disable()
    second = start(config_of(1))  # which explains the faults of both, again
    faulthandler.enable(2)
    second.destroy()
    if rank == 1:
        engine.module.blocks[0].weight.data.mul_(2)
    train(engine, 1, 1)


def test_a_write_in_place_ends_the_process_and_says_what_it_was(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_new_ranks(write_in_place, 2, str(tmp_path))
    text = (tmp_path / "1").read_text()
    assert "this rank wrote to a parameter of unit 'blocks.0'" in text
    assert "GatheredParameters" in text
    assert "write_in_place" in text  # the line of the script


def without_memory() -> tuple[list[float], int, list[str]]:
    texts: list[str] = []
    log = logging.getLogger("xds")
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    engine = start(config_of(2))  # threads share no memory in the sense of processes
    log.removeHandler(handler)
    return train(engine, 0), engine.memory_plan()["param"], texts


def test_ranks_without_common_memory_keep_their_own_copies() -> None:
    found = run_ranks(without_memory, 2)
    assert sum("shared_parameters: ranks share no memory here" in t for t in found[0][2]) >= 1
    assert found[0][1] == pytest.approx(run_ranks(without_memory, 1)[0][1], rel=0.01)


NEEDS: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 0}}, "set stage to 1 or 2"),
    ({"zero_optimization": {"stage": 1, "mics_shard_size": 1}}, "set mics_shard_size to 2"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        'offload_optimizer.device to "none"',
    ),
    ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 1}}}, "choose AdamW"),
    ({"communication": {"shared_memory": False}}, "set it to true"),
]


def test_what_it_needs_is_said_before_work_starts() -> None:
    for changes, text in NEEDS:
        given = config_of(1)
        for key, value in changes.items():
            given[key] = {**given[key], **value} if key == "zero_optimization" else value
        with pytest.raises(ConfigError, match="zero_optimization.shared_parameters") as caught:
            xds.initialize(Net(), given)
        assert text in str(caught.value)
