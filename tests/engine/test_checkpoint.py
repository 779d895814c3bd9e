"""Checkpoints: training goes on bit for bit, in the same layout and in another. What does not fit."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import (
    BF16,
    FP16,
    WIDTH,
    Net,
    check_same,
    counters,
    engine_of,
    inputs,
    load_at,
    resume_each,
    same,
    save_at,
    states_of,
    train,
    whole,
)
from helpers import run_new_ranks, run_ranks
from runs import PRECISIONS, config
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import xds
from xds.engine.checkpoint.io.checked_file import CheckedFile
from xds.engine.data.loaders import build_loader

# -- the same layout ----------------------------------------------------------------------------------------

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 1e-2}}
HALF_A_STEP = ({**BF16, "gradient_accumulation_steps": 3}, 4, 9)
CPU = {"device": "cpu"}
MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}
FEW_BITS = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.6, "reset_T": 7}}


def mics(size: int = 2, **zero: Any) -> dict[str, Any]:
    """Shard groups of `size` ranks."""
    return {"zero": {"mics_shard_size": size, **zero}}


def milestones(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], 0.5)


def momentum(groups: Any) -> Any:
    return torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5)


CASES = {
    "stage 0": (0, {"scheduler": WARMUP, "gradient_clipping": 0.5}),
    "stage 1, 16 bits": (1, FP16, 0, 2),
    "stage 2, a scale that changes": (2, {**FP16, "gradient_clipping": 0.5}),
    "stage 3": (3, {**BF16, "scheduler": WARMUP, "gradient_clipping": 0.5}),
    "stage 3, half a step": (3, *HALF_A_STEP),
    "torch's optimizer": (1, {"optimizer": torch.optim.NAdam, "lr_scheduler": milestones}),
    "a callable": (2, {"optimizer": momentum, "lr_scheduler": milestones}),
    **{
        name: (stage, {"optimizer": {"type": name, "params": {"lr": 1e-2}}, **BF16})
        for stage, name in ((1, "SGD"), (2, "Adagrad"), (3, "Lion"))
    },
    "muon": (3, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
}
MICS_CASES = {
    "stage 3": (3, {**mics(), **BF16, "gradient_clipping": 0.5}),
    "half a step": (2, {**mics(), **HALF_A_STEP[0]}, *HALF_A_STEP[1:]),
    "on the host": (3, {**mics(offload_optimizer=CPU, offload_param=CPU), **BF16}),
    "errors of each rank": (2, {**mics(**FEW_BITS), **BF16}),
}


def test_a_resumed_run_equals_the_one_that_never_stopped(tmp_path: Path) -> None:
    run_ranks(resume_each, 2, str(tmp_path), list(CASES.values()))
    run_ranks(resume_each, 4, str(tmp_path / "mics"), list(MICS_CASES.values()))
    factored = (0, {"optimizer": torch.optim.Adafactor, "lr_scheduler": milestones})
    run_ranks(resume_each, 1, str(tmp_path / "one"), [factored, (0, *HALF_A_STEP)])


def test_random_draws_go_on_in_the_middle_of_a_pair(tmp_path: Path) -> None:
    """gauss() and standard_normal() draw two numbers at a time, and keep the second one."""
    for num_drawn in (0, 1):
        engine = engine_of(0)
        numpy.random.seed(0)
        drawn = [(random.gauss(), numpy.random.standard_normal()) for _ in range(num_drawn)]
        assert len(drawn) == num_drawn
        engine.save_checkpoint(tmp_path)
        wanted = [(random.gauss(), numpy.random.standard_normal()) for _ in range(3)]
        engine.load_checkpoint(tmp_path)
        assert [(random.gauss(), numpy.random.standard_normal()) for _ in range(3)] == wanted
        engine.destroy()


def used_until(engine: Any, what: str) -> None:
    """Leave an engine with the state of a step that has begun."""
    weight = 5.0 if what.startswith("weights") else None
    for number in range(7, 9 if what == "a step and a half" else 8):
        engine.backward(engine(inputs(number)), weight=weight)
        engine.step()
    if what == "weights, and a norm":
        engine.clip_grad_norm(1e-3)
    if what == "no step()":
        engine.backward(engine(inputs(8)))


def load_into_used(folder: str, stage: int) -> None:
    """A load into an engine that has been used is that into a new one."""
    more = {**FP16, "gradient_accumulation_steps": 2, "scheduler": WARMUP}
    first = engine_of(stage, **more)
    train(first, 0, 4)
    first.save_checkpoint(folder)
    wanted = train(first, 4, 8)
    first.destroy()
    for what in ("weights", "weights, and a norm", "no weights", "no step()"):
        engine = engine_of(stage, seed=9, **more)
        used_until(engine, what)
        engine.load_checkpoint(folder)
        with pytest.raises(xds.UsageError, match=r"without engine\.backward"):
            engine.step()
        assert train(engine, 4, 8) == wanted, what
        engine.destroy()


def test_a_load_into_an_engine_within_a_step_is_that_into_a_new_one(tmp_path: Path) -> None:
    for stage in (0, 3):
        run_ranks(load_into_used, 2, str(tmp_path / str(stage)), stage)


class Sometimes(nn.Module):
    """A forward that may leave out the only layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        return (self.layer(x) if is_used else x).float().square().mean()


def go_on_from_a_rank_without_gradients(folder: str) -> list[float]:
    """The norm of a step of two micro-batches, then of one that loads after its first micro-batch."""
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    norms = []
    for goes_on in (False, True):
        engine = engine_of(0, model=Sometimes(), **BF16)
        engine.set_train_batch_size(2 * engine.train_batch_size())
        if goes_on:
            engine.load_checkpoint(folder)
        else:
            engine.backward(engine(x, dist.get_rank() == 0))
            engine.step()
            engine.save_checkpoint(folder)
        engine.backward(engine(x, True))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def test_a_step_goes_on_where_only_the_other_rank_had_gradients(tmp_path: Path) -> None:
    for before, after in run_ranks(go_on_from_a_rank_without_gradients, 2, str(tmp_path)):
        assert before == after > 0


# -- another layout -----------------------------------------------------------------------------------------


def check_replicas(states: list[Any], size: int) -> None:
    """Ranks with one shard have the same bits of what is trained; step counts are written by one of them."""
    for rank, found in enumerate(states):
        first = states[rank % size]
        trained = {name for name, key in first if key == "state/exp_avg"}
        places = [place for place in first if place[0] in trained and place[1] != "state/step"]
        assert trained and set(places) <= found.keys()
        for place in places:
            for (start, one), (other, two) in zip(found[place], first[place], strict=True):
                assert start == other and torch.equal(one, two), place


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((1, 0, {}), (2, 3, {})),
        ((3, 3, BF16), (2, 0, BF16)),
        ((2, 2, FP16), (3, 1, BF16)),
        ((1, 0, {"optimizer": torch.optim.Adagrad}), (3, 1, {"optimizer": torch.optim.Adagrad})),
        # torch's own takes over what the kernels of 16 bits have
        ((2, 1, {**MOMENTUM, **BF16}), (3, 2, MOMENTUM)),
        ((4, 2, mics()), (2, 3, {})),
        ((4, 3, {**mics(), **BF16}), (4, 1, {**mics(4), **BF16})),
    ],
)
def test_states_are_bit_equal_in_another_layout(tmp_path: Path, old: Any, new: Any) -> None:
    """Each is the number of ranks, the stage and more of the config."""
    ranks = []
    for run, (world_size, *case) in ((save_at, old), (load_at, new)):
        ranks.append(run_ranks(run, world_size, str(tmp_path), *case))
        if "zero" in case[1]:
            check_replicas(ranks[-1], case[1]["zero"]["mics_shard_size"])
    saved, loaded = map(whole, ranks)
    if {*old[2]} & PRECISIONS.keys() != {*new[2]} & PRECISIONS.keys():
        # what is not trained has another dtype
        names = {name for name, key in saved if key in ("state/exp_avg", "state/momentum_buffer")}
        saved, loaded = ({p: v for p, v in w.items() if p[0] in names} for w in (saved, loaded))
    same(saved, loaded)


def save_large(folder: str) -> Any:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700), nn.Linear(700, 3))
    engine = engine_of(2, model=model, **mics())
    engine.backward(engine(torch.randn(2, 700)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, "here")
    return engine.full_state_dict(full_precision=True)


def test_replicas_write_each_element_once_and_share_the_work(tmp_path: Path) -> None:
    ranks = run_ranks(save_large, 4, str(tmp_path))
    assert [bool(values) for values in ranks] == [True, False, False, False]
    manifest = json.loads((tmp_path / "here" / "manifest.json").read_text())
    numels = [flat["numel"] for flat in manifest["flats"]]
    for key in ("value", "state/exp_avg"):
        by_flat: list[list[tuple[int, int]]] = [[] for _ in numels]
        by_rank = [0] * 4
        for rank, record in enumerate(manifest["files"]):
            for one in record["ranges"]:
                if one["key"] == key:
                    by_flat[one["flat"]].append((one["start"], one["stop"]))
                    by_rank[rank] += one["stop"] - one["start"]
        for found, numel in zip(by_flat, numels, strict=True):
            ends = [0, *(stop for _, stop in sorted(found))]
            assert [start for start, _ in sorted(found)] == ends[:-1] and ends[-1] == numel
        assert min(by_rank) > 0.24 * sum(numels)
    loaded = xds.get_fp32_state_dict(str(tmp_path), "here")
    assert all(torch.equal(loaded[name], value) for name, value in ranks[0].items())


def in_shards_only(folder: str, does_save: bool) -> None:
    adafactor = {"optimizer": torch.optim.Adafactor, "zero_allow_untested_optimizer": True}
    engine = engine_of(0 if does_save else 1, **adafactor)
    half = engine_of(2, gradient_accumulation_steps=2)
    if does_save:
        train(engine, 0, 1)
        engine.save_checkpoint(folder, "factored")
        train(half, 0, 3)
        half.save_checkpoint(folder, "half")
        return
    with pytest.raises(xds.UsageError, match="row_var of .* is not per element"):
        engine.load_checkpoint(folder, "factored")
    with pytest.raises(xds.UsageError, match="in the middle of an accumulation, by 1 rank"):
        half.load_checkpoint(folder, "half")
    half.load_checkpoint(folder, "half", load_optimizer_states=False)
    assert counters(half)[:2] == [1, 2]


def test_what_has_no_parts_is_refused_in_another_layout(tmp_path: Path) -> None:
    run_ranks(in_shards_only, 1, str(tmp_path), True)
    run_ranks(in_shards_only, 2, str(tmp_path), False)


class Reads:
    """The bytes that each rank reads of files: to check them, and again to fill what was alive."""

    def __init__(self) -> None:
        self.of_rank = threading.local()  # each rank is a thread
        self._read = CheckedFile.read

    def read(self, file: CheckedFile, copies: Any, *, sums: bool = True) -> None:
        before = file.read_bytes
        self._read(file, copies, sums=sums)
        count = vars(self.of_rank).setdefault(sums, 0) + file.read_bytes - before
        vars(self.of_rank)[sums] = count


def deep(folder: str, stage: int, reads: Reads | None) -> None:
    """Save 6.3 MB of fp32 parameters in four units and their states, or load them and count."""
    blocks = [nn.Sequential(nn.Linear(256, 768), nn.GELU(), nn.Linear(768, 256)) for _ in range(4)]
    engine = engine_of(stage, model=nn.Sequential(*blocks))
    if reads is None:
        engine.backward(engine(torch.ones(4, 256)).square().mean())
        engine.step()
        engine.save_checkpoint(folder)
        return
    engine.load_checkpoint(folder)
    held_bytes = alive_bytes = 0
    for (_, key), parts in states_of(engine).items():
        nbytes = sum(values.nbytes for _, values in parts)
        held_bytes += nbytes if key not in ("state/step", "param") else 0
        alive_bytes += nbytes if key == "value" else 0
    checked, filled = (vars(reads.of_rank)[sums] for sums in (True, False))
    assert held_bytes <= checked <= 1.1 * held_bytes, stage
    assert alive_bytes <= filled <= 1.1 * alive_bytes, stage


def test_a_rank_reads_its_share_and_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads()
    monkeypatch.setattr(
        CheckedFile, "read", lambda file, *args, **more: reads.read(file, *args, **more)
    )
    run_ranks(deep, 2, str(tmp_path), 3, None)
    for world_size, stage in ((1, 0), (3, 2), (4, 3)):
        run_ranks(deep, world_size, str(tmp_path), stage, reads)


# -- data ---------------------------------------------------------------------------------------------------

SAMPLES = 53


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (Points()[index] for index in range(SAMPLES))


class OwnLoader:
    """A loader of the user's, with torchdata's protocol: its position is this rank's alone."""

    def __init__(self) -> None:
        self.at = dist.get_rank() * 100

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.at += 1
            yield torch.full((1, 1), float(self.at - 1))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["random"].tolist() == [state["at"]]
        self.at = state["at"]


class Numbered(nn.Module):
    """Remembers which samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [round(first) for first in x[:, 0].tolist()]
        return self.weight * x.mean()


def read(folder: str, kind: Any, steps: int, loads: bool, num_workers: int = 0) -> list[int]:
    """Take `steps` micro-batches, after loading, and save. The samples of this rank."""
    engine = xds.initialize(Numbered(), config(1, optimizer="SGD"), training_data=kind())
    if num_workers:
        engine.training_dataloader = engine._parts.loader = build_loader(
            kind(),
            micro_batch_size=2,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            num_workers=num_workers,
        )
    if loads:
        engine.load_checkpoint(folder)
    for _ in range(steps):
        engine.train_batch()
    engine.save_checkpoint(folder)
    return list(engine.module.seen)


@pytest.mark.parametrize("kind", [Points, Stream])
def test_no_sample_is_seen_twice_or_left_out_at_another_number_of_ranks(
    tmp_path: Path, kind: Any
) -> None:
    folder = str(tmp_path)
    seen = run_ranks(read, 2, folder, kind, 4, False)  # 16 samples
    seen += run_ranks(read, 3, folder, kind, 3, True)  # 18
    seen += run_ranks(read, 1, folder, kind, 9, True)  # 18
    everything = Counter(sum(seen, []))
    assert sum(everything.values()) == 52 and max(everything.values()) == 1
    last = run_ranks(read, 1, folder, kind, 1, True)[0]
    assert set(last) == set(range(SAMPLES)) - set(everything)


def read_in_two_epochs(folder: str, kind: Any, num_workers: int) -> None:
    whole = read(folder, kind, 5 + 27, False)
    before = read(folder, kind, 5, False, num_workers)
    assert before + read(folder, kind, 27, True, num_workers) == whole


def test_the_next_epoch_is_that_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    for kind in (Points, Stream):
        run_ranks(read_in_two_epochs, 2, str(tmp_path), kind, 0)


@pytest.mark.slow
def test_workers_that_read_ahead_do_not_move_the_position(tmp_path: Path) -> None:
    run_new_ranks(read_in_two_epochs, 1, str(tmp_path), Points, 1)  # new ones may start workers


def test_a_loader_with_a_state_of_its_own_goes_on(tmp_path: Path) -> None:
    run_ranks(read, 2, str(tmp_path), OwnLoader, 3, False)
    assert run_ranks(read, 2, str(tmp_path), OwnLoader, 2, True) == [[3, 4], [103, 104]]
    assert run_ranks(read, 1, str(tmp_path), OwnLoader, 2, True) == [[0, 1]]  # with a warning


# -- what a script hands over -------------------------------------------------------------------------------


def client_states(folder: str) -> None:
    engine = engine_of(1)
    ema = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
    state = {"pair": (1, float("inf")), "by_number": {1: "one"}, "ema": {"weight": ema}}
    assert engine.save_checkpoint(folder, tag=7, client_state=state) is True
    assert (Path(folder) / "latest").read_text() == "7"
    path, found = engine.load_checkpoint(folder)
    assert path == f"{folder}/7"
    tensor = found["ema"].pop("weight")
    assert torch.equal(tensor, ema) and tensor.dtype == ema.dtype
    assert found == {**state, "ema": {}}
    before = sorted(path.name for path in Path(folder).iterdir())
    refused = [({"a": [{"b": object()}]}, r"client_state\['a'\]\[0\]\['b'\] is a builtins.object")]
    refused += [({"f": print}, "builtin_function"), ({(1, 2): 3}, "has the key")]
    for bad, words in refused:
        with pytest.raises(xds.UsageError, match=words):
            engine.save_checkpoint(folder, client_state=bad)
    with pytest.raises(xds.UsageError, match="the same tag"):
        engine.save_checkpoint(folder, tag=f"rank{dist.get_rank()}")
    dist.barrier()  # rank 0 has removed its folder
    assert sorted(path.name for path in Path(folder).iterdir()) == before


def test_client_state_comes_back_and_what_cannot_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(client_states, 2, str(tmp_path))


def tags(folder: str) -> None:
    engine = engine_of(0)
    assert engine.load_checkpoint(folder) == (None, None)
    with pytest.raises(xds.UsageError, match="there is none"):
        engine.load_checkpoint(folder, "never")
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    train(engine, 2, 3)
    engine.save_checkpoint(folder, save_latest=False)
    dist.barrier()
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    engine.load_checkpoint(folder, "global_step3")
    assert engine.global_steps == 3
    engine.save_checkpoint(folder, "global_step2")  # under a tag that is there
    assert len(list((Path(folder) / "global_step2").iterdir())) == 1 + dist.get_world_size()
    engine.load_checkpoint(folder)
    assert engine.global_steps == 3
    with pytest.raises(xds.UsageError, match="there are global_step2, global_step3"):
        engine.load_checkpoint(folder, "global_step9")
    engine.backward(engine(inputs(4)))
    with pytest.raises(xds.UsageError, match=r"call step\(\) first"):
        engine.save_checkpoint(folder)


def folder_of_its_own(folder: str) -> None:
    """As Ray Train's guide for DeepSpeed has it; rank 1's name may also lead to the same folder."""
    engine, root = engine_of(1), Path(folder)
    mine = root / f"rank{dist.get_rank()}"
    mine.mkdir()
    with pytest.raises(xds.UsageError, match="rank 1: this rank saves in .*rank1.*rank0; give all"):
        engine.save_checkpoint(mine)
    dist.barrier()
    assert not list(mine.iterdir())
    (root / "link").symlink_to(root / "rank0") if dist.get_rank() else None
    engine.save_checkpoint(root / "link" if dist.get_rank() else mine)
    assert engine.load_checkpoint(root / "rank0")[0] is not None


def test_ranks_that_save_into_different_folders_are_told(tmp_path: Path) -> None:
    run_ranks(folder_of_its_own, 2, str(tmp_path))


def test_tags_and_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(tags, 2, str(tmp_path))
    with caplog.at_level(logging.WARNING, "xds"):
        assert engine_of(0).load_checkpoint(tmp_path / "empty") == (None, None)
    assert caplog.text.rstrip().endswith("and no tag was given")  # a fallback would find none


# -- what does not fit --------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.again = nn.Linear(2, 2)
        del self.seen


def strict(folder: str) -> None:
    first = engine_of(3)
    train(first, 0, 1)
    first.save_checkpoint(folder)
    wider = engine_of(3, seed=9, model=Wider())
    before = states_of(wider)
    with pytest.raises(xds.UsageError) as error:
        wider.load_checkpoint(folder)
    for name in ("spare.weight", "spare.bias", "again.weight", "again.bias", "seen"):
        assert name in str(error.value)
    check_same(before, states_of(wider))
    wider.load_checkpoint(folder, load_module_strict=False)
    layers = {p: v for p, v in states_of(first).items() if p[0].startswith("layers")}
    check_same({p: v for p, v in layers.items() if p[1] == "value"}, states_of(wider))
    narrow = engine_of(1, model=nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(xds.UsageError, match="does not have 0.bias, 0.weight"):
        narrow.load_checkpoint(folder)
    other = Net()
    other.frozen = nn.Linear(WIDTH, WIDTH + 1)
    with pytest.raises(
        xds.UsageError, match=r"frozen.weight is \[11, 11\] in the checkpoint and \[12, 11\]"
    ):
        engine_of(1, model=other).load_checkpoint(folder, load_module_strict=False)


def test_missing_and_extra_names_are_refused_at_once(tmp_path: Path) -> None:
    run_ranks(strict, 2, str(tmp_path))


def parts_only(folder: str) -> None:
    first = engine_of(1)
    train(first, 0, 2)
    first.save_checkpoint(folder, client_state={"epoch": 1})
    second = engine_of(1, seed=9)
    drawn = torch.get_rng_state()
    assert second.load_checkpoint(folder, load_module_only=True)[1] == {"epoch": 1}
    assert torch.equal(torch.get_rng_state(), drawn)
    assert counters(second) == [0, 0, 0, 0] and not second.optimizer.state
    check_same(states_of(second), states_of(first))
    sgd = engine_of(1, optimizer=torch.optim.SGD)
    with pytest.raises(
        xds.UsageError, match="states of the optimizer Adam, and this engine has SGD"
    ):
        sgd.load_checkpoint(folder)
    sgd.load_checkpoint(folder, load_optimizer_states=False)
    assert counters(sgd) == counters(first) and not sgd.optimizer.state
    frozen = engine_of(3, seed=9, model=Net().requires_grad_(False))
    frozen.load_checkpoint(folder)
    frozen.save_checkpoint(folder, "inferred", save_latest=False)
    second.load_checkpoint(folder, "inferred")
    values = {place: parts for place, parts in states_of(first).items() if place[1] == "value"}
    check_same(values, states_of(second))
    few, again = Net(), Net()
    groups = [
        {"params": list(few.inner.parameters())},
        {"params": list(few.layers.parameters()), "weight_decay": 0.1},
    ]
    grouped = engine_of(1, model=few, model_parameters=groups)
    with pytest.raises(xds.UsageError, match="1 parameter groups, and this engine has 2"):
        grouped.load_checkpoint(folder)
    grouped.save_checkpoint(folder, "grouped")
    turned = [
        {"params": list(again.layers.parameters()), "weight_decay": 0.1},
        {"params": list(again.inner.parameters())},
    ]
    swapped = engine_of(1, model=again, model_parameters=turned)
    with pytest.raises(xds.UsageError, match=r"has .* in parameter group [01], and this engine"):
        swapped.load_checkpoint(folder, "grouped")
    swapped.load_checkpoint(folder, "grouped", load_optimizer_states=False)


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(parts_only, 2, str(tmp_path))


def leave_out(folder: str, stages: tuple[int, int]) -> None:
    first = engine_of(stages[0])
    train(first, 0, 2)
    first.save_checkpoint(folder, "all")
    first.save_checkpoint(folder, "few", exclude_frozen_parameters=True)
    dist.barrier()
    sizes = [
        sum(path.stat().st_size for path in (Path(folder) / tag).glob("rank_*"))
        for tag in ("all", "few")
    ]
    assert sizes[0] - sizes[1] >= 4 * (WIDTH * WIDTH + WIDTH)
    second = engine_of(stages[1], seed=1)
    own = second.full_state_dict(rank0_only=False)
    second.load_checkpoint(folder)
    saved, found = (one.full_state_dict(rank0_only=False) for one in (first, second))
    for name, value in found.items():
        if "norm" not in name and name != "seen":  # buffers are those of rank 0
            assert torch.equal(value, (own if "frozen" in name else saved)[name]), name
    without = Net()
    without.frozen = nn.Identity()
    with pytest.raises(xds.UsageError, match="the model does not have frozen.bias, frozen.weight"):
        engine_of(stages[1], model=without).load_checkpoint(folder, "all")


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(leave_out, 2, str(tmp_path), (3, 1))


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


def varied(stage: int = 0, steps: int = 0, more: Any = None, **model: Any) -> Any:
    engine = engine_of(stage, model=Varied(**model), **(more or {}))
    for _ in range(steps):
        engine.backward(engine(torch.ones(4, 40)).square().mean())
        engine.step()
    return engine


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
    first = varied(3, 2)
    first.save_checkpoint(tmp_path)
    second = varied(3, more={"zero_optimization": {"stage": 3, **section}})
    second.load_checkpoint(tmp_path)
    wanted, found = whole([states_of(first)]), whole([states_of(second)])
    assert wanted.keys() == found.keys()
    for place, value in wanted.items():
        if place[1] != "state/step":  # one for each range
            assert torch.equal(value, found[place]), place


def test_buffers_may_have_another_width_but_not_another_kind(tmp_path: Path) -> None:
    varied(buffer=torch.tensor([0.5, 1.5])).save_checkpoint(tmp_path)
    wide = varied(buffer=torch.zeros(2, dtype=torch.float64))
    wide.load_checkpoint(tmp_path)
    assert wide.module.scale.tolist() == [0.5, 1.5] and wide.module.scale.dtype == torch.float64
    with pytest.raises(
        xds.UsageError, match="scale is float32 in the checkpoint and int64 in the model"
    ):
        varied(buffer=torch.zeros(2, dtype=torch.int64)).load_checkpoint(tmp_path)


def test_a_weight_may_be_tied_or_no_longer(tmp_path: Path) -> None:
    first = varied(0, 2)
    first.save_checkpoint(tmp_path)
    untied = varied(tied=False)
    untied.load_checkpoint(tmp_path)
    model = untied.module
    assert torch.equal(model.first.weight, model.last.weight)
    assert torch.equal(model.first.weight, first.module.first.weight)
    untied.save_checkpoint(tmp_path)
    with pytest.raises(xds.UsageError, match="the model does not have last.weight"):
        first.load_checkpoint(tmp_path)


# -- files and memory ---------------------------------------------------------------------------------------


def test_the_files_are_what_other_readers_expect(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    engine = varied(0, 1)
    engine.save_checkpoint(tmp_path)
    folder = tmp_path / "global_step1"
    manifest = json.loads((folder / "manifest.json").read_text())
    tensors = safetensors.load_file(folder / manifest["files"][0]["path"])
    one = next(r for r in manifest["files"][0]["ranges"] if r["key"] == "value")
    slot = manifest["flats"][one["flat"]]["slots"][0]
    numel = torch.Size(slot["shape"]).numel()
    value = tensors[one["tensor"]][slot["offset"] : slot["offset"] + numel].view(slot["shape"])
    assert torch.equal(value, dict(engine.module.named_parameters())[slot["name"]])


def test_a_half_written_folder_is_never_loaded_and_is_cleaned(tmp_path: Path) -> None:
    engine = engine_of(0)
    engine.save_checkpoint(tmp_path)
    stale = tmp_path / ".global_step9.tmp-0123abcd"
    stale.mkdir()
    (stale / "rank_00000-0123abcd.safetensors").write_bytes(b"half")
    torn = tmp_path / "global_step8"
    torn.mkdir()
    (torn / "rank_00000-0123abcd.safetensors").write_bytes(b"half")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step0")
    with pytest.raises(xds.UsageError, match="not a committed checkpoint"):
        engine.load_checkpoint(tmp_path, "global_step8")
    with pytest.raises(xds.UsageError, match="begin with a dot"):
        engine.load_checkpoint(tmp_path, stale.name)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    assert not stale.exists() and torn.exists()
    engine.save_checkpoint(tmp_path, "global_step8")
    assert len(list(torn.iterdir())) == 2


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory cannot be reset here"
)
def test_saving_and_loading_hold_no_copy_of_the_states(tmp_path: Path) -> None:
    engine = engine_of(0, model=nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))))
    engine.backward(engine(torch.randn(4, 1024)).square().mean())
    engine.step()

    def kib(name: str) -> int:
        lines = Path("/proc/self/status").read_text().split("\n")
        return next(int(line.split()[1]) for line in lines if name in line)

    for call in (engine.save_checkpoint, engine.load_checkpoint):
        Path("/proc/self/clear_refs").write_text("5")
        before = kib("VmRSS")
        call(tmp_path)  # 100 MiB
        assert kib("VmHWM") - before < 64 * 1024, call.__name__
