"""Which checkpoints stay, which of those with a metric is the best, and what a run resumes from."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import engine_of
from helpers import run_processes, run_ranks
from torch import nn

import xds


def tiny(**checkpoint: Any) -> Any:
    return engine_of(0, model=nn.Linear(2, 2), checkpoint=checkpoint)


def steps_in(folder: Path) -> list[int]:
    """Of the checkpoints that are there."""
    names = [path.name for path in folder.iterdir() if path.name.startswith("global_step")]
    return sorted(int(name.removeprefix("global_step")) for name in names)


def save_all(engine: Any, folder: Path, metrics: list[Any], **more: Any) -> None:
    for metric in metrics:
        engine.global_steps += 1
        engine.save_checkpoint(folder, metric=metric, **more)


def best(folder: Path, **more: Any) -> int:
    engine = tiny()
    assert engine.load_checkpoint(folder, "best", **more)[0] is not None
    return int(engine.global_steps)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("metrics", "keep_best", "mode", "keep_last", "stay", "the_best"),
    [
        ([5, 3, 4, 9], 2, "min", 0, [2, 3, 4], 2),  # the last one stays too
        ([5, 3, 4, 9], 2, "max", 0, [1, 4], 4),
        ([5, 3, 4, 9, 8, 7], 1, "min", 2, [2, 5, 6], 2),
        ([5, 3, 4, 9, 8, 7], 0, "min", 2, [2, 5, 6], 2),  # keep_last alone never removes the best
        ([3, 3, 3, 3], 2, "min", 0, [1, 2, 4], 1),  # of equal ones the first
        ([NAN, 3, NAN, INF, 4, -INF], 2, "min", 0, [2, 5, 6], 2),
        ([NAN, 3, NAN, INF, 4, -INF], 2, "max", 0, [2, 5, 6], 5),
        ([5, None, 3, None, 4, 6], 1, "min", 0, [2, 3, 4, 6], 3),  # saves without one all stay
        ([torch.tensor(5.0), torch.tensor([4]), 4.5], 1, "min", 0, [2, 3], 2),
        ([5, 3, 4], 0, "min", 0, [1, 2, 3], 2),
        ([NAN, NAN], 1, "min", 0, [1, 2], 1),
    ],
)
def test_the_best_stay_beside_the_last(  # noqa: PLR0913
    tmp_path: Path,
    metrics: list[Any],
    keep_best: int,
    mode: str,
    keep_last: int,
    stay: list[int],
    the_best: int,
) -> None:
    engine = tiny(keep_last=keep_last)
    for metric in metrics:
        more = {} if metric is None else {"keep_best": keep_best, "mode": mode}
        save_all(engine, tmp_path, [metric], **more)
    assert steps_in(tmp_path) == stay
    assert best(tmp_path) == the_best
    assert tiny().load_checkpoint(tmp_path)[0] == f"{tmp_path}/global_step{len(metrics)}"


def test_keep_last_never_removes_what_latest_names_nor_what_was_just_saved(tmp_path: Path) -> None:
    engine = tiny(keep_last=1)
    engine.global_steps = 3
    engine.save_checkpoint(tmp_path)
    engine.global_steps = 4
    engine.save_checkpoint(tmp_path, save_latest=False)
    assert steps_in(tmp_path) == [3, 4]
    engine.global_steps = 1
    engine.save_checkpoint(tmp_path)  # a run that begins anew in the same folder
    assert steps_in(tmp_path) == [1, 3, 4]
    engine.global_steps = 2
    engine.save_checkpoint(tmp_path)
    assert steps_in(tmp_path) == [2, 3, 4]
    assert xds.newest_checkpoint(tmp_path) == "global_step4"  # by the step; `latest` names step 2


def test_a_damaged_best_is_followed_by_the_next_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny()
    save_all(engine, tmp_path, [5, 3, 1, 4, 9])
    next((tmp_path / "global_step3").glob("rank_*")).unlink()
    with pytest.raises(xds.UsageError, match=r"global_step3/rank_.* is missing"):
        best(tmp_path)
    with caplog.at_level(logging.WARNING, "xds"):
        assert best(tmp_path, fallback=True) == 2
    assert f"falling back to {tmp_path}/global_step2" in caplog.text
    engine.global_steps = 77
    engine.save_checkpoint(tmp_path, "best")  # a script that keeps one of this name itself
    assert best(tmp_path) == 77
    save_all(engine, tmp_path / "none", [None, None])
    with pytest.raises(xds.UsageError, match="no checkpoint there was saved with a metric"):
        best(tmp_path / "none")


def on_ranks(folder: str) -> None:
    """The same number, or one rank alone; the ranks of a background save too."""
    root, rank = Path(folder), dist.get_rank()
    engine = engine_of(1, model=nn.Linear(4, 4), checkpoint={"async_save": True})
    for metric in (0.5, 0.25, 0.75):
        save_all(engine, root, [metric if rank == 1 else None], keep_best=1)
    engine.wait_for_checkpoint()
    dist.barrier()
    assert steps_in(root) == [2, 3]
    assert engine.load_checkpoint(root, "best")[0] == f"{root}/global_step2"
    dist.barrier()


def test_one_rank_may_know_the_metric(tmp_path: Path) -> None:
    run_processes(on_ranks, 2, str(tmp_path))


def refused(folder: str) -> None:
    engine, rank = engine_of(1, model=nn.Linear(4, 4)), dist.get_rank()
    for arguments, says in (
        (
            {"metric": 0.5 + rank},
            "metric = 0.5 on rank 0 and 1.5 on rank 1: give all ranks one number",
        ),
        ({"metric": "low"}, "metric = 'low': must be a number"),
        ({"metric": torch.ones(2)}, "metric = a Tensor: must be a number"),
        ({"metric": True}, "metric = True: must be a number"),
        ({"metric": 1.0, "mode": "min" if rank else "most"}, "rank 0: .*mode = 'most': must be"),
        ({"keep_best": 3}, "keep_best = 3 needs metric"),
        ({"metric": 1.0, "keep_best": -1}, "keep_best = -1: must be a whole number"),
        ({"metric": 1.0, "keep_best": 1, "mode": "least"}, "mode = 'least': must be \"min\" or"),
    ):
        with pytest.raises(xds.UsageError, match=says):
            engine.save_checkpoint(folder, **arguments)
        dist.barrier()
        assert not list(Path(folder).iterdir())
        dist.barrier()


def test_what_is_no_metric_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(refused, 2, str(tmp_path))


def test_a_run_resumes_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny()
    with caplog.at_level(logging.WARNING, "xds"):
        assert engine.resume(tmp_path / "out") == (None, {})
        (tmp_path / "empty").mkdir()
        assert engine.resume(tmp_path / "empty") == (None, {})
    assert "WARNING" not in caplog.text and not (tmp_path / "out").exists()
    for epoch in range(3):
        engine.global_steps += 1
        engine.save_checkpoint(tmp_path, client_state={"epoch": epoch})
    again = tiny()
    assert again.resume(tmp_path) == (f"{tmp_path}/global_step3", {"epoch": 2})
    next((tmp_path / "global_step3").glob("rank_*")).write_bytes(b"half")
    again = tiny()
    assert again.resume(tmp_path)[1] == {"epoch": 1} and again.global_steps == 2
    for step in (1, 2):
        next((tmp_path / f"global_step{step}").glob("rank_*")).unlink()
    with pytest.raises(xds.UsageError, match="no older checkpoint"):  # nothing starts over it
        again.resume(tmp_path)
    with pytest.raises(xds.UsageError, match="folder = '' is not the path of a folder"):
        again.resume("")


def counts(folder: str) -> None:
    """A failed save counts for nothing, one without a metric neither; the count is in each checkpoint."""
    engine, rank = engine_of(1, model=nn.Linear(4, 4)), dist.get_rank()
    seen = []
    for metric in (NAN, 3.0, 3.0, 4.0, 2.0, INF, None, 2.5):
        save_all(engine, Path(folder), [metric if rank == 0 else None])
        seen.append(engine.saves_since_best)
    assert seen == [1, 0, 1, 2, 0, 1, 1, 2]
    with pytest.raises(xds.UsageError):
        engine.save_checkpoint(folder, metric=float(rank))
    assert engine.saves_since_best == 2
    again = engine_of(2, model=nn.Linear(4, 4))
    for tag, count in ((None, 2), ("best", 0), ("global_step4", 2), ("global_step7", 1)):
        again.load_checkpoint(folder, tag)
        assert again.saves_since_best == count
    again.save_checkpoint(folder, metric=1.0, mode="max")
    again.save_checkpoint(folder, metric=3.0, mode="max")
    assert again.saves_since_best == 0


def test_saves_since_the_best_are_counted_on_every_rank_and_after_a_resume(tmp_path: Path) -> None:
    run_ranks(counts, 2, str(tmp_path))
