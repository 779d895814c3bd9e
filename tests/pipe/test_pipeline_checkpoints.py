"""Checkpoints of pipelines: any cut of a model loads any other, bit for bit."""

from __future__ import annotations

from pathlib import Path

from pipeline_checkpoints import Cut, Saved, read, write
from warm_ranks import warm


def save(folder: Path, cut: Cut) -> Saved:
    return Saved(cut, warm(cut.world_size).run(write, str(folder), cut))


def load(folder: Path, cut: Cut, *saved: Saved) -> None:
    """Load every checkpoint at this cut, and compare what all ranks then hold."""
    tags = [one.cut.tag for one in saved]
    by_rank = warm(cut.world_size).run(read, str(folder), cut, tags)
    for number, one in enumerate(saved):
        assert one.differences(cut, [held[number] for held in by_rank]) == []


def test_a_pipeline_loads_at_one_rank_and_at_data_ranks_and_back(tmp_path: Path) -> None:
    pipeline, data_ranks, one_rank = Cut(2, 1, 1), Cut(1, 2, 3), Cut(1, 1, 0)
    saved = [save(tmp_path, cut) for cut in (pipeline, data_ranks, one_rank)]
    load(tmp_path, data_ranks, saved[0])
    load(tmp_path, one_rank, saved[0])
    load(tmp_path, pipeline, *saved)
