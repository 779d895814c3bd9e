"""Commits on all nodes or none: a rank ends before each rename of a commit, and at random instants."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_new_ranks
from kill_runs import Scenario
from node_kills import NodeKiller
from node_runs import engine_of, folder_of, values_of
from saved_checkpoints import train

# -- the end of a rank at each step of the commit -----------------------------------------------------------


def end_at(base: str, tags: tuple[str, str], victim: int, call: int) -> None:
    """Save twice. In the second save a rank ends before its `call`-th rename."""
    os.environ["RANK"] = str(torch.distributed.get_rank())
    engine = engine_of(2)
    for number, tag in enumerate(tags):
        train(engine, 1)
        if number and engine.global_rank == victim:
            calls = iter(range(100))
            for name in ("rename", "replace"):
                setattr(os, name, partial(_unless_ended, getattr(os, name), calls, call))
        engine.save_checkpoint(folder_of(base, 1), tag, client_state={"step": number + 1})
    os._exit(0)  # it never came to that call


def _unless_ended(rename: Any, calls: Any, last: int, *paths: Any) -> None:
    if next(calls) == last:
        os._exit(9)
    rename(*paths)


def step_of(base: str) -> Any:
    os.environ["RANK"] = str(torch.distributed.get_rank())
    engine = engine_of(2)
    _, client_state = engine.load_checkpoint(folder_of(base, 1))
    loaded = values_of(engine)[:2]
    again = engine_of(2)
    for _ in range(engine.global_steps):
        train(again, 1)
    trained = values_of(again)[:2]
    is_right = all(torch.equal(value, trained[0][name]) for name, value in loaded[0].items())
    again.save_checkpoint(folder_of(base, 1), "same")  # what was left is no obstacle
    left = [path.name for path in Path(folder_of(base, 1)).iterdir() if path.name[0] == "."]
    return client_state["step"], engine.global_steps, is_right, left


EVERY = [  # tags, who ends, before which rename
    *((("first", "second"), victim, call) for victim in (0, 1) for call in range(3)),
    *((("same", "same"), victim, call) for victim in (0, 1) for call in range(5)),
]
FEW = [(("first", "second"), 1, 0), (("same", "same"), 0, 1), (("same", "same"), 1, 2)]


def _check_end(base: str, tags: tuple[str, str], victim: int, call: int) -> None:
    with pytest.raises(AssertionError):  # the other rank has lost its peer, or both ended
        run_new_ranks(end_at, 2, base, tags, victim, call)
    results = run_new_ranks(step_of, 2, base)
    steps = {(saved, loaded) for saved, loaded, _, _ in results}
    assert steps in ({(1, 1)}, {(2, 2)})
    assert all(is_right and not left for _, _, is_right, left in results)
    if tags[0] == tags[1] and call >= 2:
        assert steps == {(2, 2)}  # both nodes had placed it


@pytest.mark.parametrize(
    ("tags", "victim", "call"),
    [FEW[2], *(pytest.param(*case, marks=pytest.mark.slow) for case in FEW[:2])],
)
def test_a_rank_ends_within_the_commit(
    tmp_path: Path, tags: tuple[str, str], victim: int, call: int
) -> None:
    _check_end(str(tmp_path), tags, victim, call)


@pytest.mark.slow
@pytest.mark.parametrize(("tags", "victim", "call"), EVERY)
def test_a_rank_ends_at_any_step_of_the_commit(
    tmp_path: Path, tags: tuple[str, str], victim: int, call: int
) -> None:
    _check_end(str(tmp_path), tags, victim, call)


# -- kills --------------------------------------------------------------------------------------------------

SCENARIOS = [
    Scenario(stage=1, victims="one", by_node=True),
    Scenario(stage=3, victims="all", by_node=True, same_tag=True),
    Scenario(stage=0, victims="one", by_node=True, keep_last=2, width=128),
    Scenario(stage=2, victims="one", by_node=True, same_tag=True, async_save=True),
    Scenario(stage=3, victims="all", by_node=True, keep_last=2, async_save=True),
    Scenario(stage=1, victims="one", by_node=True, same_tag=True, width=128),
]


def kill_often(scenario: Scenario, seed: int, kills: int) -> Any:
    killer = NodeKiller(scenario, seed, window_seconds=0.15)
    for _ in range(kills):
        killer.trial()
    return killer.finish()


@pytest.mark.parametrize("number", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_kill_loses_no_checkpoint_of_nodes(number: int) -> None:
    tally = kill_often(SCENARIOS[number], number, 2)
    assert tally.problems == []
    assert tally.checked == 3


@pytest.mark.slow
def test_no_kill_loses_or_tears_a_checkpoint_of_nodes() -> None:
    with ThreadPoolExecutor(3) as pool:
        tallies = list(pool.map(kill_often, SCENARIOS, range(len(SCENARIOS)), [8] * 6))
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert sum(tally.kills for tally in tallies) == 48
    assert sum(tally.inside for tally in tallies) > 0
