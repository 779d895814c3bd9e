"""Tests of whole scripts with PipelineModule in DeepSpeed's style: their losses equal plain PyTorch's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script_runs import run_script
from test_stock_scripts import SCRIPTS, load
from test_stock_scripts import launch as start
from torch.utils.data import DataLoader, DistributedSampler
from warm_ranks import warm

CLASSIFIER = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "pipeline": {"stages": "auto", "partition": "best", "pipe_partitioned": True},
}


def run(name: str, num_ranks: int, *options: str, folder: Path) -> dict[str, Any]:
    """What the script has written to the file of --output, in ranks that run already."""
    warm(num_ranks).run(
        run_script, str(SCRIPTS / name), str(folder), *options, "--output", "out.json"
    )
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def launch(name: str, num_ranks: int, *options: str, folder: Path) -> dict[str, Any]:
    """The same with the command `xds`, as in test_stock_scripts.py."""
    assert num_ranks == 2
    start(folder, str(SCRIPTS / name), *options, "--output", "out.json")
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def batches(data: Any, rank: int, num_ranks: int, size: int) -> Iterator[Any]:
    """What the engine's loader serves data rank `rank`: a pipeline's data is in its own order."""
    sampler: Any = DistributedSampler(data, num_replicas=num_ranks, rank=rank, shuffle=False)
    return iter(DataLoader(data, size, sampler=sampler))


def step(model: torch.nn.Module, optimizer: Any, losses: list[Any], limit: float) -> Any:
    """One update by the mean of `losses`; (loss, norm)."""
    loss = sum(losses) / len(losses)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def plain_classifier() -> tuple[list[float], float]:
    script = load("pipeline_classifier.py")
    torch.manual_seed(1138)
    net, data = script.AlexNet(), script.make_data()
    criterion = torch.nn.functional.cross_entropy
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses = []
    first = list(batches(data, 0, 1, 4))
    steps = [first[4 * number : 4 * number + 4] for number in range(4)]
    steps.append(list(DataLoader(data, 8))[:4])
    for pairs in steps:
        each = [criterion(net(images), labels) for images, labels in pairs]
        losses.append(step(net, optimizer, each, 0.5)[0])
    images, labels = next(iter(DataLoader(data, 8)))
    return losses, criterion(net(images), labels).item()


def plain_language_model() -> tuple[list[float], list[float]]:
    script = load("pipeline_language_model.py")
    layers = []
    for index, make in enumerate([script.Embedding, *[script.Block] * script.LAYERS]):
        torch.manual_seed(1234 + index)
        layers.append(make())
    layers.append(torch.nn.LayerNorm(script.WIDTH))
    model, data = torch.nn.Sequential(*layers), script.make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    served = [batches(data, rank, 2, 2) for rank in range(2)]
    losses, norms = [], []
    for _ in range(4):
        pairs = [next(each) for each in served for _ in range(4)]
        each = [script.loss_fn(script.logits(layers[0], model(x)), labels) for x, labels in pairs]
        loss, norm = step(model, optimizer, each, 1.0)
        losses.append(loss)
        norms.append(norm)
    return losses, norms


@pytest.mark.parametrize("name", ["pipeline_classifier.py", "pipeline_language_model.py"])
def test_a_script_differs_from_its_original_by_its_imports_alone(name: str) -> None:
    lines = [line for line in (SCRIPTS / name).read_text().splitlines() if "xds" in line]
    assert lines[0] == "import xds.deepspeed as deepspeed"
    assert all(line.startswith("from xds.deepspeed.") for line in lines[1:])


@pytest.mark.contract
@pytest.mark.parametrize("train", [run, pytest.param(launch, marks=pytest.mark.slow)])
def test_an_alexnet_in_stages_trains_as_plain_pytorch(train: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CLASSIFIER))
    options = ["--deepspeed", "--deepspeed_config", "ds.json"]
    found = train("pipeline_classifier.py", 2, *options, folder=tmp_path)
    losses, evaluated = plain_classifier()
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["eval"] == pytest.approx(evaluated, rel=1e-5)
    assert found["stages"] == 2


@pytest.mark.slow
def test_a_tied_gpt_with_a_topology_trains_as_plain_pytorch(tmp_path: Path) -> None:
    options = ["--stage", "1"]
    found = run("pipeline_language_model.py", 4, *options, folder=tmp_path)
    losses, norms = plain_language_model()
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["norms"] == pytest.approx(norms, rel=1e-5)
    assert found["micro_batches"] == 4
