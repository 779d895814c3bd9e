"""What a load refuses, it refuses before anything has changed, on every rank; and odd optimizer states load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from manifest_damages import manifest_text
from manifest_trials import digest, engine_of
from torch import Tensor, nn

import xds
from xds.engine.checkpoint.hyperparameters import check_groups
from xds.engine.config.optimizer import OPTIMIZERS
from xds.launcher import checkpoint as command
from xds.ops.optim.shard_optimizer import kind_of

BASE = "fp16, stage 2, half a step"


def rewrite(folder: Path, change: Any) -> None:
    """Change the manifest, and make its sum right."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_bytes(manifest_text(raw))


def set_at(raw: Any, keys: list[Any], value: Any) -> None:
    for key in keys[:-1]:
        raw = raw[key]
    if value is KeyError:
        del raw[keys[-1]]
    else:
        raw[keys[-1]] = value


CONTRADICTIONS: list[tuple[list[Any], Any]] = [
    (["state", "loss_scale"], KeyError),
    (["state", "loss_scale", "left"], KeyError),
    (["state", "counters", "micro_steps"], KeyError),
    (["state", "counters", "accumulation_steps"], 0),
    (["state", "client_state"], KeyError),
    (["state", "optimizer", "groups"], 5),
    (["state", "optimizer", "groups", 0, "params"], []),
    (["state", "data"], {"epoch": -1, "samples": 0}),
    (["stage"], 4),
    (["world_size"], 2),
    (["saved_seconds"], 1e300),
    (["flats", 0, "numel"], 10**12),
    (["flats", 0, "slots", 0, "shape"], [True, 6]),
    (["flats", 0, "slots", 0, "shape"], [10**9, 10**9, 10**9]),
    (["flats", 0, "slots", 0, "name"], 5),
    (["flats", 0, "kind"], "params"),
    (["flats", 0, "dtype"], "nn"),
    (["files", 0, "chunk_bytes"], 1 << 40),
    (["files", 0, "chunk_bytes"], 0),
    (["files", 0, "crc32"], []),
    (["files", 0, "path"], "rank_00000-0123abcd.safetensors\0"),
    (["files", 0, "ranges", 0, "flat"], 99),
    (["files", 0, "ranges", 0, "file"], 1),
    (["files", 0, "ranges", 0, "stop"], 10**15),
    (["files", 0, "ranges", 0, "dtype"], "float64"),
    (["files", 0, "ranges", 0, "tensor"], "nope"),
    (["files", 0, "constants", 0, "dtype"], "Tensor"),
    (["files", 0, "constants", 0, "value"], "five"),
    (["files", 0, "own", "grads"], KeyError),
    (["files", 0, "own", "grads", "1", "filled"], [True]),
    (["files", 0, "own", "random", "python"], 5),
    (["files", 0, "own", "random", "torch"], {"$tensor": "nope"}),
    (["files", 0, "constants", 0, "value"], {"$float": "nan"}),
    (["state", "loss_scale", "value"], 1e300),
    (["state", "lr_scheduler", "state", "last_batch_iteration"], -5),
    (["state", "optimizer"], None),
    *(
        (["state", "optimizer", "groups", 0, key], value)
        for key, value in (
            *(("lr", {"$float": "nan"}), ("lr", {"$float": "inf"}), ("lr", -1), ("lr", 1e30)),
            *(("lr", None), ("lr", KeyError), ("lr", "fast"), ("lr", {"$tensor": "value/0/0"})),
            *(("betas", {}), ("betas", None), ("betas", 5), ("betas", {"$tuple": [0.5]})),
            *(("betas", {"$tuple": [0.9, 1.0]}), ("betas", {"$tensor": "value/0/0"})),
            *(("eps", None), ("eps", [1]), ("weight_decay", {"$float": "inf"})),
            *(("bias_correction", 2), ("unknown", {"$float": "nan"})),
        )
    ),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("saved")
    engine = engine_of(BASE)
    engine.save_checkpoint(folder, "tag")
    engine.global_steps += 5
    return engine, folder


@pytest.mark.parametrize(
    ("keys", "value"),
    CONTRADICTIONS,
    ids=lambda one: ascii(one)[:60] if isinstance(one, list) else "",
)
def test_verify_and_load_refuse_the_same(
    saved: tuple[Any, Path], keys: list[Any], value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, folder = saved
    path = folder / "tag" / "manifest.json"
    whole, before = path.read_bytes(), digest(engine)
    try:
        rewrite(folder / "tag", lambda raw: set_at(raw, keys, value))
        assert command.main(["verify", str(folder)]) == 1
        said = capsys.readouterr().err
        assert "contradicts" in said
        with pytest.raises(xds.UsageError, match=r"contradicts it"):
            engine.load_checkpoint(folder)
        assert digest(engine) == before
    finally:
        path.write_bytes(whole)


class Stubborn(torch.optim.lr_scheduler.LambdaLR):
    """Refuses its state on one rank."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.last_epoch == 1 and dist.get_rank() == 1:
            raise KeyError("no")


def refuse_on_one_rank(folder: str) -> None:
    torch.manual_seed(0)
    engine = xds.initialize(
        nn.Linear(4, 4),
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
        },
        lr_scheduler=lambda optimizer: Stubborn(optimizer, lambda step: 1 / (1 + step)),
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine.save_checkpoint(folder)
    weight = engine.full_state_dict(rank0_only=False)["weight"].clone()
    before = (engine.get_lr(), engine._parts.scheduler.state_dict(), engine.global_steps)
    with pytest.raises(
        xds.UsageError, match="rank 1.* lr_scheduler is refused here; nothing was changed"
    ):
        engine.load_checkpoint(folder, "global_step1")
    assert (engine.get_lr(), engine._parts.scheduler.state_dict(), engine.global_steps) == before
    assert torch.equal(engine.full_state_dict(rank0_only=False)["weight"], weight)
    engine.load_checkpoint(folder, "global_step1", load_lr_scheduler_states=False)
    assert engine.global_steps == 1


def test_a_scheduler_that_refuses_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    run_ranks(refuse_on_one_rank, 2, str(tmp_path))


# -- optimizer states that are gone --------------------------------------------------------------------------


def without(raw: Any, *keys: str, flat: int | None = None, totals: bool = True) -> None:
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


MOMENTS = ("state/exp_avg", "state/exp_avg_sq")
GONE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all states": ((*MOMENTS, "state/step"), {}),
    "all moments": (MOMENTS, {}),
    "one moment": (MOMENTS[:1], {}),
    "one moment, before totals": (MOMENTS[:1], {"totals": False}),
    "one moment of a buffer, before totals": (MOMENTS[1:], {"flat": 0, "totals": False}),
    "the steps, before totals": (("state/step",), {"totals": False}),
}


@pytest.mark.parametrize("what", GONE)
def test_optimizer_states_that_are_gone_are_refused_by_verify_and_load(
    saved: tuple[Any, Path], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, folder = saved
    path = folder / "tag" / "manifest.json"
    whole, before = path.read_bytes(), digest(engine)
    keys, more = GONE[what]
    try:
        rewrite(folder / "tag", lambda raw: without(raw, *keys, **more))
        assert command.main(["verify", str(folder)]) == 1
        assert "contradicts itself" in capsys.readouterr().err
        with pytest.raises(xds.UsageError, match=r"contradicts itself: .*state/"):
            engine.load_checkpoint(folder)
        assert digest(engine) == before
    finally:
        path.write_bytes(whole)


# -- rates ---------------------------------------------------------------------------------------------------


def small_engine(schedule: Any = None) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = xds.initialize(nn.Linear(4, 4), config, lr_scheduler=schedule)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return engine


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
    assert torch.equal(other.module.weight, weight) and other.get_lr() == [1e-3]
    assert torch.equal(xds.get_fp32_state_dict(tmp_path)["weight"], weight)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gamma", {"$float": "nan"}, "gamma is nan; it must be finite"),
        ("gamma", None, "'gamma' = None"),
        ("base_lrs", [-1.0], r"base_lrs\[0\] is -1.0"),
        ("base_lrs", [1.0, 2.0], "'base_lrs' = "),
        ("last_epoch", -7, "last_epoch is -7"),
        ("step", 5, "'step' = 5"),
        ("optimizer", 5, "'optimizer' = 5"),
    ],
)
def test_a_schedule_of_torch_gets_no_attributes_but_its_own(
    key: str, value: Any, says: str, tmp_path: Path
) -> None:
    engine = small_engine(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    engine.save_checkpoint(tmp_path, "tag")
    rewrite(
        tmp_path / "tag",
        lambda raw: set_at(raw, ["state", "lr_scheduler", "state", key], value),
    )
    with pytest.raises(xds.UsageError, match=says):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


def test_every_optimizer_of_the_config_keeps_to_the_rules() -> None:
    for kind in (*OPTIMIZERS.built_in, *OPTIMIZERS.from_torch):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": kind, "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True,
        }
        engine = xds.initialize(nn.Linear(4, 4), config)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        check_groups(kind_of(engine.optimizer), engine.optimizer.param_groups)
        engine.destroy()
    check_groups("Their", [{"lr": None, "eps": (None, 1e-3), "clip": float("inf")}])


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1), nn.Linear(1, 4))  # some of one element
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "unit_min_numel": 0},
    }
    return xds.initialize(model, config, optimizer=Counting)


def count(engine: Any, steps: int) -> Tensor:
    for step in range(steps):
        engine.backward(engine(torch.full((1, 4), 1.0 + step)).square().sum())
        engine.step()
    return torch.cat([one.reshape(-1) for one in engine.full_state_dict(rank0_only=False).values()])


def states_of_one_element(folder: str) -> None:
    for stage in range(4):
        engine = counting_engine(stage)
        count(engine, 2)
        engine.save_checkpoint(f"{folder}/{stage}")
        wanted = count(engine, 2)
        for other in range(4):
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
