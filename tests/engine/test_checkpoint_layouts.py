"""Checkpoints load at any layout, and say so where a model is another one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from threaded_ranks import run_threads
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.engine.checkpoint.format import HEAD, NO_SUM, dump, parse
from xds.zero.checkpoint.ranges import pieces
from xds.zero.checkpoint.snapshot import Snapshot

RANKS, STAGES = (1, 2, 3, 4, 8), (0, 1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
        **more,
    }
    return xds.initialize(model, config)


def train(engine: Any, numbers: range, width: int) -> None:
    for number in numbers:
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(number))
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(x.to(dtype)).float().square().mean())
        engine.step()


def held_by(engine: Any) -> Iterator[tuple[str, str, int, Tensor]]:
    """What this rank holds: a name, which of its tensors ("value", "state/..."), where it begins, the elements.

    Of what all elements of a range share, one element.
    """
    parts = engine._parts
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater, parts.optimizer)
    for block in (*snapshot.values, *snapshot.states):
        flat = block.tensor.detach().reshape(-1)
        for piece in pieces(snapshot.flats[block.flat], block.start, block.stop):
            here = flat[piece.target : piece.target + piece.stop - piece.start]
            yield piece.name, block.key, piece.start, here
    for one in snapshot.constants:
        for piece in pieces(snapshot.flats[one.flat], one.start, one.stop):
            yield piece.name, one.key, piece.start, torch.tensor([float(one.value)])


# -- every layout to every layout ---------------------------------------------------------------------------


class Mixed(nn.Module):
    """Odd shapes, a tied weight, frozen and scalar parameters, buffers that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 23)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(23, 31), nn.BatchNorm1d(31), nn.GELU(), nn.Linear(31, 23))
            for _ in range(2)
        )
        self.frozen = nn.Linear(23, 23).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(23, 37)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += len(tokens)
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * self.gain
        return F.cross_entropy(self.head(self.frozen(x)).float(), tokens.roll(1))


def mixed_engine(stage: int, precision: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Mixed()
    decayed = [param for param in model.parameters() if param.requires_grad and param.ndim > 1]
    others = [param for param in model.parameters() if param.requires_grad and param.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "unit_min_numel": 0},
        **PRECISIONS[precision],
    }
    return xds.initialize(model, config, model_parameters=groups)


Place = tuple[str, str]  # a name, and which of its tensors
Saved = dict[Place, Tensor]
Held = list[tuple[str, str, int, Tensor]]


def mixed_train(engine: Any, steps: int) -> None:
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        loss = engine(torch.randint(0, 37, (4,), generator=draw))
        engine.backward(loss)
        engine.step()


def tag_of(world_size: int, stage: int, precision: str) -> str:
    return f"{world_size}-{stage}-{precision}"


def write_mixed(folder: str, stage: int) -> dict[str, Held]:
    found = {}
    for precision in PRECISIONS:
        engine = mixed_engine(stage, precision, seed=0)
        mixed_train(engine, 2)
        tag = tag_of(dist.get_world_size(), stage, precision)
        engine.save_checkpoint(folder, tag)
        found[tag] = [
            (name, key, start, held.clone()) for name, key, start, held in held_by(engine)
        ]
    return found


def whole_by_rank(ranks: list[Held]) -> list[Saved]:
    """For each rank what a load at this number of ranks should give it: its own where it holds all of it."""
    parts: dict[Place, dict[int, Tensor]] = {}
    for held in ranks[::-1]:  # rank 0's buffers are everybody's
        for name, key, start, values in held:
            parts.setdefault((name, key), {})[start] = values
    everybody = {
        place: torch.cat([found[start] for start in sorted(found)])
        for place, found in parts.items()
    }
    return [
        everybody | {(n, k): v for n, k, _, v in held if v.shape == everybody[n, k].shape}
        for held in ranks
    ]


def read_mixed(
    folder: str, stage: int, saved: dict[str, list[Saved]]
) -> dict[tuple[str, str], int]:
    """Load checkpoints of every layout, one over the other, and compare all that this rank then holds.

    The precisions take turns: for a pair of layouts each one is loaded into another one.
    Returns the number of elements of optimizer states, by precision here and tag.
    """
    world_size = dist.get_world_size()
    found = {}
    for number, precision in enumerate(PRECISIONS):
        engine = mixed_engine(stage, precision, seed=9)
        for old_size in RANKS:
            for old_stage in STAGES:
                turn = number + old_size + old_stage + world_size + stage
                tag = tag_of(old_size, old_stage, tuple(PRECISIONS)[turn % len(PRECISIONS)])
                engine.load_checkpoint(folder, tag)
                assert (engine.global_steps, engine.global_samples) == (2, 8 * old_size)
                by_rank = saved[tag]
                mine = by_rank[dist.get_rank() if len(by_rank) == world_size else 0]
                found[precision, tag] = compare_held(engine, mine, f"{tag} to {world_size}-{stage}")
                compare_computed(engine, mine)
    return found


def compare_held(engine: Any, saved: Saved, case: str) -> int:
    """Masters and states bit for bit; what is not trained as it was, in the dtype it has here."""
    count = 0
    for name, key, start, values in held_by(engine):
        wanted = saved[name, key]
        if key == "state/step":
            wanted = wanted[:1]
        else:
            wanted = wanted[start : start + values.numel()]
            count += values.numel() if key != "value" else 0
        if (name, "state/step") in saved:
            assert values.dtype == wanted.dtype, (case, name, key)
        assert torch.equal(values, wanted.to(values.dtype)), (case, name, key)
    return count


def compare_computed(engine: Any, saved: Saved) -> None:
    for name, param in engine.module.named_parameters():
        if not engine._parts.sharded.policy.shards_params:
            wanted = saved[name, "value"].view(param.shape).to(param.dtype)
            assert torch.equal(param, wanted), name


def every_pair(folder: str) -> int:
    """Every pair of ranks, and of a stage with half of the stages (the other process has the rest). Counts."""
    folder, stages = f"{folder}/{dist.get_rank()}", STAGES[dist.get_rank() :: 2]
    saved = {}
    for world_size in RANKS:
        for stage in STAGES:
            results = run_threads(write_mixed, world_size, folder, stage)
            for tag in results[0]:
                saved[tag] = whole_by_rank([one[tag] for one in results])
    numel = sum(v.numel() for (_, k), v in saved["1-0-fp32"][0].items() if k[:10] == "state/exp_")
    loads = 0
    for world_size in RANKS:
        for stage in stages:
            results = run_threads(read_mixed, world_size, folder, stage, saved)
            for case in results[0]:
                copies = world_size if stage == 0 else 1
                assert sum(one[case] for one in results) == copies * numel, case
                loads += 1
    return loads


@pytest.mark.slow
def test_every_layout_loads_at_every_other(tmp_path: Path) -> None:
    loads = run_processes(every_pair, 2, str(tmp_path))
    assert sum(loads) == len(PRECISIONS) * len(RANKS) ** 2 * len(STAGES) ** 2


# -- what is read -------------------------------------------------------------------------------------------


class Reads:
    """What each thread reads of files: [start, stop) of each file."""

    def __init__(self) -> None:
        self.spans: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._preadv = os.preadv

    def __call__(self, fd: int, views: list[Any], at: int) -> int:
        count = self._preadv(fd, views, at)
        files = self.spans.setdefault(threading.get_ident(), {})
        files.setdefault(os.fstat(fd).st_ino, []).append((at, at + count))
        return count

    def take(self) -> tuple[int, int]:
        """Bytes that this thread has read, each counted once; and every time."""
        distinct = total = 0
        for spans in self.spans.pop(threading.get_ident(), {}).values():
            at = 0
            for start, stop in sorted(spans):
                total += stop - start
                distinct += max(stop - max(start, at), 0)
                at = max(at, stop)
        return distinct, total


def deep(seed: int, stage: int, precision: str) -> Any:
    """6.3 MB of fp32 parameters in four units; 19 MB of states."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(256, 768), nn.GELU(), nn.Linear(768, 256)) for _ in range(4)]
    return engine_of(nn.Sequential(*blocks), stage, **PRECISIONS[precision])


def write_deep(folder: str, stage: int, precision: str) -> None:
    engine = deep(0, stage, precision)
    train(engine, range(1), 256)
    engine.save_checkpoint(folder, tag_of(dist.get_world_size(), stage, precision))


def read_deep(
    folder: str, stage: int, tags: list[str], reads: Reads
) -> list[tuple[str, float, float]]:
    """Bytes read over bytes held, for each tag: counted once, and in all."""
    found = []
    for tag in tags:
        engine = deep(1, stage, tag.split("-")[2])
        dist.barrier()
        reads.take()
        engine.load_checkpoint(folder, tag)
        distinct, total = reads.take()
        held = [(key, values) for _, key, _, values in held_by(engine) if key != "state/step"]
        held_bytes = sum(values.numel() * values.element_size() for _, values in held)
        alive_bytes = sum(v.numel() * v.element_size() for key, v in held if key == "value")
        found.append((tag, distinct / held_bytes, (total - alive_bytes) / held_bytes))
    return found


@pytest.mark.slow
def test_a_rank_reads_its_share_and_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reads = str(tmp_path), Reads()
    monkeypatch.setattr(os, "preadv", reads)
    tags = []
    for world_size, stage, precision in (
        (1, 0, "fp32"),
        (2, 3, "bf16"),
        (3, 2, "fp32"),
        (8, 3, "fp32"),
    ):
        run_threads(write_deep, world_size, folder, stage, precision)
        tags.append(tag_of(world_size, stage, precision))
    worst = {}
    for world_size in (1, 3, 8):
        for stage in (0, 2, 3):
            for found in run_threads(read_deep, world_size, folder, stage, tags, reads):
                for tag, distinct, total in found:
                    case = (tag, world_size, stage)
                    worst[case] = max(worst.get(case, (0.0, 0.0)), (distinct, total))
    assert max(distinct for distinct, _ in worst.values()) <= 1.1
    # what was alive before is read once to be checked and once to be filled
    assert max(total for _, total in worst.values()) <= 1.1


# -- frozen parameters --------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen matrix and a small trained one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.adapter = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def leave_out(folder: str, stages: tuple[int, int]) -> None:
    first = engine_of(Adapted(0), stages[0])
    train(first, range(2), 64)
    first.save_checkpoint(folder, "all")
    first.save_checkpoint(folder, "few", exclude_frozen_parameters=True)
    sizes = [
        sum(path.stat().st_size for path in (Path(folder) / tag).glob("rank_*"))
        for tag in ("all", "few")
    ]
    assert sizes[0] - sizes[1] > 4 * (64 * 64 + 64) * 0.9
    second = engine_of(Adapted(1), stages[1])
    own = second.full_state_dict(rank0_only=False)
    second.load_checkpoint(folder)
    saved, found = (one.full_state_dict(rank0_only=False) for one in (first, second))
    for name, value in found.items():
        assert torch.equal(value, (own if "base" in name else saved)[name]), name
    adapter_only = nn.ModuleDict({"adapter": nn.Linear(64, 64, bias=False)})
    with pytest.raises(xds.UsageError, match="the model does not have base.bias, base.weight"):
        engine_of(adapter_only, stages[1]).load_checkpoint(folder)


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_processes(leave_out, 2, str(tmp_path), (3, 1))
    leave_out(str(tmp_path / "alone"), (0, 2))


def test_a_manifest_that_lacks_elements_is_refused(tmp_path: Path) -> None:
    engine = engine_of(Adapted(0), 0)
    engine.save_checkpoint(tmp_path)
    path = tmp_path / "global_step0" / "manifest.json"
    raw = json.loads(path.read_bytes())
    cut = raw["files"][0]["ranges"][0]
    cut["stop"] -= 64
    raw["totals"]["value"] -= 64
    fresh = f'{HEAD}{NO_SUM}", {json.dumps({k: v for k, v in raw.items() if k != "sha256"})[1:]}'
    path.write_bytes(fresh.replace(NO_SUM, sha256(fresh.encode()).hexdigest(), 1).encode())
    assert dump(parse(path.read_bytes(), "it"))
    with pytest.raises(xds.UsageError, match=r"contradicts itself: elements of .* in no file"):
        engine.load_checkpoint(tmp_path)


# -- another model ------------------------------------------------------------------------------------------


class Varied(nn.Module):
    """Two layers, one of them tied to a third or not; a buffer of some dtype."""

    def __init__(self, tied: bool = True, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 40), nn.Linear(40, 40)
        self.between = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        if tied:
            self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3) if buffer is None else buffer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.between:
            x = layer(x)
        return self.last(x) * self.scale.sum().to(x.dtype)


def states(engine: Any) -> Saved:
    parts = {(n, k, s): v.clone() for n, k, s, v in held_by(engine)}
    places = {place[:2] for place in parts}
    return {
        (name, key): torch.cat([parts[p] for p in sorted(parts) if p[:2] == (name, key)])
        for name, key in places
    }


@pytest.mark.contract
@pytest.mark.parametrize(
    "section",
    [
        {"units": ["Linear"], "unit_min_numel": 0},
        {"unit_min_numel": 10**9},
        {"stage3_param_persistence_threshold": 10**9},
    ],
)
def test_units_of_another_size_load(tmp_path: Path, section: dict[str, Any]) -> None:
    first = engine_of(Varied(), 3)
    train(first, range(2), 40)
    first.save_checkpoint(tmp_path)
    second = engine_of(Varied(), 3, zero_optimization={"stage": 3, **section})
    second.load_checkpoint(tmp_path)
    wanted, found = states(first), states(second)
    assert wanted.keys() == found.keys()
    for place, value in wanted.items():
        if place[1] != "state/step":  # one for each range
            assert torch.equal(value, found[place]), place


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    def grouped(*ndims: int) -> Any:
        model = Varied()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": ndim / 10}
            for ndim in ndims
        ]
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }
        return xds.initialize(model, config, model_parameters=groups)

    first, same, swapped = grouped(1, 2), grouped(1, 2), grouped(2, 1)
    train(first, range(1), 40)
    first.save_checkpoint(tmp_path)
    same.load_checkpoint(tmp_path)
    with pytest.raises(xds.UsageError, match=r"has .* in parameter group [01], and this engine"):
        swapped.load_checkpoint(tmp_path)
    swapped.load_checkpoint(tmp_path, load_optimizer_states=False)


def test_buffers_may_have_another_width_but_not_another_kind(tmp_path: Path) -> None:
    first = engine_of(Varied(buffer=torch.tensor([0.5, 1.5])), 0)
    first.save_checkpoint(tmp_path)
    wide = engine_of(Varied(buffer=torch.zeros(2, dtype=torch.float64)), 0)
    wide.load_checkpoint(tmp_path)
    assert wide.module.scale.tolist() == [0.5, 1.5] and wide.module.scale.dtype == torch.float64
    whole = engine_of(Varied(buffer=torch.zeros(2, dtype=torch.int64)), 0)
    with pytest.raises(
        xds.UsageError, match="scale is float32 in the checkpoint and int64 in the model"
    ):
        whole.load_checkpoint(tmp_path)


def test_a_weight_may_be_tied_or_no_longer(tmp_path: Path) -> None:
    first = engine_of(Varied(), 0)
    train(first, range(2), 40)
    first.save_checkpoint(tmp_path)
    untied = engine_of(Varied(tied=False), 0)
    untied.load_checkpoint(tmp_path)
    model = untied.module
    assert torch.equal(model.first.weight, model.last.weight)
    assert torch.equal(model.first.weight, first.module.first.weight)
    untied.save_checkpoint(tmp_path)
    with pytest.raises(xds.UsageError, match="the model does not have last.weight"):
        first.load_checkpoint(tmp_path)
