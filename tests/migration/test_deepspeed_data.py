"""DeepSpeed's data efficiency as scripts use it: post-processing, batches by tokens, the analyzer, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import xds.deepspeed as deepspeed
from xds.deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import (
    DataAnalyzer,
    DistributedDataAnalyzer,
)
from xds.deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
)
from xds.deepspeed.runtime.data_pipeline.data_sampling.utils import find_fit_int_dtype
from xds.deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as variable_batches,
)
from xds.engine.data.analyzer import Metric, analyze
from xds.utils.errors import UsageError

NUMBER = 60


class Padded(Dataset[Any]):
    """Sample i has i % 9 + 1 tokens, and 10 in all."""

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = torch.tensor(int(index) % 9 + 1)
        return {"x": (torch.arange(10) < length) * (index + 1.0), "length": length}


class Short(Dataset[Any]):
    """The same without padding."""

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((int(index) % 9 + 1,), index + 1.0)


def lengths_in(batch: dict[str, Tensor]) -> Tensor:
    return batch["length"]


def total(batch: dict[str, Tensor]) -> Tensor:
    return (batch["x"] > 0).sum(0)


def test_the_analyzer_writes_what_analyze_writes(tmp_path: Path) -> None:
    names = {
        "metric_names": ["seqlen", "places"],
        "metric_functions": [lengths_in, total],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
    }
    DataAnalyzer(Padded(), batch_size=7, save_path=tmp_path / "a", **names).run_map_reduce()  # type: ignore[arg-type]
    one = DistributedDataAnalyzer(Padded(), batch_size=7, save_path=tmp_path / "b", **names)  # type: ignore[arg-type]
    one.run_map_reduce()
    collate = torch.utils.data.default_collate
    every = [Padded()[at] for at in range(NUMBER)]
    metrics = [Metric("seqlen", lengths_in), Metric("places", total, is_sum=True)]
    analyze(every, metrics, tmp_path / "c", collate_fn=collate)
    files = sorted(path.relative_to(tmp_path / "c") for path in (tmp_path / "c").rglob("*.*"))
    assert len(files) == 10
    for path in files:
        assert len({(tmp_path / folder / path).read_bytes() for folder in "abc"}) == 1
    for changes, says in (
        ({"metric_types": ["sum", "sum"]}, "'sum': must be single_value_per_sample or"),
        ({"metric_types": []}, "2 metric_names, 2 metric_functions and 0 metric_types"),
        ({"custom_reduce": len}, "leave it out, and compute the metric in metric_functions"),
    ):
        with pytest.raises(UsageError, match=says):
            DataAnalyzer(Padded(), **{**names, **changes})  # type: ignore[arg-type]


def test_indexed_files_by_deepspeeds_names(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 5)):
        builder = MMapIndexedDatasetBuilder(f"{tmp_path}/{name}.bin", find_fit_int_dtype(0, 300))
        builder.add_item(torch.arange(first, first + 3))
        builder.end_document()
        builder.add_item_numpy(np.array([7, 260]))
        builder.add_items([np.array([1])])
        builder.end_document()
        if name == "b":
            builder.merge_file_(f"{tmp_path}/a")
        builder.finalize(f"{tmp_path}/{name}.idx")
    rows = MMapIndexedDataset(f"{tmp_path}/b", skip_warmup=True)
    assert [row.tolist() for row in rows[0:6]] == [
        [5, 6, 7],
        [7, 260],
        [1],
        [0, 1, 2],
        [7, 260],
        [1],
    ]
    assert rows.get(0, 1).tolist() == [6, 7] and rows.get(0, 0, 2).tolist() == [5, 6]
    assert rows.sizes.tolist() == [3, 2, 1] * 2 and rows.size(1) == 2 and rows.dtype is np.uint16
    assert rows.doc_idx.tolist() == [0, 1, 3, 4, 6]
    assert MMapIndexedDataset.exists(f"{tmp_path}/b") and not MMapIndexedDataset.exists("/no")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x[..., None] / NUMBER) - 1).square().mean()


def curriculum(folder: Path) -> dict[str, Any]:
    rises = {"total_curriculum_step": 4, "difficulty_step": 1}
    length = {
        "index_to_sample_path": str(folder / "seqlen/seqlen_index_to_sample"),
        "index_to_metric_path": str(folder / "seqlen/seqlen_index_to_metric"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        **{"min_difficulty": 2, "max_difficulty": 9},
        "schedule_type": "custom",
    }
    cut = {
        "clustering_type": "single_cluster",
        **{"min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_linear"},
        "schedule_config": rises,
    }
    learning = {"enabled": True, "data_cluster_path": str(folder / "clusters")}
    learning["curriculum_metrics"] = {"seqlen": length, "cut": cut}
    return {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}


def script(folder: Path) -> list[tuple[int, int]]:
    """The number of tokens of each batch of the loader, and of its longest sample."""
    config = runs.config(1, samples=3, data_efficiency=curriculum(folder))
    engine, _, loader, _ = deepspeed.initialize(
        model=Model(), config=config, training_data=Padded()
    )
    assert engine.curriculum_learning_enabled() and engine.data_efficiency_enabled()

    def truncate(data: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Tensor]:
        now = state["current_difficulties"]["cut"]
        return {"x": data["x"][:, :now], "length": data["length"]}

    engine.set_data_post_process_func(truncate)
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 2 + step})
    found = []
    for _, batch in zip(range(6), loader, strict=False):
        loss = engine(batch["x"])
        engine.backward(loss)
        engine.step()
        found.append((batch["x"].shape[1], int(batch["length"].max())))
    engine.destroy()
    return found


def test_a_script_truncates_by_the_state_of_the_sampler(tmp_path: Path) -> None:
    DataAnalyzer(
        Padded(),
        batch_size=7,
        save_path=tmp_path,
        metric_names=["seqlen"],
        metric_functions=[lengths_in],
        metric_types=["single_value_per_sample"],
    ).run_map_reduce()
    for found in run_ranks(script, 2, tmp_path):
        assert [width for width, _ in found] == [4, 6, 8, 10, 10, 10]
        assert all(longest <= min(2 + step, 9) for step, (_, longest) in enumerate(found, start=1))
    assert not (tmp_path / "clusters").exists()


def collated(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def lengths_of_batch(batch: Tensor) -> Tensor:
    return (batch > 0).sum(1)


def by_tokens(folder: str, steps: int) -> Any:
    batching = {"enabled": True, "max_tokens": 20, "metrics_path": folder}
    batching |= {"sequence_picking_order": "seqlen", "max_batch_size": 8}
    section = {"enabled": True, "seed": 42, "data_sampling": {"dynamic_batching": batching}}
    config = runs.config(0, samples=2, accumulation=2, data_efficiency=section)
    engine, _, _, _ = deepspeed.initialize(model=Model(), config=config)
    loader, schedule, arguments = variable_batches(
        Short(), engine, dataloader_collate_fn=collated, batch_seqlens_fn=lengths_of_batch
    )
    engine.lr_scheduler = schedule
    found, number = [], 0
    for batch in loader:
        rate = engine.get_lr()[0]
        engine.backward(engine(batch))
        engine.step()
        found.append((rate, len(batch), int((batch > 0).sum())))
        number += engine.is_gradient_accumulation_boundary()
        if len(found) == 2 * steps:
            break
    engine.save_checkpoint(f"{folder}/saved")
    schedule.step(0)
    first = engine.get_lr()[0]
    assert len(engine.deepspeed_io(**arguments)) == len(loader)
    engine.destroy()
    return found, first


def test_a_script_takes_batches_by_tokens(tmp_path: Path) -> None:
    """DeepSpeed's example of variable batches: the lengths are analyzed on rank 0, the rates follow."""
    results = run_ranks(by_tokens, 2, str(tmp_path), 2)
    for step in range(2):
        parts = [found[2 * step + at] for found, _ in results for at in range(2)]
        samples = sum(size for _, size, _ in parts)
        assert [rate for rate, _, _ in parts] == pytest.approx([0.01 * samples / 8] * 4)
        assert all(tokens <= 2 * 20 for _, _, tokens in parts)
        if step == 0:
            assert results[0][1] == pytest.approx(0.01 * samples / 8)


def refused() -> None:
    engine, _, _, _ = deepspeed.initialize(model=Model(), config=runs.config())
    with pytest.raises(UsageError, match="set it to true for this call"):
        variable_batches(Short(), engine)
    engine.destroy()


def test_it_is_refused_without_its_section() -> None:
    run_ranks(refused, 1)
