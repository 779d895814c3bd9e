"""Checkpoints: go on bit for bit, at any layout; a save that fails leaves the last one whole."""

from __future__ import annotations

import errno
import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.engine.checkpoint import saver
from xds.engine.checkpoint.io import folders
from xds.zero.checkpoint.ranges import pieces
from xds.zero.checkpoint.snapshot import Snapshot

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}},
}
WIDTH = 11


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.2))


class Net(nn.Module):
    """Blocks with buffers and random draws, a frozen layer, a tied weight; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.inner(x.to(self.inner.bias.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.outer(self.frozen(x)).float().square().mean()


def engine_of(stage: int, seed: int = 0, model: nn.Module | None = None, **more: Any) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    arguments = {key: more.pop(key) for key in ARGUMENTS if key in more}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
        **more,
    }
    if "optimizer" not in arguments:
        config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-2}})
    return xds.initialize(model or Net(), config, **arguments)


ARGUMENTS = ("optimizer", "lr_scheduler", "training_data", "model_parameters")


def inputs(number: int) -> Tensor:
    """This rank's part of 12 samples."""
    samples = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(number))
    return samples.chunk(dist.get_world_size())[dist.get_rank()]


def train(engine: Any, start: int, stop: int) -> list[float]:
    losses = []
    for number in range(start, stop):
        loss = engine(inputs(number))
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm() if engine.was_step_applied() else 0.0
        losses += [loss.item(), norm, engine.loss_scale, engine.get_lr()[0], random.random()]
    return losses


def states_of(engine: Any) -> dict[tuple[str, str], list[tuple[int, Tensor]]]:
    """By name and key: this rank's parts of values and optimizer states, and where each begins."""
    parts = engine._parts
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater, parts.optimizer)
    found: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for block in (*snapshot.values, *snapshot.states):
        flat = block.tensor.detach().reshape(-1)
        for piece in pieces(snapshot.flats[block.flat], block.start, block.stop):
            values = flat[piece.target : piece.target + piece.stop - piece.start].clone()
            found.setdefault((piece.name, block.key), []).append((piece.start, values))
    for one in snapshot.constants:
        for piece in pieces(snapshot.flats[one.flat], one.start, one.stop):
            value = torch.tensor([float(one.value)])
            found.setdefault((piece.name, one.key), []).append((0, value))
    for name, param in engine.module.named_parameters():
        if not engine._parts.sharded.policy.shards_params:
            found[name, "param"] = [(0, param.detach().reshape(-1).clone())]
    return found


def whole(results: list[Any]) -> dict[tuple[str, str], Tensor]:
    """The ranks' `states_of`, put together."""
    found: dict[tuple[str, str], dict[int, Tensor]] = {}
    for states in results:
        for place, parts in states.items():
            found.setdefault(place, {}).update(dict(parts))
    return {
        place: torch.cat([parts[start] for start in sorted(parts)])
        for place, parts in found.items()
    }


def same(one: Any, two: Any, skip: tuple[str, ...] = ()) -> None:
    one = {place: value for place, value in one.items() if place[1] not in skip}
    two = {place: value for place, value in two.items() if place[1] not in skip}
    assert one.keys() == two.keys()
    for place, value in one.items():
        assert torch.equal(value, two[place]), place


def counters(engine: Any) -> list[int]:
    return [
        *(engine.global_steps, engine.micro_steps),
        *(engine.skipped_steps, engine.global_samples),
    ]


# -- the same layout ----------------------------------------------------------------------------------------


def resume_here(folder: str, stage: int, more: dict[str, Any], numbers: tuple[int, int]) -> Any:
    """Train, save, go on; load into a fresh engine, go on. What both say."""
    middle, end = numbers
    first = engine_of(stage, **more)
    train(first, 0, middle)
    first.save_checkpoint(folder)
    saved = counters(first)
    losses = train(first, middle, end)
    second = engine_of(stage, seed=9, **more)
    path, client_state = second.load_checkpoint(folder)
    assert (path, client_state) == (f"{folder}/{Path(path).name}", {})
    assert counters(second) == saved
    again = train(second, middle, end)
    assert counters(second) == counters(first)
    return losses, again, states_of(first), states_of(second)


def check_resumed(results: list[Any]) -> None:
    for losses, again, first, second in results:
        assert losses == again
        for place, parts in first.items():
            for (start, one), (other_start, two) in zip(parts, second[place], strict=True):
                assert start == other_start
                assert torch.equal(one, two), place


def resume_each(folder: str, cases: list[tuple[int, dict[str, Any], tuple[int, int]]]) -> list[Any]:
    return [resume_here(f"{folder}/{at}", *case) for at, case in enumerate(cases)]


def check_each(results: list[Any]) -> None:
    for case in zip(*results, strict=True):
        check_resumed(list(case))


@pytest.mark.parametrize(
    "stage", [0, 3, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))]
)
def test_a_resumed_run_equals_the_one_that_never_stopped(tmp_path: Path, stage: int) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 1e-2}}
    more = {"scheduler": schedule, "gradient_clipping": 0.5}
    cases = [(stage, {**precision, **more}, (3, 6)) for precision in PRECISIONS.values()]
    check_each(run_ranks(resume_each, 2, str(tmp_path), [*cases, (stage, {}, (0, 2))]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_half_a_step_is_kept(tmp_path: Path, world_size: int) -> None:
    more = {"gradient_accumulation_steps": 3, "bf16": {"enabled": True}}
    cases = [(stage, more, (4, 9)) for stage in ([0, 1, 2, 3] if world_size == 2 else [0])]
    check_each(run_ranks(resume_each, world_size, str(tmp_path), cases))


def resume_optimizer(folder: str, kind: str) -> Any:
    named = {
        "torch": {"optimizer": torch.optim.NAdam},
        "callable": {
            "optimizer": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5)
        },
        "factored": {"optimizer": torch.optim.Adafactor},
        "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
        "muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}},
    }[kind]
    is_config = isinstance(named["optimizer"], dict)
    stage = 0 if kind == "factored" else 1
    if is_config:
        section = named["optimizer"]

        def make(seed: int) -> Any:
            torch.manual_seed(seed)
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": section,
                "zero_optimization": {"stage": 3, "unit_min_numel": 0},
            }
            return xds.initialize(Net(), config)
    else:

        def make(seed: int) -> Any:
            return engine_of(
                stage,
                seed,
                **named,
                lr_scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4], 0.5),
            )

    first = make(0)
    train(first, 0, 3)
    first.save_checkpoint(folder)
    losses = train(first, 3, 6)
    second = make(9)
    second.load_checkpoint(folder)
    return losses, train(second, 3, 6), states_of(first), states_of(second)


def resume_optimizers(folder: str, kinds: tuple[str, ...]) -> list[Any]:
    return [resume_optimizer(f"{folder}/{kind}", kind) for kind in kinds]


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [(1, ("torch", "factored")), (2, ("torch", "callable", "lamb", "muon"))],
)
def test_every_kind_of_optimizer_goes_on(
    tmp_path: Path, world_size: int, kinds: tuple[str, ...]
) -> None:
    check_each(run_ranks(resume_optimizers, world_size, str(tmp_path), kinds))


# -- another layout -----------------------------------------------------------------------------------------


def save_each(folder: str, stage: int, precisions: tuple[str, ...]) -> list[Any]:
    return [save_at(f"{folder}/{one}", stage, PRECISIONS[one]) for one in precisions]


def load_each(folder: str, stage: int, precisions: tuple[str, ...]) -> list[Any]:
    return [load_at(f"{folder}/{one}", stage, PRECISIONS[one]) for one in precisions]


def save_at(folder: str, stage: int, more: dict[str, Any]) -> Any:
    engine = engine_of(stage, **more)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="here")
    return states_of(engine)


def load_at(folder: str, stage: int, more: dict[str, Any]) -> Any:
    engine = engine_of(stage, seed=9, **more)
    engine.load_checkpoint(folder, "here")
    states = states_of(engine)
    train(engine, 2, 4)
    engine.save_checkpoint(folder, tag="there")
    return states


@pytest.mark.parametrize(
    ("old", "new"),
    [((1, 0), (2, 3)), ((2, 3), (1, 2)), ((2, 1), (3, 3)), ((3, 3), (2, 0)), ((3, 2), (1, 0))],
)
def test_states_are_bit_equal_at_another_number_of_ranks_and_stage(
    tmp_path: Path, old: tuple[int, int], new: tuple[int, int]
) -> None:
    precisions = ("fp32", "bf16")
    saved = run_ranks(save_each, old[0], str(tmp_path), old[1], precisions)
    loaded = run_ranks(load_each, new[0], str(tmp_path), new[1], precisions)
    for one, two in zip(zip(*saved, strict=True), zip(*loaded, strict=True), strict=True):
        # buffers are rank 0's, and are one state among the values
        same(whole(list(one)[::-1]), whole(list(two)), skip=("param",))


def test_states_are_bit_equal_in_another_precision(tmp_path: Path) -> None:
    saved = run_ranks(save_at, 2, str(tmp_path), 2, PRECISIONS["fp16"])
    loaded = run_ranks(load_at, 3, str(tmp_path), 3, PRECISIONS["bf16"])
    one, two = whole(saved[::-1]), whole(loaded)
    for place in one:
        is_trained = place[1].startswith("state/") or (place[0], "state/exp_avg") in one
        if is_trained and place[1] != "param":
            assert torch.equal(one[place], two[place]), place


def user_optimizer(folder: str, stage: int, does_save: bool) -> Any:
    engine = engine_of(stage, seed=0 if does_save else 9, optimizer=torch.optim.Adagrad)
    if does_save:
        train(engine, 0, 2)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return states_of(engine)


def test_an_optimizer_of_whole_parameters_loads_as_one_of_shards(tmp_path: Path) -> None:
    saved = run_ranks(user_optimizer, 1, str(tmp_path), 0, True)
    loaded = run_ranks(user_optimizer, 3, str(tmp_path), 1, False)
    same(whole(saved), whole(loaded), skip=("param",))


def refuse_factored(folder: str, does_save: bool) -> None:
    optimizer = torch.optim.Adafactor
    more = {"zero_allow_untested_optimizer": True}
    engine = engine_of(0 if does_save else 1, optimizer=optimizer, **more)
    if does_save:
        train(engine, 0, 1)
        engine.save_checkpoint(folder)
    else:
        with pytest.raises(xds.UsageError, match="row_var of .* is not per element"):
            engine.load_checkpoint(folder)


def test_states_of_whole_parameters_are_refused_in_shards(tmp_path: Path) -> None:
    run_ranks(refuse_factored, 1, str(tmp_path), True)
    run_ranks(refuse_factored, 2, str(tmp_path), False)


def half_a_step(folder: str, does_save: bool) -> None:
    engine = engine_of(2, gradient_accumulation_steps=2)
    if does_save:
        train(engine, 0, 3)
        engine.save_checkpoint(folder)
        return
    with pytest.raises(xds.UsageError, match="in the middle of an accumulation, by 2 ranks"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert counters(engine)[:2] == [1, 2]


def test_half_a_step_is_refused_at_another_layout(tmp_path: Path) -> None:
    run_ranks(half_a_step, 2, str(tmp_path), True)
    run_ranks(half_a_step, 3, str(tmp_path), False)


# -- the engine's loader ------------------------------------------------------------------------------------


class Numbered(nn.Module):
    """Remembers which samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.samples: list[int] = []

    def forward(self, numbers: Tensor) -> Tensor:
        self.samples += numbers.tolist()
        return self.weight * numbers.double().mean().float()


def read_data(folder: str, steps: tuple[int, int], does_load: bool) -> list[int]:
    model = Numbered()
    engine = engine_of(
        1,
        model=model,
        training_data=list(range(48)),
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=1,
    )
    if does_load:
        engine.load_checkpoint(folder)
    for _ in range(steps[0]):
        engine.train_batch()
    engine.save_checkpoint(folder)
    for _ in range(steps[1]):
        engine.train_batch()
    return model.samples


def test_the_loader_goes_on_at_the_next_sample(tmp_path: Path) -> None:
    # 48 samples: an epoch is 12 steps of 2 ranks; the save comes in the second one
    all_along = run_ranks(read_data, 2, str(tmp_path), (15, 10), False)
    resumed = run_ranks(read_data, 2, str(tmp_path), (10, 0), True)
    assert [samples[30:] for samples in all_along] == resumed


def test_another_number_of_ranks_sees_no_sample_twice(tmp_path: Path) -> None:
    before = run_ranks(read_data, 2, str(tmp_path), (6, 0), False)
    after = run_ranks(read_data, 3, str(tmp_path), (4, 0), True)
    assert sorted(sum(before + after, [])) == list(range(48))
    last = run_ranks(read_data, 1, str(tmp_path), (24, 0), True)
    assert sorted(last[0]) == list(range(48))


# -- what a script hands over -------------------------------------------------------------------------------


def client_states(folder: str) -> None:
    engine = engine_of(1)
    state = {
        "epoch": 3,
        "best": float("inf"),
        "names": ["a", None, True],
        "pair": (1, 2.5),
        "by_number": {1: "one"},
        "ema": {"weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()},
        "empty": {},
        "counts": Counter({"x": 2}),
    }
    assert engine.save_checkpoint(folder, tag=7, client_state=state) is True
    assert (Path(folder) / "latest").read_text() == "7"
    path, found = engine.load_checkpoint(folder)
    assert path == f"{folder}/7"
    tensor, wanted = found["ema"].pop("weight"), state["ema"].pop("weight")  # type: ignore[union-attr]
    assert torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype
    assert found == state
    before = sorted(path.name for path in Path(folder).iterdir())
    refused = [({"a": [{"b": object()}]}, r"client_state\['a'\]\[0\]\['b'\] is a builtins.object")]
    refused += [({"f": print}, "builtin_function"), ({(1, 2): 3}, "has the key")]
    for bad, words in refused:
        with pytest.raises(xds.UsageError, match=words):
            engine.save_checkpoint(folder, client_state=bad)
    for tag in ("a/b", "", ".hidden", "latest"):
        with pytest.raises(xds.UsageError, match="tag = "):
            engine.save_checkpoint(folder, tag=tag)
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
    loss = engine(inputs(4))
    engine.backward(loss)
    with pytest.raises(xds.UsageError, match=r"call step\(\) first"):
        engine.save_checkpoint(folder)


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
    wider_states, saved = states_of(wider), states_of(first)
    for (name, key), parts in saved.items():
        if key == "value" and name.startswith("layers"):
            check_same({(name, key): parts}, wider_states)
    narrow = engine_of(1, model=nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(xds.UsageError, match="does not have 0.bias, 0.weight"):
        narrow.load_checkpoint(folder)
    other = Net()
    other.frozen = nn.Linear(WIDTH, WIDTH + 1)
    with pytest.raises(
        xds.UsageError, match=r"frozen.weight is \[11, 11\] in the checkpoint and \[12, 11\]"
    ):
        engine_of(1, model=other).load_checkpoint(folder, load_module_strict=False)


def check_same(one: Any, two: Any) -> None:
    for place, parts in one.items():
        for (_, first), (_, second) in zip(parts, two[place], strict=True):
            assert torch.equal(first, second), place


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
    lion = engine_of(1, **{"optimizer": torch.optim.SGD})
    with pytest.raises(
        xds.UsageError, match="states of the optimizer Adam, and this engine has SGD"
    ):
        lion.load_checkpoint(folder)
    lion.load_checkpoint(folder, load_optimizer_states=False)
    assert counters(lion) == counters(first) and not lion.optimizer.state
    frozen = engine_of(3, seed=9, model=Net().requires_grad_(False))
    frozen.load_checkpoint(folder)
    frozen.save_checkpoint(folder, "inferred", save_latest=False)
    second.load_checkpoint(folder, "inferred")
    values = {place: parts for place, parts in states_of(first).items() if place[1] == "value"}
    check_same(values, states_of(second))
    grouped = Net()
    groups = [
        {"params": list(grouped.inner.parameters())},
        {"params": list(grouped.layers.parameters())},
    ]
    with pytest.raises(xds.UsageError, match="1 parameter groups, and this engine has 2"):
        engine_of(1, model=grouped, model_parameters=groups).load_checkpoint(folder)


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(parts_only, 2, str(tmp_path))


# -- what goes wrong ----------------------------------------------------------------------------------------


def failing_write(folder: str) -> None:
    rank = dist.get_rank()
    engine = engine_of(2)
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    whole_write, whole_commit = saver.write_tensors, saver.commit

    def full_disk(path: Path, entries: Any) -> Any:
        whole_write(path, entries[:1])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def broken_commit(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    for name, double, original in (
        ("write_tensors", full_disk, whole_write),
        ("commit", broken_commit, whole_commit),
    ):
        if rank == (1 if name == "write_tensors" else 0):
            setattr(saver, name, double)
        train(engine, 1, 2)
        with pytest.raises(xds.XdsError, match="save_checkpoint failed on rank"):
            engine.save_checkpoint(folder)
        setattr(saver, name, original)
        dist.barrier()
        assert sorted(path.name for path in Path(folder).iterdir()) == ["global_step1", "latest"]
    losses = train(engine, 2, 3)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    train(engine, 1, 2)
    train(engine, 1, 2)
    assert train(engine, 2, 3)[0] == pytest.approx(losses[0], rel=0.5)


def test_a_write_that_fails_on_one_rank_raises_on_all_and_keeps_the_old(tmp_path: Path) -> None:
    run_ranks(failing_write, 2, str(tmp_path))


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_damage_is_refused_by_file_before_anything_changes(tmp_path: Path) -> None:
    engine = engine_of(0)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    data = next((tmp_path / "global_step1").glob("rank_*"))
    manifest = tmp_path / "global_step1" / "manifest.json"
    train(engine, 1, 2)
    before = states_of(engine)
    size = data.stat().st_size
    for at in (3, 40, size // 2, size - 1):
        damage(data, at)
        with pytest.raises(xds.UsageError, match=f"{data.name} is damaged"):
            engine.load_checkpoint(tmp_path)
        damage(data, at)
    damage(manifest, len(manifest.read_bytes()) // 2)
    with pytest.raises(xds.UsageError, match=r"manifest.json is damaged"):
        engine.load_checkpoint(tmp_path)
    damage(manifest, len(manifest.read_bytes()) // 2)
    kept = data.read_bytes()
    data.write_bytes(kept[:-1])
    with pytest.raises(xds.UsageError, match=f"{data.name} has {size - 1} bytes"):
        engine.load_checkpoint(tmp_path)
    data.unlink()
    with pytest.raises(xds.UsageError, match=f"{data.name} is missing"):
        engine.load_checkpoint(tmp_path)
    check_same(before, states_of(engine))
    data.write_bytes(kept)
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 1


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


def test_every_instant_of_saving_a_tag_again_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at the k-th call that changes the folder, for every k."""

    class Killed(BaseException):
        pass

    engine = engine_of(0)
    engine.save_checkpoint(tmp_path, "tag")
    train(engine, 0, 1)
    calls = [("rename", folders.os), ("replace", folders.os)]
    calls += [("fsync", folders.os)]
    for dies_at in range(30):
        left = [dies_at]

        def count(original: Any, left: list[int] = left) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return original(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name, module in calls:
                patch.setattr(module, name, count(getattr(module, name)))
            try:
                engine.save_checkpoint(tmp_path, "tag")
                survived = True
            except Killed:
                survived = False
        other = engine_of(0, seed=5)
        other.load_checkpoint(tmp_path)
        assert other.global_steps in (0, 1)
        if survived:
            assert dies_at > 8 and other.global_steps == 1
            return
    raise AssertionError("a save never came to its end")


def test_the_files_are_what_other_readers_expect(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    engine = engine_of(0)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    folder = tmp_path / "global_step1"
    manifest = json.loads((folder / "manifest.json").read_text())
    tensors = safetensors.load_file(folder / manifest["files"][0]["path"])
    one = next(r for r in manifest["files"][0]["ranges"] if r["key"] == "value")
    slot = manifest["flats"][one["flat"]]["slots"][0]
    numel = torch.Size(slot["shape"]).numel()
    value = tensors[one["tensor"]][slot["offset"] : slot["offset"] + numel].view(slot["shape"])
    assert torch.equal(value, dict(engine.module.named_parameters())[slot["name"]])


def test_saving_holds_no_copy_of_the_states(tmp_path: Path) -> None:
    tracked = pytest.importorskip("resource")
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    engine = engine_of(0, model=model)
    loss = engine(torch.randn(4, 1024)).square().mean()
    engine.backward(loss)
    engine.step()
    before = tracked.getrusage(tracked.RUSAGE_SELF).ru_maxrss
    engine.save_checkpoint(tmp_path)  # 100 MiB
    grown_kib = tracked.getrusage(tracked.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024
