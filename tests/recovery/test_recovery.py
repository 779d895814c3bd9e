"""A rank fails, and the others go on in their processes: numbers, samples, generations, refusals."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_launcher import ForkedLauncher
from helpers import on_busy_machines, run_processes, run_ranks
from models import build, micro_batch
from torch import nn
from torch.distributed import HashStore, PrefixStore

import xds
from xds.engine.lost_peers import FencedStore
from xds.launcher.reporting.records import read_run
from xds.ops.comm.opening import open_collectives
from xds.ops.watch.store import Store
from xds.recovery.generations import Generation, Lighthouse, Meeting, Presence
from xds.utils.errors import PeerError

SCRIPT = Path(__file__).with_name("training.py")


def plain(steps: int, units: int) -> tuple[list[float], torch.Tensor]:
    """Losses and parameters of the script without xds, in one process."""
    os.environ |= {"RANK": "0", "OUT": "", "DEATHS": "{}"}
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import training
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in ("RANK", "OUT", "DEATHS"):
            del os.environ[name]
    model, data = training.build().eval(), training.dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    batch, losses, epoch = 2 * 2 * units, [], 0
    while len(losses) < steps:
        order.set_epoch(epoch)
        numbers, epoch = list(order), epoch + 1
        numbers += numbers[: -len(numbers) % batch]
        for start in range(0, len(numbers), batch)[: steps - len(losses)]:
            x, y = (
                torch.stack(part)
                for part in zip(*(data[n] for n in numbers[start:][:batch]), strict=True)
            )
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[-3:], torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize(
    ("deaths", "ranks", "shard"),
    [
        # rank 0 has updated, or its peer has not: in either case the step counts once. Then an exception
        pytest.param({0: [3, "norm", "SIGKILL"], 2: [7, "forward", "raise"]}, 3, 1, id="two"),
        # rank 1 of a shard group has updated: rank 0 ends with it, the ranks of the other group agree
        pytest.param({1: [3, "norm", "SIGKILL"]}, 4, 2, id="shard group"),
        pytest.param({1: [4, "forward", "SIGSTOP"]}, 3, 1, id="stopped", marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick("shard group")
def test_the_run_goes_on_with_the_same_numbers(
    tmp_path: Path, deaths: dict[int, list], ranks: int, shard: int
) -> None:
    environ = {"OUT": str(tmp_path), "DEATHS": json.dumps(deaths), "OMP_NUM_THREADS": "1"}
    environ["SHARD"] = str(shard)
    words = ["--recover", "--nproc-per-node", str(ranks), "--log-dir", str(tmp_path / "logs")]
    words.append(str(SCRIPT))
    launcher = ForkedLauncher(words, tmp_path, {**os.environ, **environ})
    out, err = launcher.communicate(on_busy_machines(60))
    assert launcher.returncode == 0, err
    lost = {unit // shard for unit in deaths}
    left = [unit for unit in range(ranks) if unit // shard not in lost]
    found = [json.loads((tmp_path / f"unit{unit}.json").read_text()) for unit in left]
    losses, values = plain(12, ranks)
    assert sum(
        unit["repeated"] for unit in found
    )  # with the same random numbers: the script compares them
    for rank, unit in enumerate(found):
        torch.testing.assert_close(torch.tensor(unit["values"]), values, rtol=1e-5, atol=1e-6)
        assert unit["losses"] == pytest.approx(losses, rel=1e-5)
        assert unit["samples"] == 12 * 4 * ranks and unit["ranks"] == [rank, len(left)]
    for unit, (_, _, how) in deaths.items():
        ended = (
            "ended with code 1 (RuntimeError: planned)"
            if how == "raise"
            else "was ended by SIGKILL"
        )
        if how == "SIGSTOP":
            ended = "was stopped for 1 s, so the launcher has ended it"
        assert f"xds: rank {unit} {ended}; ranks" in err
    # the lowest rank that is left goes on with the record; each second is in a class
    run = read_run(str(tmp_path / "report"))
    assert list(run.steps)[-8:] == list(range(5, 13)) and run.num_starts == 1 and not run.foreign
    assert len(run.failures) == len(deaths) and run.state == "end"
    assert all(each.seconds["stall"] > 0 for each in run.failures)
    assert sum(each.seconds["stall"] for each in run.failures) <= run.ledger["stall"] + 0.05
    assert 0 < run.last_time - run.start.time < sum(run.ledger.values())
    manifest = json.loads(next((tmp_path / "saved").glob("*/manifest.json")).read_text())
    assert manifest["mesh"]["data"] == len(left) and len(manifest["files"]) == len(left)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shard"), [(3, 1), (4, 2)])
def test_new_processes_take_the_place_of_a_lost_unit(
    tmp_path: Path, ranks: int, shard: int
) -> None:
    environ = {"OUT": str(tmp_path), "DEATHS": json.dumps({1: [3, "forward", "SIGKILL"]})}
    environ |= {"OMP_NUM_THREADS": "1", "STEPS": "60", "WAITS": "1", "SHARD": str(shard)}
    words = ["--recover", "--spares", "1", "--nproc-per-node", str(ranks)]
    words += ["--log-dir", str(tmp_path / "logs"), str(SCRIPT)]
    launcher = ForkedLauncher(words, tmp_path, {**os.environ, **environ})
    out, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    for rank in [1] if shard == 1 else [0, 1]:  # by the rank, by its new process
        log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert log.count("the script runs") == 2
    assert out.count("the script runs") == shard  # of rank 0
    again = "rank 1 is" if shard == 1 else "ranks 0, 1 are"
    assert f"{again} there again (generation 2)" in err
    found = [json.loads((tmp_path / f"unit{unit}.json").read_text()) for unit in range(ranks)]
    losses, values = plain(60, ranks)
    for rank, unit in enumerate(found):
        torch.testing.assert_close(torch.tensor(unit["values"]), values, rtol=1e-4, atol=1e-5)
        assert unit["values"] == found[0]["values"] and unit["ranks"] == [rank, ranks]
        assert unit["losses"] == pytest.approx(losses, rel=1e-4)
        assert unit["samples"] == 60 * 4 * ranks


FAILS = """
import os, pathlib
if "XDS_SPARE" in os.environ:
    pathlib.Path(os.environ["OUT"], "spare").write_text(str(os.getpid()))
    raise ValueError("no data")
"""
WAITS_FOR_IT = """
while not (OUT / "spare").exists() or Path("/proc", (OUT / "spare").read_text()).exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_spare_whose_script_fails_before_its_place_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(f"{FAILS}{SCRIPT.read_text()}{WAITS_FOR_IT}")
    environ = {"OUT": str(tmp_path), "DEATHS": json.dumps({1: [3, "forward", "SIGKILL"]})}
    environ |= {"OMP_NUM_THREADS": "1", "STEPS": "40", "WAITS": "1"}
    words = ["--recover", "--spares", "1", "--nproc-per-node", "3", str(script)]
    launcher = ForkedLauncher(words, tmp_path, {**os.environ, **environ})
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    assert err.count("has failed (ValueError: no data) before xds.initialize") == 1
    assert "rank 1 is there again (generation 2)" in err


@pytest.mark.slow
def test_a_new_process_with_another_config_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    """As where the file of the config has been changed since the start, before a spare has read it."""
    script = tmp_path / "changed.py"
    is_new = '"XDS_SPARE" in os.environ or "XDS_JOINS" in os.environ'
    changed = f'if {is_new}:\n    OPTIMIZER["params"]["lr"] = 0.2\nWAITS, SHARD ='
    script.write_text(SCRIPT.read_text().replace("WAITS, SHARD =", changed))
    environ = {"OUT": str(tmp_path), "DEATHS": json.dumps({1: [3, "forward", "SIGKILL"]})}
    environ |= {"OMP_NUM_THREADS": "1", "STEPS": "60", "WAITS": "1"}
    words = ["--recover", "--spares", "1", "--nproc-per-node", "3"]
    words += ["--log-dir", str(tmp_path / "logs"), str(script)]
    launcher = ForkedLauncher(words, tmp_path, {**os.environ, **environ})
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    refused = (tmp_path / "logs" / "rank1.log").read_text()
    assert "rank 1 cannot take the place of a lost rank: its config, or its version of" in refused
    assert "there again" not in err.replace("rank 1 is there again: ranks 0, 1, 2 go on", "")
    left = [json.loads((tmp_path / f"unit{unit}.json").read_text()) for unit in (0, 2)]
    assert [unit["samples"] for unit in left] == [60 * 12] * 2


# -- one copy of the states ---------------------------------------------------------------------------------


def one_copy_config(config: dict) -> str:
    """The config of the script of one copy, as JSON."""
    config = {
        **{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        **{"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
        **{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}},
        **{"recovery": {"enabled": True}, **config},
    }
    return json.dumps(config)


def found_by(folder: Path, ranks: int) -> dict[int, dict]:
    """What each rank found, by step and at the end."""
    found = {}
    for rank in range(ranks):
        lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
        records = map(json.loads, lines)  # what is taken again replaces what was taken before
        found[rank] = {record.get("step", "end"): record for record in records}
    return found


def one_copy(
    folder: Path,
    config: dict,
    ranks: int,
    deaths: list,
    hosts: Sequence[int] = (),
    script: str = "one_copy.py",
    spares: int = 1,
) -> tuple[dict, str]:
    """Run the script. Returns what each rank found, by step and at the end, and what the launcher said.

    hosts: by rank, the number of the host that it pretends to be on.
    """
    folder.mkdir()
    environ = {"OUT": str(folder), "DEATHS": json.dumps(deaths), "CONFIG": one_copy_config(config)}
    environ["HOSTS"] = json.dumps(hosts)
    words = ["--recover", "--nproc-per-node", str(ranks), "--log-dir", str(folder / "logs")]
    words += ["--spares", str(min(spares, len(deaths))), str(SCRIPT.with_name(script))]
    launcher = ForkedLauncher(words, folder, {**os.environ, **environ, "OMP_NUM_THREADS": "1"})
    first = launcher_of(launcher)
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    assert not states_of(first)
    return found_by(folder, ranks), err


@pytest.mark.parametrize(
    ("hosts", "config", "deaths"),
    [
        # the copy of step 3 is torn, so all go back to step 2; later a host is lost with its memory
        pytest.param(
            [0, 1],
            {"zero_optimization": {"stage": 2}},
            [[0, 3, "copy"], [1, 6, "host in norm"]],
            id="torn, and a host",
        ),
        pytest.param(
            [0, 0, 0],
            {
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
                "bf16": {"enabled": True},
            },
            # all ranks at once, and a rank in a save whose copy is torn
            [[0, 3, "norm"], [1, 3, "forward"], [2, 3, "norm"], [1, 5, "copy"], [2, 8, "forward"]],
            id="stage 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [0, 0, 0, 0],
            {"zero_optimization": {"stage": 3}},
            # before and after the update; then a version that has all its bytes, and one is wrong
            [[3, 2, "norm"], [0, 4, "updated"], [1, 6, "wrong bit"], [1, 7, "norm"]],
            id="stage 3",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [0, 0, 0],
            {"zero_optimization": {"stage": 2}},
            # another rank while all open their groups: its peers wait for it, and then meet its new process
            [[0, 3, "norm"], [2, None, "group"]],
            id="in the opening of groups",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [0, 0],
            {"zero_optimization": {"stage": 2}, "dataloader_num_workers": 1},
            # also in the last step of an epoch, when the workers have read all of it
            [[1, 2, "norm"], [0, 6, "forward"]],
            id="data workers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [0, 0, 1],
            {"zero_optimization": {"stage": 1}},
            # a host with two ranks, whose buddy is one rank; then that one, which has copies of both
            [[0, 3, "host in norm"], [2, 6, "host in updated"]],
            id="a host, and then the next one",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [2, 0, 1],
            {"zero_optimization": {"stage": 3}},
            # a rank that sends its copy; rank 2, which gives rank 1 its copy; the host before these two
            [[0, 2, "send"], [1, 4, "host in forward"], [2, None, "give"], [0, 7, "host in norm"]],
            id="while a copy travels",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_new_process_takes_over_the_versions_of_a_lost_one(
    tmp_path: Path, hosts: list[int], config: dict, deaths: list
) -> None:
    ranks = len(hosts)
    wanted, _ = one_copy(tmp_path / "whole", config, ranks, [])
    found, err = one_copy(tmp_path / "killed", config, ranks, deaths, hosts)
    assert found == wanted  # bits, samples, schedule, buffers and random numbers of all ranks
    for rank, _, where in deaths:
        assert (tmp_path / "killed" / f"died.{rank}.{where}").exists()
    assert "the other ranks wait for a new process" in err and "take part (generation" in err


@pytest.mark.slow
def test_each_failure_of_the_rank_that_writes_the_record_has_a_row(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "report_folder": str(tmp_path / "report")}
    one_copy(tmp_path / "killed", config, 2, [[0, 3, "norm"], [0, 6, "forward"]])
    run = read_run(str(tmp_path / "report"))
    assert list(run.steps) == list(range(1, 10)) and run.state == "end"
    assert run.num_starts == 1 and not run.foreign and not run.breaks
    assert len(run.failures) == 2
    for each in run.failures:
        assert each.text.startswith("rank 0 was ended by SIGKILL: ranks 0, 1 go on after step ")
    for name in ("stall", "repeated"):
        lost = [each.seconds.get(name, 0.0) for each in run.failures]
        assert sum(lost) == pytest.approx(run.ledger[name], abs=1e-4)
        assert all(lost) or name == "repeated"
    lines = (tmp_path / "report" / "run.jsonl").read_text().splitlines()
    since = next(json.loads(line)["since"] for line in lines if '"since"' in line)
    assert sum(run.ledger.values()) == pytest.approx(run.last_time - since, abs=1e-2)


@pytest.mark.slow
def test_two_hosts_next_to_each_other_are_too_many(tmp_path: Path) -> None:
    lost = [[1, 7, "host in forward"], [2, 7, "host in forward"]]
    with pytest.raises(AssertionError, match="no version of the states in memory") as failure:
        one_copy(tmp_path / "lost", {"zero_optimization": {"stage": 2}}, 3, lost, [0, 1, 2])
    last = tmp_path / "lost" / "saved" / "global_step5"
    assert f"start the run again from its last checkpoint ({last})" in str(failure.value)


SLICES = {
    "tensor_parallel": {
        "tp_size": 2,
        "plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    }
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "config", "deaths"),
    [
        pytest.param(2, SLICES, [[1, 3, "norm"], [0, 5, "forward"]], id="slices"),
        pytest.param(
            4,
            {**SLICES, "zero_optimization": {"stage": 1}},
            [[3, 3, "forward"], [0, 5, "updated"]],
            id="slices at stage 1",
        ),
        pytest.param(
            4,
            {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}},
            [[2, 3, "norm"], [1, 5, "forward"]],
            id="pipelines",
        ),
        pytest.param(
            2,
            {"zero_optimization": {"stage": 3, "param_persistence_threshold": 0}, "odd": True},
            [[1, 3, "norm"], [0, 5, "forward"]],
            id="weights that are used from outside",
        ),
        pytest.param(
            2,
            {
                "zero_optimization": {
                    "stage": 1,
                    "offload_optimizer": {"device": "cpu"},
                },
                "bf16": {"enabled": True},
            },
            [[1, 2, "updated"], [0, 4, "forward"]],
            id="states on the host",
        ),
        pytest.param(
            2,
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "overlap_step": True},
                },
                "bf16": {"enabled": True},
            },
            [[1, 2, "updated"], [0, 4, "gather"], [1, 6, "norm"]],
            id="updates under the next forward",
        ),
        pytest.param(
            2,
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "cpu"},
                    "param_persistence_threshold": 0,
                }
            },
            [[1, 3, "updated"], [0, 5, "forward"]],
            id="parameters on the host",
        ),
    ],
)
def test_new_processes_know_what_forwards_of_the_others_have_found(
    tmp_path: Path, ranks: int, config: dict, deaths: list
) -> None:
    wanted, _ = one_copy(tmp_path / "whole", config, ranks, [], script="blocks.py")
    found, _ = one_copy(tmp_path / "killed", config, ranks, deaths, script="blocks.py")
    assert found == wanted
    for rank, _, where in deaths:
        assert (tmp_path / "killed" / f"died.{rank}.{where}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SLICES, id="slices"),
        pytest.param(
            {
                "odd": True,
                "zero_optimization": {
                    "stage": 3,
                    "mics_shard_size": 2,
                    "param_persistence_threshold": 0,
                    "offload_optimizer": {"device": "cpu"},
                },
            },
            id="shard groups",
        ),
        pytest.param(
            {
                "zero_optimization": {
                    "stage": 2,
                    "mics_shard_size": 2,
                    "offload_optimizer": {"device": "cpu", "overlap_step": True},
                },
            },
            id="updates under the next forward",
        ),
    ],
)
def test_a_unit_of_two_ranks_comes_back(tmp_path: Path, config: dict) -> None:
    """It has other micro-batches meanwhile, so the model has no dropout."""
    config |= {"dropout": 0.0, "steps": 60, "waits": True}
    wanted, _ = one_copy(tmp_path / "whole", config, 4, [], script="blocks.py")
    found, err = one_copy(tmp_path / "killed", config, 4, [[3, 2, "forward"]], script="blocks.py")
    assert "ranks 2, 3 are there again" in err
    for rank in range(4):
        values, ranks = (found[rank]["end"]["end"][key] for key in ("values", "ranks"))
        assert ranks == [rank, 4]
        for name, value in wanted[0]["end"]["end"]["values"].items():
            torch.testing.assert_close(
                torch.tensor(values[name]), torch.tensor(value), rtol=1e-4, atol=1e-5
            )


def states_of(launcher_pid: int) -> list[Path]:
    """Folders of states in memory."""
    return list(Path("/dev/shm").glob(f"xds-states-{launcher_pid}-*"))


def launcher_of(keeper: ForkedLauncher) -> int:
    """The process below `xds` that has the store."""
    path = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children")
    wait_for(lambda: bool(path.read_text().split()), 10)
    return int(path.read_text().split()[0])


@pytest.mark.slow
def test_another_launcher_goes_on_with_the_versions_in_memory(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "recovery": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "steps": 30,
    }
    ends = []
    for number in range(2):
        out = tmp_path / str(number)
        out.mkdir()
        environ = {"OUT": str(out), "CONFIG": json.dumps(config), "DEATHS": "[]"}
        words = ["--recover", "--nproc-per-node", "2", "--log-dir", str(out / "logs")]
        words.append(str(SCRIPT.with_name("blocks.py")))
        keeper = ForkedLauncher(words, out, {**os.environ, **environ, "OMP_NUM_THREADS": "1"})
        first = last = launcher_of(keeper)
        if number:
            wait_for_lines(out / "rank1.jsonl", 5)
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: launcher_of(keeper) != first, 10)  # noqa: B023
            last = launcher_of(keeper)
        _, err = keeper.communicate(on_busy_machines(90))
        assert keeper.returncode == 0, err
        lines = [(out / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(2)]
        ends.append([each[-2:] for each in lines])
        assert not states_of(first) and not states_of(last)
    assert ends[0] == ends[1]
    assert "xds: the launcher was ended by SIGKILL: another one starts, and new ranks" in err
    repeated = [json.loads(line).get("step") for line in lines[0]]
    assert len(repeated) - len(set(repeated)) <= 2  # the last step, and the one that ran


@pytest.mark.slow
def test_the_other_pipelines_run_the_micro_batches_of_a_lost_one(tmp_path: Path) -> None:
    """Ranks 0 and 3 are a pipeline, 1 and 4, 2 and 5: three have 9 micro-batches in a step, two 4 and 5."""
    config = {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 3, "dropout": 0.0}
    config["gradient_clipping"] = 1.0
    wanted, _ = one_copy(tmp_path / "whole", config, 6, [], script="blocks.py", spares=0)
    last = max(step for step in wanted[0] if step != "end")
    for death in ([1, 3, "backward"], [4, 4, "norm"]):
        folder = tmp_path / death[2]
        found, _ = one_copy(folder, config, 6, [death], script="blocks.py", spares=0)
        for place, rank in enumerate((0, 2, 3, 5)):
            step, end = found[rank][last], found[rank]["end"]["end"]
            assert step["loss"] == pytest.approx(wanted[0][last]["loss"], rel=1e-5)
            assert step["samples"] == wanted[0][last]["samples"] and end["ranks"] == [place, 4]
            for name, value in wanted[0]["end"]["end"]["values"].items():
                near = {"rtol": 1e-4, "atol": 1e-6}
                torch.testing.assert_close(
                    torch.tensor(end["values"][name]), torch.tensor(value), **near
                )


def changed_run(
    folder: Path, stage: int, in_forward: str, changes: dict[str, str] | None = None
) -> ForkedLauncher:
    """Two ranks with one copy of the states, whose script does this in each forward. changes: of its text."""
    script = folder / "changed.py"
    text = SCRIPT.with_name("one_copy.py").read_text()
    for old, new in {'die("forward")': in_forward, **(changes or {})}.items():
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    config = {
        "zero_optimization": {"stage": stage},
        "recovery": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    environ = {"OUT": str(folder), "DEATHS": "[]", "OMP_NUM_THREADS": "1"}
    words = ["--recover", "--nproc-per-node", "2", str(script)]
    return ForkedLauncher(words, folder, {**os.environ, **environ, "CONFIG": json.dumps(config)})


@pytest.mark.slow
def test_a_rank_that_fails_again_and_again_ends_the_run(tmp_path: Path) -> None:
    launcher = changed_run(tmp_path, 1, 'assert not engine or RANK == 0, "bad sample"')
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 1 and "bad sample" in err
    why = "rank 1 ended with code 1 (AssertionError: bad sample)"
    assert f"{why}, and so did 3 of its new processes after the same step" in err


@pytest.mark.slow
def test_a_script_that_ends_its_engine_after_an_error_keeps_the_versions(tmp_path: Path) -> None:
    """Rank 1 raises once after step 5, when rank 0 is in the save of it."""
    once = 'assert RANK == 0 or (OUT / "once").touch() or engine.global_steps != 5, "once"'
    once = f'if engine.global_steps == 5 and not (OUT / "once").exists(): {once}'
    ends = "    try:\n        main()\n    finally:\n        engine.destroy()"
    changes = {"engine.save_checkpoint(": f"{once}\n                    engine.save_checkpoint("}
    launcher = changed_run(tmp_path, 1, "pass", {**changes, "    main()": ends})
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    assert "rank 1 ended with code 1 (AssertionError: once); the other ranks wait" in err
    assert "rank 0 ended with code 75" in err and "ranks 0, 1 go on after step 4" in err


STARTS = """
            child = __import__("subprocess").Popen(["sleep", "600"])
            with open(OUT / f"child{engine.global_steps}", "w") as file:
                file.write(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_lost_ranks_have_started_ends_with_the_run(tmp_path: Path) -> None:
    """Rank 1 is killed after step 3, and its new process after step 5."""
    is_time = 'not (OUT / f"child{engine.global_steps}").exists()'
    is_time = f"if engine and RANK == 1 and engine.global_steps in (3, 5) and {is_time}:"
    launcher = changed_run(tmp_path, 1, is_time + STARTS)
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    children = [(tmp_path / f"child{step}").read_text() for step in (3, 5)]
    wait_for(lambda: not any(Path("/proc", child).exists() for child in children), 10)  # are reaped


@pytest.mark.slow
def test_a_script_that_saves_again_after_the_run_went_back_does_not_wait(tmp_path: Path) -> None:
    """Rank 1 is killed before its copy of step 6 is complete. Rank 0 is after step 5 again, where it saves."""
    once = "if RANK == 1 and engine and engine.global_steps == 6:"
    kills = "(OUT / 'once').exists() or [(OUT / 'once').touch(), os.kill(os.getpid(), 9)]"
    once = f"{once} {kills}"
    changes = {"if engine.global_steps <= before:": "if False:"}
    launcher = changed_run(tmp_path, 2, once, changes)
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    assert "rank 1 was ended by SIGKILL" in err and err.count("saved checkpoint") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_what_a_rank_had_to_do_after_the_last_step_fails_the_run(
    tmp_path: Path, stage: int
) -> None:
    last = '        end = {"values"'
    ends = '        assert RANK, "no place"\n        time.sleep(RANK)\n'
    launcher = changed_run(tmp_path, stage, "pass", {last: ends + last})
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 1, err
    assert "so nobody did what rank 0 had still to do" in err and err.count("no place") > 1


@pytest.mark.slow
def test_a_save_in_the_background_is_written_again_while_steps_go_on(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "checkpoint": {"async_save": True}}
    _, err = one_copy(tmp_path / "killed", config, 2, [[1, 5, "forward"]])
    assert "global_step5 was not saved" in err and "another rank has failed meanwhile" in err
    saved = tmp_path / "killed" / "saved"
    names = ["global_step5", "global_step8", "latest"]
    assert sorted(path.name for path in saved.iterdir()) == names


@pytest.mark.slow
def test_a_run_whose_versions_are_lost_ends_with_a_sentence(tmp_path: Path) -> None:
    """Rank 1 ends in its first copy."""
    with pytest.raises(AssertionError) as failure:
        one_copy(tmp_path / "lost", {"zero_optimization": {"stage": 1}}, 2, [[1, 0, "copy"]])
    assert "no version of the states in memory that all of them share" in str(failure.value)
    assert "start the run again from its last checkpoint" in str(failure.value)


@pytest.mark.slow
def test_nothing_is_left_in_memory_where_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher = changed_run(tmp_path, 2, "import time; time.sleep(0.1)")
    first = launcher_of(launcher)
    pattern = f"xds-states-{first}-*/host0/rank*/*/step"
    wait_for(lambda: len(list(Path("/dev/shm").glob(pattern))) == 4, 60)
    launcher.send_signal(signal.SIGKILL)
    wait_for(lambda: not states_of(first), 10)


def wait_for_lines(path: Path, count: int) -> None:
    wait_for(lambda: path.exists() and path.read_text().count("\n") > count, 60)


def wait_for(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + on_busy_machines(seconds)
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "spares"), [(0, 0), (0, 1), (2, 1)])
def test_a_model_that_mixes_packed_samples_is_refused_after_a_failure_in_its_proof(
    tmp_path: Path, stage: int, spares: int
) -> None:
    words = ["--recover", "--nproc-per-node", "3", "--log-dir", str(tmp_path / "logs")]
    words += ["--spares", str(spares), str(SCRIPT.with_name("leaks.py"))]
    environ = {"OUT": str(tmp_path), "STAGE": str(stage), "OMP_NUM_THREADS": "1"}
    launcher = ForkedLauncher(words, tmp_path, {**os.environ, **environ})
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 1 and (tmp_path / "died").exists()
    assert "go on after step 0" in err
    assert "data_packing: Mixes lets tokens see other samples of their row" in err


# -- generations --------------------------------------------------------------------------------------------


def test_a_unit_that_is_not_in_the_newest_generation_is_refused() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    ranks = [(0,), (1,), (2,)]
    units = [Meeting(store, "recovery", unit, ranks) for unit in range(3)]
    lighthouse = Lighthouse(Store(store, "recovery", -1), 3)
    for unit in units[:2]:
        unit.announce(1)
    assert not lighthouse.is_ready()  # unit 2 cannot recover yet
    units[2].announce(1)
    assert lighthouse.is_ready() and lighthouse.min_units == 1 and lighthouse.units == ranks
    first = lighthouse.lose([2], "rank 2 did not answer")
    assert units[0].next_after(0, 1.0) == first
    second = lighthouse.lose([1], "rank 1 was ended by SIGKILL")
    assert not units[0].gather(first)  # it waits for unit 1 no longer
    assert units[0].next_after(0, 1.0) == second and units[0].gather(second)
    lighthouse.repeat_if_asked()
    assert lighthouse.generation == second  # nobody has asked
    with pytest.raises(PeerError, match="rank 2 is not in generation 2 of this run"):
        units[2].next_after(0, 1.0)
    with pytest.raises(PeerError, match="the launcher has named no generation after 2"):
        units[0].next_after(2, 0.1)
    lighthouse.say_ended([1])
    with pytest.raises(PeerError, match="rank 1 ended the script with code 0, and this rank waits"):
        units[0].next_after(2, 60.0)
    units[1].ask_again(second)  # it was too slow to open its group, and nobody has ended
    lighthouse.repeat_if_asked()
    assert units[0].next_after(2, 1.0) == Generation(3, second.units, second.reason)
    # a new process has the place of unit 2, whose old process runs on a host that could not be reached
    new = Meeting(store, "recovery", 2, ranks, process=5)
    new.ask_to_join(5)
    assert lighthouse.admit([2], {2: 5}) == [2]
    fourth = lighthouse.generation
    assert new.next_after(3, 1.0, is_new=True) == fourth == units[0].next_after(3, 1.0)
    with pytest.raises(PeerError, match="another process is rank 2 in generation 4 of this run"):
        units[2].next_after(0, 1.0)
    # the same where units train alone
    messages, start = Store(store, "recovery", 0), Generation(0, (0, 1, 2))
    assert Presence(messages, start, 0, 0).newest().units == (0, 2)
    assert Presence(messages, start, 2, 2, process=5).newest() == fourth
    for unit in (1, 2):
        with pytest.raises(PeerError, match=f"rank {unit} is not in generation"):
            Presence(messages, start, unit, unit).newest()


def opens_without_reports() -> list[bool]:
    device = torch.device("cpu")
    options = ({}, {"recovers": True})
    return [open_collectives(dist.group.WORLD, device, **each).watch.recovers for each in options]


def test_ranks_that_open_groups_again_do_not_ask_why_another_one_has_failed() -> None:
    assert run_processes(opens_without_reports, 2) == [[False, True]] * 2


def test_ranks_that_open_groups_do_not_wait_for_one_that_fails_meanwhile() -> None:
    store = HashStore()
    lighthouse = Lighthouse(Store(store, "recovery", -1), 2)
    lighthouse.units = [(0,), (1,)]
    meeting = Meeting(store, "recovery", 0, lighthouse.units)
    generation = lighthouse.lose([], "rank 1 is there again")
    fence = FencedStore(store, meeting, generation)
    later = threading.Timer(0.2, lighthouse.lose, ([1], "rank 1 was ended by SIGKILL"))
    later.start()
    with pytest.raises(RuntimeError, match="a newer generation has replaced it"):
        dist.ProcessGroupGloo(PrefixStore("groups", fence), 0, 2, timedelta(seconds=60))
    later.join()


# -- what is not built --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"recovery": {"copies": 2}}, "recovery.copies = 2: must be 1"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/"}}},
            'offload_param = "nvme": does not work with recovery.enabled',
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}},
            'type = "OneBitAdam": does not',
        ),
        (
            {"pipeline": {"stages": 2, "schedule": "zbv"}},
            'pipeline.schedule = "zbv": does not work with',
        ),
        (
            {
                "pipeline": {"stages": 2},
                "zero_optimization": {"stage": 1, "mics_shard_size": 2},
            },
            "stage of pipelines with mics_shard_size = 1: does not",
        ),
        (
            {"progressive_layer_drop": {"enabled": True}},
            "progressive_layer_drop.enabled = true: does not work",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(more: dict, named: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, **more}
    config["recovery"] = {"enabled": True, **more.get("recovery", {})}
    with pytest.raises(xds.ConfigError, match=named):
        xds.Config.load(config)


def test_numbers_of_units_that_cannot_recover_are_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "recovery": {"enabled": True}}
    with pytest.raises(
        xds.ConfigError, match="with one rank there is none that goes on; start at least 2"
    ):
        xds.Config.load(config, world_size=1)
    many = {**config, "recovery": {"enabled": True, "min_units": 3}}
    with pytest.raises(xds.ConfigError, match="min_units = 3: the run has 2 units"):
        xds.Config.load(many, world_size=2)
    section = xds.Config.load(config, world_size=16).recovery
    # sizes of buffers: a multiple of all numbers of units that can be left
    assert [section.least_units(n) for n in (2, 8, 12, 16)] == [1, 1, 1, 12]
    assert section.num_parts(8) == 840 and section.num_parts(16) == 21_840


def without_launcher() -> str:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "recovery": {"enabled": True},
    }
    data = [micro_batch(number, 0, 1)[0] for number in range(8)]
    with pytest.raises(xds.UsageError) as raised:
        xds.initialize(build("tied"), config, training_data=data)
    return str(raised.value)


def test_without_the_launcher_it_is_refused() -> None:
    for text in run_ranks(without_launcher, 2):
        assert "start the script with `xds --recover train.py`" in text
