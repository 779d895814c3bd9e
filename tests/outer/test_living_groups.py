"""Groups that die, stop, are late or come back: numbers of a reference without them, reports, refusals."""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import groups as script
import pytest
import torch
from forked_launcher import ForkedLauncher
from helpers import on_busy_machines
from torch import Tensor, nn
from torch.distributed import HashStore

from xds.launcher.reporting.records import read_run
from xds.ops.watch.store import Store
from xds.outer.rounds import Patience, Rounds, Try
from xds.outer.schedule import MeetingSchedule, fragment_of
from xds.recovery.generations import Generation

SCRIPT = Path(__file__).with_name("groups.py")
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
UNITS = [0, 0, 1, 1, 2, 2]  # of the parameters of the script's model
WAITS = {"window_seconds": 100.0}  # a group is not called before it comes by itself


def reference(
    meetings: list[tuple[int, ...]],
    steps: int,
    num_ranks: int,
    outer: dict[str, Any],
    inner: Any,
    sizes: dict[int, int],
) -> list[Tensor]:
    """Plain torch: the parameters of each group. meetings: the groups of each one. sizes: of micro-batches."""
    models = [script.build().eval() for _ in range(outer["groups"])]
    kind = torch.optim.SGD if inner["type"] == "SGD" else torch.optim.AdamW
    optimizers = [kind(model.parameters(), **inner["params"]) for model in models]
    held = [param.detach().clone().requires_grad_() for param in models[0].parameters()]
    based = [[value.detach().clone() for value in held] for _ in models]  # what a group began with
    optimizers_of_held = [torch.optim.SGD([v], lr=0.7, momentum=0.9, nesterov=True) for v in held]
    schedule = MeetingSchedule(outer["steps"], outer.get("fragments", 1))
    fragments = [fragment_of(unit, schedule.fragments) for unit in UNITS]
    weights = [[0] * schedule.fragments for _ in models]
    number, starts = 1, schedule.interval(1)
    for step in range(steps):
        for group, model in enumerate(models):
            optimizers[group].zero_grad()
            for rank in range(num_ranks):
                x, y = script.micro_batch(step, group * num_ranks + rank, sizes.get(group, 4))
                (nn.functional.cross_entropy(model(x), y) / num_ranks).backward()
            optimizers[group].step()
            weights[group] = [weight + sizes.get(group, 4) for weight in weights[group]]
        if step + 1 < starts or number > len(meetings):
            continue
        members, now = meetings[number - 1], schedule.fragment(number)
        total = sum(weights[group][now] for group in members)
        number, starts = number + 1, starts + schedule.interval(number + 1)
        with torch.no_grad():
            for place, value in enumerate(held):
                if fragments[place] != now:
                    continue
                value.grad = sum(
                    (based[group][place] - list(models[group].parameters())[place])
                    * (weights[group][now] / total)
                    for group in members
                )
                optimizers_of_held[place].step()
            for group in members:
                weights[group][now] = 0
                for place, param in enumerate(models[group].parameters()):
                    # what other groups have learned while this one was away
                    param.add_(held[place] - based[group][place])
                    if fragments[place] == now:
                        param.copy_(held[place])
                    based[group][place].copy_(held[place])
    return [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]


def start(
    folder: Path, outer: dict[str, Any], inner: Any, num_ranks: int, *words: str, **more: Any
) -> ForkedLauncher:
    environ = {"OUT": str(folder), "OUTER": json.dumps(outer), "OPTIMIZER": json.dumps(inner)}
    environ |= {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in more.items()
    }
    environ["OMP_NUM_THREADS"] = "1"
    count = str(num_ranks * outer["groups"])
    options = ["--recover", *words, "--nproc-per-node", count, "--log-dir", str(folder / "logs")]
    return ForkedLauncher([*options, str(SCRIPT)], folder, {**os.environ, **environ})


def ended(launcher: ForkedLauncher) -> str:
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    return err


def found(folder: Path, ranks: list[int]) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]


def check_agree(ranks: list[dict[str, Any]]) -> None:
    """After a meeting all groups that have its outer parameters have the same bits."""
    held: dict[int, set[int]] = {}
    for rank in ranks:
        for _, version, _, digest in rank["history"]:
            held.setdefault(version, set()).update({digest} - {None})
    assert all(len(digests) <= 1 for digests in held.values()), held


def wait_for(condition: Any, launcher: ForkedLauncher) -> None:
    deadline = time.monotonic() + on_busy_machines(60)
    while not condition():
        assert time.monotonic() < deadline and launcher.returncode is None
        time.sleep(0.02)


def version(folder: Path, rank: int) -> int:
    with suppress(OSError, ValueError):
        return int((folder / f"version{rank}").read_text())
    return 0


@pytest.mark.parametrize(
    ("deaths", "num_ranks", "stage", "inner", "more"),
    [
        # all ranks have the mean, and none may take it; group 1 has other batches in all cases
        pytest.param({2: [2, "meeting", "SIGKILL"]}, 1, 1, SGD, {}, id="in a meeting"),
        pytest.param({1: [4, "forward", "SIGKILL"]}, 2, 2, ADAM, {}, id="in a step"),
        pytest.param(
            {3: [2, "meeting", "SIGKILL"]}, 2, 3, ADAM, {"delay": 1}, id="in the background"
        ),
        pytest.param({0: [2, "meeting", "SIGKILL"]}, 2, 0, SGD, {}, id="the first rank"),
        pytest.param({2: [2, "meeting", "SIGKILL"]}, 1, 1, ADAM, {"fragments": 3}, id="a fragment"),
    ],
)
@pytest.mark.quick("in a meeting")
def test_a_group_that_dies_is_left_out(
    tmp_path: Path, deaths: Any, num_ranks: int, stage: int, inner: Any, more: dict[str, Any]
) -> None:
    outer = {"groups": 3, "steps": 3} | WAITS | more
    steps = 12 + more.get("delay", 0)
    sizes = {1: 7}
    given = {"DEATHS": deaths, "STAGE": stage, "STEPS": steps, "SIZES": sizes}
    err = ended(start(tmp_path, outer, inner, num_ranks, **given))
    dead = next(iter(deaths))
    lost = dead // num_ranks
    left = [group for group in range(3) if group != lost]
    assert f"xds: rank {dead} was ended by SIGKILL; ranks" in err
    meetings = [(0, 1, 2), *[tuple(left)] * (4 * outer.get("fragments", 1) - 1)]
    expected = reference(meetings, 12, num_ranks, outer, inner, sizes)
    for rank in range(3 * num_ranks):
        if rank // num_ranks == lost:
            assert not (tmp_path / f"rank{rank}.json").exists()
            continue
        (one,) = found(tmp_path, [rank])
        assert one["members"] == left
        if "delay" not in more:
            values = torch.tensor(one["values"])
            torch.testing.assert_close(values, expected[rank // num_ranks], rtol=1e-4, atol=1e-5)
    run = read_run(str(tmp_path / "report"))
    text = f"group {lost} is gone (rank {dead} was ended by SIGKILL)"
    assert [each.text.partition(":")[0] for each in run.failures] == [text]
    assert run.failures[0].seconds["stall"] >= 0 and run.num_starts == 1 and not run.foreign
    assert max(run.steps) == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"steps": 2},
        {"steps": 2, "bits": 4},
        {"steps": 6, "fragments": 3},
        {"steps": 4, "fragments": 2, "delay": 1, "mix": 0.5, "bits": 8},
    ],
)
def test_a_group_that_is_stopped_comes_back(tmp_path: Path, more: dict[str, Any]) -> None:
    outer = {"groups": 3} | more | WAITS
    stop = {1: [5, "forward", "SIGSTOP"]}
    launcher = start(tmp_path, outer, ADAM, 1, DEATHS=stop, STEPS=30, WAITS="1", PAUSES={0: 0.1})
    wait_for(lambda: version(tmp_path, 0) >= 8, launcher)  # the others have met without it
    os.kill(int((tmp_path / "stopped1").read_text()), signal.SIGCONT)
    err = ended(launcher)
    assert "group 1 is late or stopped: groups 0, 2 have held meeting 3" in err
    assert "group 1 is there again: groups 0, 1, 2 have held meeting" in err
    ranks = found(tmp_path, [0, 1, 2])
    check_agree(ranks)
    versions = [each[1] for each in ranks[1]["history"]]
    before = [each for each in versions if each <= 2]
    assert min(each for each in versions if each > 2) >= 8 and len(before) >= 5


@pytest.mark.slow
def test_a_slow_group_comes_when_it_is_called(tmp_path: Path) -> None:
    outer = {"groups": 2, "steps": 6, "window_seconds": 0.3}
    launcher = start(tmp_path, outer, ADAM, 1, PAUSES={0: 0.1, 1: 0.6}, STEPS=24)
    ended(launcher)
    fast, slow = found(tmp_path, [0, 1])
    check_agree([fast, slow])
    texts = [each.text for each in read_run(str(tmp_path / "report")).failures]
    assert any(text.startswith("group 1 is slow (") for text in texts), texts
    steps = [sum(each[1] == version for each in slow["history"]) for version in (0, 1, 2)]
    assert max(steps) < 6 and fast["history"][-1][1] >= 4  # it has met with fewer steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "num_ranks", "more"),
    [(1, 1, {"steps": 2}), (0, 2, {"steps": 2}), (1, 1, {"steps": 6, "fragments": 3, "delay": 1})],
)
def test_new_processes_begin_with_the_outer_parameters(
    tmp_path: Path, lost: int, num_ranks: int, more: dict[str, Any]
) -> None:
    outer = {"groups": 2, "bits": 8} | more | WAITS
    deaths = {lost * num_ranks: [5, "forward", "SIGKILL"]}
    given = {"DEATHS": deaths, "STEPS": 20, "WAITS": "1", "PAUSES": {1 - lost: 0.1}}
    err = ended(start(tmp_path, outer, ADAM, num_ranks, "--spares", "1", **given))
    assert "there again (generation 2)" in err
    ranks = found(tmp_path, list(range(2 * num_ranks)))
    for place in range(num_ranks):
        check_agree(ranks[place::num_ranks])
    texts = [each.text for each in read_run(str(tmp_path / "report")).failures]
    assert any(text.startswith(f"group {lost} ") and "there again" in text for text in texts), texts
    new = ranks[lost * num_ranks]
    assert new["started"] > 5 and new["history"][0][1] > 2


@pytest.mark.slow
def test_the_first_group_that_lives_saves_for_all(tmp_path: Path) -> None:
    outer = {"groups": 2, "steps": 3, "delay": 1} | WAITS
    more = {"DEATHS": {0: [4, "forward", "SIGKILL"]}, "STEPS": 10, "SAVE": "1"}
    ended(start(tmp_path, outer, ADAM, 1, **more))
    assert (tmp_path / "saved" / "latest").read_text().strip() == "global_step10"
    ended(start(tmp_path, outer, ADAM, 1, STEPS=16, SAVE="1"))
    ranks = found(tmp_path, [0, 1])
    check_agree(ranks)
    assert [rank["started"] for rank in ranks] == [10, 10]
    assert {each[1] for each in ranks[0]["history"]} == {0, 1}


class Everyone:
    """Which groups are there, for threads that stand for them."""

    def __init__(self, groups: int) -> None:
        self.all = [Generation(0, tuple(range(groups)))]

    def newest(self) -> Generation:
        return self.all[-1]

    def stopped(self) -> frozenset[int]:
        return frozenset()

    def lose(self, group: int) -> None:
        left = tuple(other for other in self.all[-1].units if other != group)
        self.all.append(Generation(len(self.all), left))


def meet_often(rounds: Rounds, everyone: Everyone, place: tuple[int, int], seed: int) -> list[Try]:
    """What one rank of 3 groups does: it comes late, gives up, or dies. The tries that counted."""
    group, rank = place
    draws, held, number = random.Random(10 * seed + group), [], 1
    dies_at = draws.randrange(1, 16) if group == 2 else -1
    for turn in range(8):
        if not rank:
            time.sleep(draws.random() * 0.04)
        if dies_at == 2 * turn:
            break
        trial = rounds.seek(number)
        if dies_at == 2 * turn + 1:  # the others wait for it
            break
        if not trial.groups:
            number = trial.number
        elif rounds.conclude(trial, is_done=draws.random() > 0.1 or rank == 1):
            held.append(trial)
            number = trial.number + 1
    if not rank:
        everyone.lose(group)
    return held


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.quick("0")
def test_all_ranks_know_alike_which_meetings_count(seed: int) -> None:
    everyone, raw = Everyone(3), HashStore()
    places = [(group, rank) for group in range(3) for rank in range(2)]

    def run(place: tuple[int, int]) -> list[Try]:
        store = Store(raw, "outer", 2 * place[0] + place[1], key="")
        rounds = Rounds(store, everyone, Patience(1, 0.02, 20.0), (*place, 2), 0)
        return meet_often(rounds, everyone, place, seed)

    with ThreadPoolExecutor(len(places)) as threads:
        seen = dict(zip(places, threads.map(run, places, timeout=60), strict=True))
    held = {trial.number: trial for each in seen.values() for trial in each}
    assert sorted(held) == list(range(1, len(held) + 1)) and len(held) >= 5
    for (group, _), each in seen.items():
        assert all(trial == held[trial.number] and group in trial.groups for trial in each)
    for group in (0, 1):
        assert seen[group, 0] == seen[group, 1]
    for number in range(2, len(held) + 1):  # the newest outer parameters are not left behind
        before, now = set(held[number - 1].groups), set(held[number].groups)
        assert before & now or not before & set(everyone.all[held[number].generation].units)
