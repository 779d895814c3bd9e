"""What a load refuses, it refuses before anything has changed, on every rank, as `xds checkpoint verify`."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import shutil
import socket
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import engine_of as plain_engine
from helpers import run_ranks
from manifest_damages import MANIFEST, TOO_DEEP, manifest_text, rewrite, with_sum
from runs import config
from saved_checkpoints import values_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import xds
from xds.engine.checkpoint.hyperparameters import check_groups
from xds.engine.config.optimizer import OPTIMIZERS
from xds.launcher import checkpoint as command
from xds.ops.optim.shard_optimizer import kind_of
from xds.utils import small_files
from xds.utils.errors import DamagedError, UsageError
from xds.utils.small_files import parse_json, read_small_text
from xds.zero.checkpoint.snapshot import Snapshot

WIDTH = 6
SLICES = {"frozen": "colwise_gather_output", "last": "rowwise_split_input"}
HALF_A_STEP = "fp16, stage 2, half a step"
BASES: dict[str, dict[str, Any]] = {
    HALF_A_STEP: config(2, accumulation=2, fp16={"enabled": True, "initial_scale_power": 4}),
    "fp32, stage 1, in slices": config(
        1, accumulation=2, tensor_parallel={"tp_size": 2, "plan": SLICES}
    ),
}


class Net(nn.Module):
    """Tied, frozen, empty and lone parameters, buffers of all sorts, one of them each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 3)
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("rank", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x.to(self.inner.weight.dtype)))
        x = self.gain * self.outer(self.frozen(x))
        return self.last(x).float().square().mean()


def engine_of(base: str) -> Any:
    torch.manual_seed(1)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2)))
    engine = xds.initialize(Net(), {**BASES[base], "scheduler": scheduler}, training_data=data)
    batches = iter(engine.training_dataloader)
    for _ in range(3):  # with two micro-batches a step: in the middle of one
        engine.backward(engine(next(batches)[0]))
        engine.step()
    engine.module.rank.fill_(10 + engine.global_rank)
    return engine


def digest(engine: Any) -> str:
    """Of everything a load may change."""
    parts = engine._parts
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater)
    found: list[Any] = [parts.loss_scale.state_dict(), parts.loss_scale.value]
    for block in (*snapshot.values, *snapshot.states, *snapshot.grad_totals()):
        found += [block.flat, block.key, block.start, values_of(block).cpu().tolist()]
    for flat, (local, filled) in snapshot.grad_locals().items():
        found += [flat, filled, local.tolist()]
    found += [list(snapshot.constants)]
    found += [
        {k: v for k, v in group.items() if k != "params"} for group in parts.optimizer.param_groups
    ]
    found += [parts.scheduler.state_dict(), parts.loader.position()]
    found += [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]
    found += [torch.get_rng_state().tolist(), random.getstate()]
    return sha256(repr(found).encode()).hexdigest()


# -- single changes -----------------------------------------------------------------------------------------

ABSENT = KeyError
GROUP = ("state", "optimizer", "groups", 0)
FILE, FLAT = ("files", 0), ("flats", 0)
CONTRADICTIONS: list[tuple[tuple[Any, ...], Any]] = [
    (("state", "loss_scale"), ABSENT),
    (("state", "loss_scale", "value"), 1e300),
    (("state", "counters", "micro_steps"), ABSENT),
    (("state", "counters", "accumulation_steps"), 0),
    (("state", "optimizer"), None),
    (("state", "optimizer", "groups"), 5),
    ((*GROUP, "params"), []),
    (("state", "data"), {"epoch": -1, "samples": 0}),
    (("state", "lr_scheduler", "state", "last_batch_iteration"), -5),
    (("stage",), 4),
    (("world_size",), 2),
    ((*FLAT, "numel"), 10**12),
    ((*FLAT, "slots", 0, "shape"), [True, 6]),
    ((*FLAT, "slots", 0, "name"), 5),
    ((*FLAT, "kind"), "params"),
    ((*FLAT, "dtype"), "nn"),
    ((*FILE, "chunk_bytes"), 1 << 40),
    ((*FILE, "crc32"), []),
    ((*FILE, "path"), "rank_00000-0123abcd.safetensors\0"),
    ((*FILE, "ranges", 0, "flat"), 99),
    ((*FILE, "ranges", 0, "stop"), 10**15),
    ((*FILE, "ranges", 0, "dtype"), "float64"),
    ((*FILE, "ranges", 0, "tensor"), "nope"),
    ((*FILE, "constants", 0, "dtype"), "Tensor"),
    ((*FILE, "constants", 0, "value"), "five"),
    ((*FILE, "own", "grads"), ABSENT),
    ((*FILE, "own", "grads", "1", "filled"), [True]),
    ((*FILE, "own", "random", "torch"), {"$tensor": "nope"}),
    ((*GROUP, "lr"), {"$float": "inf"}),
    ((*GROUP, "lr"), -1),
    ((*GROUP, "lr"), {"$tensor": "value/0/0"}),
    ((*GROUP, "betas"), {"$tuple": [0.5]}),
    ((*GROUP, "betas"), {"$tuple": [0.9, 1.0]}),
    ((*GROUP, "weight_decay"), {"$float": "inf"}),
    ((*GROUP, "bias_correction"), 2),
    ((*GROUP, "unknown"), {"$float": "nan"}),
]


def set_at(raw: Any, keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        raw = raw[key]
    if value is ABSENT:
        del raw[keys[-1]]
    else:
        raw[keys[-1]] = value


def without(raw: Any, keys: tuple[str, ...], flat: int | None = None, totals: bool = True) -> None:
    """Remove what a manifest says of these keys, of one flat or of all."""
    for record in raw["files"]:
        for what in ("ranges", "constants"):
            record[what] = [
                one
                for one in record[what]
                if one["key"] not in keys or flat not in (None, one["flat"])
            ]
    if not totals:
        del raw["totals"]


def cut_short(raw: Any) -> None:
    """The last element of the values is in no file, and the totals agree."""
    one = next(one for one in raw["files"][0]["ranges"] if one["key"] == "value")
    one["stop"] -= 1
    raw["totals"]["value"] -= 1


MOMENTS = ("state/exp_avg", "state/exp_avg_sq")
GONE: dict[str, Callable[[Any], None]] = {
    "all states": lambda raw: without(raw, (*MOMENTS, "state/step")),
    "all moments": lambda raw: without(raw, MOMENTS),
    "one moment": lambda raw: without(raw, MOMENTS[:1]),
    "one moment, before totals": lambda raw: without(raw, MOMENTS[:1], totals=False),
    "one moment of a buffer, before totals": lambda raw: without(raw, MOMENTS[1:], 0, False),
    "the steps, before totals": lambda raw: without(raw, ("state/step",), totals=False),
    "an element": cut_short,
}


def test_verify_and_load_refuse_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_of(HALF_A_STEP)
    engine.save_checkpoint(tmp_path, "tag")
    engine.global_steps += 5
    path = tmp_path / "tag" / MANIFEST
    whole, before = path.read_bytes(), digest(engine)
    changes: dict[str, Callable[[Any], None]] = dict(GONE)
    for keys, value in CONTRADICTIONS:
        changes[f"{keys}: {value}"] = lambda raw, keys=keys, value=value: set_at(raw, keys, value)
    for what, change in changes.items():
        rewrite(tmp_path / "tag", change)
        assert command.main(["verify", str(tmp_path)]) == 1, what
        assert "contradicts" in capsys.readouterr().err, what
        with pytest.raises(xds.UsageError, match=r"contradicts it"):
            engine.load_checkpoint(tmp_path)
        assert digest(engine) == before, what
        path.write_bytes(whole)


# -- random changes -----------------------------------------------------------------------------------------

TRIALS = 12  # of each base
ABOUT_THIS_ENGINE = (  # what a sound checkpoint may be refused for
    "does not fit this model",
    "this engine has",
    "cannot be loaded in this layout",
    "is refused here",
    "in the middle of an accumulation",
    "and this xds reads",
)
HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 7, 2**31, 2**64, -(10**30), 10**400),
    *(0.0, -0.5, 1.5, 1e300, 5e-324, float("nan"), float("inf")),
    *"x 5 value grad state/exp_avg state/ param buffer float64 bool Tensor nn".split(),
    *("", "\ud800", "\0", "../x", "/etc/passwd", "x" * 5000, "\x1b[31m", "__class__"),
    *([], {}, [[]], [True], [None], {"a": 1}, ["a", "b"], [0, 0], [2**62, 2**62], [10**12]),
    *({"$tensor": one} for one in ("nope", 5, [], "engine/0")),
    *({"$float": one} for one in ("x", "nan", "inf", [1])),
    *({"$tuple": 5}, {"$items": 5}, {"$items": [[[1], 2]]}, {"$items": [[{"$tensor": "x"}, 1]]}),
    *({"$counter": [["a", "b"]]}, {"$else": 1}, TOO_DEEP),
]


def change(draw: random.Random, root: Any) -> str:
    """Change one place of the JSON, deep ones more often; which it was."""
    at, path = root, ""
    while True:
        key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        inner, path = at[key], f"{path}[{key!r}]"
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.12:
            break
        at = inner
    kind = draw.random()
    if kind < 0.2:
        del at[key]
        return f"without {path}"
    if kind < 0.5 and isinstance(inner, int | float | str) and not isinstance(inner, bool):
        at[key] = draw.choice([inner + 1, -inner] if not isinstance(inner, str) else [inner[:-1]])
    else:
        at[key] = copy.deepcopy(draw.choice(HOSTILE))
    return f"{path} = {str(at[key])[:80]}"


class Damages:
    """Draws changes of the checkpoint in `folder`; `what` describes the last one."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.what = ""
        self.whole = {path: path.read_bytes() for path in folder.iterdir()}
        self._manifest = folder / MANIFEST
        self._draw = random.Random(seed)

    def next(self) -> dict[Path, bytes]:
        """What to write to which files: a manifest, or a file as well."""
        raw = json.loads(self.whole[self._manifest])
        if self._draw.random() < 0.7:
            self.what = change(self._draw, raw)
            return {self._manifest: manifest_text(raw)}
        record = self._draw.choice(raw["files"])
        path = self._manifest.with_name(record["path"])
        content = self.whole[path]
        length = struct.unpack("<Q", content[:8])[0]
        table = json.loads(content[8 : 8 + length])
        if self._draw.random() < 0.5:  # random generators and counters lie in such tensors
            name = self._draw.choice(
                [name for name in table if name.startswith(("own/", "engine/"))]
            )
            start, stop = (8 + length + offset for offset in table[name]["data_offsets"])
            self.what = f"bytes of {name}"
            content = content[:start] + b"\xff" * (stop - start) + content[stop:]
        else:
            self.what = f"header {change(self._draw, table)}"
            text = json.dumps(table).encode().ljust(length)  # the data stay where they were, mostly
            content = struct.pack("<Q", len(text)) + text + content[8 + length :]
        set_content(record, content)
        return {path: content, self._manifest: manifest_text(raw)}


def set_content(record: dict[str, Any], content: bytes) -> None:
    """What a manifest says of a file."""
    size = record["chunk_bytes"]
    record["size_bytes"] = len(content)
    record["crc32"] = [zlib.crc32(content[at : at + size]) for at in range(0, len(content), size)]


def try_often(folder: Path) -> Counter[str]:
    """What came of all changes. A refusal changes nothing; what verify accepts loads, or does not fit."""
    logging.getLogger("xds").setLevel(logging.CRITICAL)
    outcomes: Counter[str] = Counter()
    for seed, base in enumerate((HALF_A_STEP, "fp32, stage 1, in slices")):
        here, engine = folder / str(seed), engine_of(base)
        note = {"note": (1, 2.5, None), "inf": float("inf"), 5: [torch.arange(3)]}
        engine.save_checkpoint(here, "tag", client_state=note)
        dist.barrier()
        damages = Damages(here / "tag", seed)
        for _ in range(TRIALS):
            outcomes[trial(engine, here, damages)] += 1
    return outcomes


def trial(engine: Any, folder: Path, damages: Damages) -> str:
    files, groups = damages.next(), engine._parts.optimizer.param_groups
    engine.global_steps += 5  # a load would show
    before, keys, said, outcome = digest(engine), [set(group) for group in groups], "", "loaded"
    write(files)
    is_sound, _ = (
        command.main([name, str(folder), "--tag", "tag"]) == 0 for name in ("verify", "info")
    )
    try:
        engine.load_checkpoint(folder, "tag")
    except UsageError as error:
        said = str(error)
        outcome = "refused" if isinstance(error, DamagedError) else "does not fit"
        assert digest(engine) == before, f"{damages.what}: something has changed: {said}"
    assert outcome != "refused" or not is_sound, f"{damages.what}: verify passes it: {said}"
    if outcome == "does not fit":
        assert any(words in said for words in ABOUT_THIS_ENGINE), f"{damages.what}: {said}"
    assert "half-way" not in said and len(said) <= 2000, damages.what
    assert not any(ord(letter) < 32 for letter in said), damages.what
    write({path: damages.whole[path] for path in files})
    if outcome == "loaded":
        for group, known in zip(groups, keys, strict=True):
            for added in set(group) - known:  # an unknown hyperparameter is kept
                del group[added]
        engine.load_checkpoint(folder, "tag")
    return outcome


def write(files: dict[Path, bytes]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path, content in files.items():
            path.write_bytes(content)
    dist.barrier()


def test_what_contradicts_itself_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    for outcomes in run_ranks(try_often, 2, tmp_path):
        assert outcomes["refused"] and outcomes["loaded"]


# -- schedules and rates -----------------------------------------------------------------------------------


class Stubborn(torch.optim.lr_scheduler.LambdaLR):
    """Refuses its state on one rank."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.last_epoch == 1 and dist.get_rank() == 1:
            raise KeyError("no")


def refuse_on_one_rank(folder: str) -> None:
    """A load within a step, which goes on as if nothing had been loaded."""
    ends, fp16 = [], {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    for is_tried in (False, True):
        engine = plain_engine(
            2,
            model=nn.Linear(4, 4),
            accumulation=2,
            fp16=fp16,
            lr_scheduler=lambda optimizer: Stubborn(optimizer, lambda step: 1 / (1 + step)),
        )
        for number in range(5):
            x = torch.full((1, 4), 1.0 + number, dtype=torch.float16)
            engine.backward(engine(x).float().sum(), weight=1.0 + number)
            engine.step()
            if number in (1, 3):
                engine.save_checkpoint(folder, metric=float(number))
        if is_tried:
            refuse_to_load(engine, folder)
        engine.backward(engine(torch.ones_like(x)).float().sum(), weight=1.0)
        engine.step()
        seen = (engine.get_global_grad_norm(), engine.mean_loss(), engine.micro_steps)
        ends.append((*seen, engine.loss_scale, engine.saves_since_best))
    assert ends[0] == ends[1]
    engine.load_checkpoint(folder, "global_step1", load_lr_scheduler_states=False)
    assert engine.global_steps == 1


def refuse_to_load(engine: Any, folder: str) -> None:
    weight = engine.full_state_dict(rank0_only=False)["weight"].clone()
    before = (engine.get_lr(), engine._parts.scheduler.state_dict(), engine.global_steps)
    with pytest.raises(
        xds.UsageError, match="rank 1.* lr_scheduler is refused here; nothing was changed"
    ):
        engine.load_checkpoint(folder, "global_step1")
    assert (engine.get_lr(), engine._parts.scheduler.state_dict(), engine.global_steps) == before
    assert torch.equal(engine.full_state_dict(rank0_only=False)["weight"], weight)


def test_a_scheduler_that_refuses_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    run_ranks(refuse_on_one_rank, 2, str(tmp_path))


def small_engine(**more: Any) -> Any:
    """It has taken a step."""
    engine = plain_engine(0, model=nn.Linear(4, 4), **more)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return engine


def test_every_optimizer_of_the_config_keeps_to_the_rules() -> None:
    for kind in (*OPTIMIZERS.built_in, *OPTIMIZERS.from_torch):
        section = {"type": kind, "params": {"lr": 1e-3}}
        engine = small_engine(optimizer=section, zero_allow_untested_optimizer=True)
        check_groups(kind_of(engine.optimizer), engine.optimizer.param_groups)
        engine.destroy()
    check_groups("Their", [{"lr": None, "eps": (None, 1e-3), "clip": float("inf")}])


def test_weights_beside_a_wrong_rate_can_be_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small_engine()
    weight = engine.module.weight.detach().clone()
    engine.optimizer.param_groups[0]["lr"] = float("nan")
    with caplog.at_level(logging.WARNING, "xds"):
        engine.save_checkpoint(tmp_path)
    assert "lr is nan; it must be a number" in caplog.text
    other = small_engine()
    with torch.no_grad():
        other.module.weight.zero_()
    with pytest.raises(
        xds.UsageError, match=r"lr is nan; it must be .*load_optimizer_states=False"
    ):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert torch.equal(other.module.weight, weight) and other.get_lr() == [1e-2]
    assert torch.equal(xds.get_fp32_state_dict(tmp_path)["weight"], weight)


STEP_LR: list[tuple[str, Any, str]] = [
    ("gamma", {"$float": "nan"}, "gamma is nan; it must be finite"),
    ("gamma", None, "'gamma' = None"),
    ("base_lrs", [-1.0], r"base_lrs\[0\] is -1.0"),
    ("base_lrs", [1.0, 2.0], "'base_lrs' = "),
    ("last_epoch", -7, "last_epoch is -7"),
    ("step", 5, "'step' = 5"),
]


def test_a_schedule_of_torch_gets_no_attributes_but_its_own(tmp_path: Path) -> None:
    engine = small_engine(
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)
    )
    for key, value, says in STEP_LR:
        engine.save_checkpoint(tmp_path, "tag")
        keys = ("state", "lr_scheduler", "state", key)
        rewrite(tmp_path / "tag", lambda raw, keys=keys, value=value: set_at(raw, keys, value))
        with pytest.raises(xds.UsageError, match=says):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()


# -- optimizer states of one element ------------------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """SGD that counts, in tensors of several shapes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", torch.zeros(1)) + 1
                state["square"] = state.get("square", torch.zeros(1, 1, dtype=torch.float64)) + 2
                state["scalar"] = state.get("scalar", torch.zeros(())) + 3
                state["nan"] = torch.full((1,), torch.nan)
                with torch.no_grad():
                    param.sub_(param.grad * group["lr"] / state["step"])


def counting_engine(stage: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1), nn.Linear(1, 4))  # some of one element
    return plain_engine(stage, model=model, optimizer=Counting, zero_allow_untested_optimizer=True)


def count(engine: Any, steps: int) -> Tensor:
    for step in range(steps):
        engine.backward(engine(torch.full((1, 4), 1.0 + step)).square().sum())
        engine.step()
    return torch.cat([one.reshape(-1) for one in engine.full_state_dict(rank0_only=False).values()])


def states_of_one_element(folder: str) -> None:
    for stage, others in ((1, (0, 3)), (3, (3, 2)), (0, (1,))):
        engine = counting_engine(stage)
        count(engine, 2)
        engine.save_checkpoint(f"{folder}/{stage}")
        wanted = count(engine, 2)
        for other in others:
            again = counting_engine(other)
            again.load_checkpoint(f"{folder}/{stage}")
            for state in again._parts.optimizer.state.values():
                assert {key: (tuple(one.shape), one.dtype) for key, one in state.items()} == {
                    "step": ((1,), torch.float32),
                    "square": ((1, 1), torch.float64),
                    "scalar": ((), torch.float32),
                    "nan": ((1,), torch.float32),
                }
                assert [float(state[key]) for key in ("step", "square", "scalar")] == [2, 4, 6]
            assert torch.equal(count(again, 2), wanted), (stage, other)


def test_states_of_one_element_load_at_every_stage(tmp_path: Path) -> None:
    run_ranks(states_of_one_element, 2, str(tmp_path))
    assert command.main(["verify", str(tmp_path / "1")]) == 0


# -- files that are no files, and names that are there twice -------------------------------------------------

SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "a pipe that received no data"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "a huge file": (lambda path: _sparse(path), "is it the right file"),
}


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(64 << 30)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("saved")
    engine = small_engine()
    engine.save_checkpoint(folder, "tag")
    return engine, folder


@pytest.mark.parametrize(
    ("name", "kind"), [("latest", "a pipe"), *(("tag/manifest.json", kind) for kind in SPECIAL)]
)
def test_what_is_no_file_is_refused_in_one_sentence(
    saved: tuple[Any, Path],
    kind: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(small_files, "PIPE_SECONDS", 0.1)
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    make, says = SPECIAL[kind]
    (folder / name).unlink()
    make(folder / name)
    says = f"{folder / name} cannot be read: .*{says}"
    for read in (xds.get_fp32_state_dict, engine.load_checkpoint):
        with pytest.raises(xds.UsageError, match=says):
            read(folder)
    assert command.main(["verify", str(folder)]) == 1
    assert says[:40] in capsys.readouterr().err
    shutil.copytree(good / "tag", folder / "older")
    assert engine.load_checkpoint(folder, fallback=True)[0] is not None


def test_a_pipe_for_a_file_of_tensors_is_not_waited_for(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    data = next((folder / "tag").glob("rank_*"))
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(xds.UsageError, match="has 0 bytes and should have"):
        engine.load_checkpoint(folder)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # an absolute one may be too long


@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path.name), _socket])
def test_a_file_of_tensors_that_cannot_be_opened_is_damage_and_the_older_one_loads(
    saved: tuple[Any, Path],
    make: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    shutil.copytree(good / "tag", folder / "older")
    data = next((folder / "tag").glob("rank_*"))
    data.unlink()
    monkeypatch.chdir(data.parent)
    make(data)
    for read in (xds.get_fp32_state_dict, engine.load_checkpoint):
        with pytest.raises(DamagedError, match=f"{data.name} cannot be opened"):
            read(folder)
    assert engine.load_checkpoint(folder, fallback=True)[0] == str(folder / "older")


# -- a name twice -------------------------------------------------------------------------------------------


def test_json_has_one_meaning() -> None:
    assert parse_json('{"a": [1, {"a": null}], "b": 1e3}') == {"a": [1, {"a": None}], "b": 1e3}
    for text, says in {
        '{"a": 1, "b": {"c": 1, "c": 1}}': "has the key 'c' twice in one object",
        '{"a": NaN}': "has the number NaN",
        "[" * 100_000: "is nested too deeply",
        "{": "is not JSON",
        "9" * 5000: "is not JSON",
    }.items():
        with pytest.raises(ValueError, match=f"^{says}"):
            parse_json(text)
    with pytest.raises(ValueError, match="^is not JSON"):
        parse_json(b'"\xff"')


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(OSError) as error:
        read_small_text(tmp_path / "file")
    assert "byte 2 is not UTF-8" in error.value.strerror
    (tmp_path / "file").write_text("\ufeffab", encoding="utf-8")
    assert read_small_text(tmp_path / "file") == "ab"
    with pytest.raises(OSError):
        read_small_text(f"{tmp_path}/a\0b")


def test_a_key_twice_and_bytes_of_another_tensor_are_refused(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    path = folder / "tag" / MANIFEST

    def refused(says: str) -> None:
        assert command.main(["verify", str(folder)]) == 1
        with pytest.raises(xds.UsageError, match=says):
            engine.load_checkpoint(folder)

    whole = json.loads(path.read_text())
    raw = copy.deepcopy(whole)
    raw["state"]["counters"]["TWICE"] = 9
    del raw["sha256"]
    path.write_bytes(with_sum(json.dumps(raw)[1:].replace("TWICE", "global_steps")))
    refused("has the key 'global_steps' twice")

    record = whole["files"][0]
    file = folder / "tag" / record["path"]
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    table = json.loads(content[8 : 8 + length])
    value, state = (
        next(name for name in table if name.startswith(start))
        for start in ("value/", "state/exp_avg/")
    )
    for name, says in (("TWICE", f"has the key '{value}' twice"), (value, "bytes in common")):
        header = json.dumps({**table, name: table[state]}).replace("TWICE", value).encode()
        header += b" " * (-len(header) % 64)
        changed = struct.pack("<Q", len(header)) + header + content[8 + length :]
        file.write_bytes(changed)
        set_content(record, changed)
        path.write_bytes(manifest_text(whole))
        refused(says)
