"""checkpoint.interval: all ranks save after the same step, and "auto" is the best interval."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import runs
from helpers import run_ranks
from models import build, micro_batch
from torch.distributed import get_rank

import xds
from xds.engine.planning.goodput import best_interval_seconds
from xds.engine.steps import save_interval
from xds.engine.steps.save_interval import TimedSaves


def should_save(folder: str) -> list[bool]:
    """Rank 0 is asked from step 2 on; a save comes after step 3. No clock is read."""
    engine = xds.initialize(
        build("tied"), runs.config(gradient_clipping=1.0, checkpoint={"interval": 3600})
    )
    saves = engine._parts.saves
    found = []
    for step in range(6):
        saves._since_seconds = float("inf") if step < 1 or step > 4 or get_rank() else -1e9
        engine.backward(engine(micro_batch(step, get_rank(), 2)))
        engine.step()
        found.append(engine.should_save())
        if step == 2:
            engine.save_checkpoint(folder)
            found.append(engine.should_save())
    return found


def test_all_ranks_save_after_the_step_in_which_rank_0_says_so(tmp_path: Any) -> None:
    expected = [False, True, True, False, True, True, False]
    assert run_ranks(should_save, 2, str(tmp_path)) == [expected, expected]


def test_auto_is_the_best_interval_of_measured_saves_and_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("XDS_RUN_BEGAN", "1000")
    monkeypatch.setattr(save_interval.time, "time", lambda: 1000 + 36_000.0)
    collectives: Any = SimpleNamespace(rank=0, world_size=100)
    saves = TimedSaves("auto", collectives)
    assert saves.seconds == 600.0  # until a save was measured
    for seconds in (1000.0, 8.0, 12.0, 8.0, 12.0):
        saves.saved(seconds)
    # two failures with the one that is assumed, in 50,700 and 100 x 10 hours
    assert saves.seconds == pytest.approx(best_interval_seconds(51_700 / 2 / 100 * 3600, 10.0))
    saves.dropped()
    assert saves.seconds == pytest.approx(best_interval_seconds(51_700 / 3 / 100 * 3600, 10.0))
    assert TimedSaves(7.5, collectives).seconds == 7.5


def asks_without_interval() -> None:
    engine = xds.initialize(build("tied"), runs.config())
    with pytest.raises(xds.UsageError, match=r"should_save\(\) without checkpoint.interval: set"):
        engine.should_save()


def test_without_an_interval_it_is_refused() -> None:
    run_ranks(asks_without_interval, 1)
