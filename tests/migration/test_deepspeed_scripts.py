"""Tests of whole scripts in DeepSpeed's style, run by `xds` on two ranks: their losses equal plain PyTorch's.

The scripts were also run with DeepSpeed 0.19.8 itself; docs/design/migration.md has the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

SCRIPTS = Path(__file__).parent / "scripts"
ENV = {
    **{key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
    "OMP_NUM_THREADS": "1",
}
CLASSIFIER = {
    "train_batch_size": 8,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4},
    },
}


def run(name: str, *options: str, folder: Path) -> str:
    launch = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(SCRIPTS / name), *options],
        cwd=folder,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(name: str) -> ModuleType:
    """The script as a module, for its model and its data."""
    module = ModuleType(name)
    exec(compile((SCRIPTS / name).read_text(), name, "exec"), module.__dict__)
    return module


def batches(data: Any, rank: int, size: int) -> Iterator[Any]:
    """What DeepSpeed's loader serves rank `rank` of 2 in the first epoch."""
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank)
    return iter(DataLoader(data, size, sampler=sampler))


def rising(lr: float, steps: int) -> list[float]:
    """DeepSpeed's WarmupLR over 4 steps, as it applies to each step: the first two run at the minimum."""
    shares = torch.log(torch.arange(1.0, 5.0, dtype=torch.float64)) / torch.log(
        torch.tensor(4.0, dtype=torch.float64)
    )
    return [0.0, *(lr * shares).tolist(), *[lr] * steps][:steps]


def plain_classifier() -> list[list[float]]:
    """Losses by rank: both ranks' batches in one process."""
    script = load("classifier.py")
    data = script.make_data()
    torch.manual_seed(7)
    net = script.Net()
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=0.0, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7
    )
    losses: list[list[float]] = [[], []]
    pairs = zip(batches(data, 0, 4), batches(data, 1, 4), rising(1e-3, 8), strict=True)
    for *both, lr in pairs:
        optimizer.param_groups[0]["lr"] = lr
        for rank, (images, labels) in enumerate(both):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            losses[rank].append(loss.item())
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain_language_model() -> dict[str, Any]:
    script = load("language_model.py")
    data = script.make_data()
    torch.manual_seed(11)
    model = script.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    losses, norms = [], []
    pairs = zip(batches(data, 0, 4), batches(data, 1, 4), strict=True)
    for number, both in enumerate(pairs, start=1):
        each = [model(ids, targets) for ids, targets in both]
        losses.append(sum(loss.item() for loss in each) / 2)
        (sum(each) / 4).backward()
        if number % 2 == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    weight = model.tokens.weight.sum().item()
    return {"losses": losses, "norms": norms, "lr": schedule.get_last_lr()[0], "weight": weight}


@pytest.mark.parametrize("name", ["classifier.py", "language_model.py"])
def test_a_script_differs_from_its_original_by_the_import_alone(name: str) -> None:
    lines = [line for line in (SCRIPTS / name).read_text().splitlines() if "xds" in line]
    assert lines == ["import xds.deepspeed as deepspeed"]


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_classifier_from_a_config_file_trains_as_plain_pytorch(
    stage: int, tmp_path: Path
) -> None:
    config = {**CLASSIFIER, "steps_per_print": 4, "zero_optimization": {"stage": stage}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    options = ["--deepspeed", "--deepspeed_config", "ds.json", "--output", "out"]
    printed = run("classifier.py", *options, folder=tmp_path)
    assert "step 4, " in printed  # progress shows without setting up logging
    for rank, losses in enumerate(plain_classifier()):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("stage", [3])
@pytest.mark.slow
def test_a_language_model_with_its_own_optimizer_trains_as_plain_pytorch(
    stage: int, tmp_path: Path
) -> None:
    options = ["--stage", str(stage), "--save", "checkpoints", "--output", "out.json"]
    printed = run("language_model.py", *options, folder=tmp_path)
    assert "[Rank 0] trained 4 steps" in printed
    found, plain = json.loads((tmp_path / "out.json").read_text()), plain_language_model()
    assert found["steps"] == 4
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert found["norms"][1:] == pytest.approx(plain["norms"][:3], rel=1e-5)
    assert found["lr"] == pytest.approx(plain["lr"])
    assert [found["weight"], found["gathered"]] == pytest.approx([plain["weight"]] * 2, rel=1e-5)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step4"
