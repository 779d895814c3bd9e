"""What a load refuses, it refuses before anything has changed, on every rank; and odd optimizer states load."""

from __future__ import annotations

import json
from functools import partial
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
from xds.launcher import checkpoint as command

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


GROUP = ["state", "optimizer", "groups", 0]


def test_a_hyperparameter_of_another_kind_is_refused(tmp_path: Path) -> None:
    engine = engine_of("fp32, stage 0")
    engine.save_checkpoint(tmp_path, "tag")
    before = digest(engine)
    for key, value in (("lr", "fast"), ("betas", 5), ("betas", {"$tuple": [0.5]}), ("eps", [1])):
        rewrite(tmp_path / "tag", partial(set_at, keys=[*GROUP, key], value=value))
        with pytest.raises(
            xds.UsageError, match=f"has '{key}' = .* in parameter group 0, and this engine"
        ):
            engine.load_checkpoint(tmp_path)
        assert digest(engine) == before
        engine.save_checkpoint(tmp_path, "tag")


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
