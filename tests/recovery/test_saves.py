"""A rank fails while a checkpoint is written: those that go on write it again, or say that it is not there."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked_launcher import ForkedLauncher
from helpers import on_busy_machines

import xds
from xds.engine.checkpoint.save import SaveOptions
from xds.engine.last_save import LastSave, newest_path

SCRIPT = Path(__file__).with_name("saves.py")


def run(
    folder: Path, ranks: int, config: dict, where: str, deaths: list, spares: int = 1
) -> tuple[dict[int, dict], str]:
    """Run the script. Returns what each rank found that has come to its end, and what all ranks have said."""
    config = {
        **{"train_micro_batch_size_per_gpu": 2, "recovery": {"enabled": True}},
        **{"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **config},
    }
    environ = {"OUT": str(folder), "WHERE": where, "DEATHS": json.dumps(deaths)}
    environ |= {"CONFIG": json.dumps(config), "OMP_NUM_THREADS": "1"}
    words = ["--recover", "--nproc-per-node", str(ranks), "--spares", str(spares)]
    words += ["--log-dir", str(folder / "logs"), str(SCRIPT)]
    launcher = ForkedLauncher(words, folder, {**os.environ, **environ})
    _, err = launcher.communicate(on_busy_machines(90))
    assert launcher.returncode == 0, err
    assert len(list(folder.glob("died*"))) == len(deaths)
    said = "".join(path.read_text() for path in sorted((folder / "logs").glob("rank*.log")))
    found = {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json")}
    return found, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "where", "deaths", "spares", "in_background"),
    [
        pytest.param(2, 2, "at the end", [[1, 1]], 1, True, id="one copy"),
        pytest.param(3, 2, "at the end", [[0, 1], [1, 2]], 1, True, id="one copy, and again"),
        pytest.param(2, 2, "after step 2", [[0, 1]], 1, True, id="one copy, between steps"),
        pytest.param(2, 2, "at the end", [[0, 1]], 1, False, id="one copy, at once"),
        pytest.param(3, 0, "at the end", [[0, 1]], 0, True, id="units"),
        pytest.param(3, 0, "at the end", [[0, 1], [2, 2]], 0, True, id="units, and again"),
        pytest.param(3, 0, "at the end", [[2, 1], [0, 2]], 1, True, id="a unit that comes back"),
        pytest.param(2, 0, "after step 2", [[1, 1]], 0, True, id="units, between steps"),
        pytest.param(3, 0, "at the end", [[2, 1], [0, 2]], 1, False, id="units, at once"),
    ],
)
def test_the_ranks_that_go_on_write_it_again(
    tmp_path: Path,
    ranks: int,
    stage: int,
    where: str,
    deaths: list,
    spares: int,
    in_background: bool,
) -> None:
    config = {"zero_optimization": {"stage": stage}, "checkpoint": {"async_save": in_background}}
    found, said = run(tmp_path, ranks, config, where, deaths, spares)
    assert set(found) >= set(range(ranks)) - {rank for rank, _ in deaths}
    step = 2 if where == "after step 2" else 4
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        f"global_step{step}",
        "latest",
    ]
    state = xds.get_fp32_state_dict(tmp_path / "saved")
    for each in found.values():
        # it is counted once
        assert each["since_best"] == 0 and each["sums"] == next(iter(found.values()))["sums"]
        if step == 4:
            sums = {name: value.sum().item() for name, value in state.items()}
            assert each["sums"] == pytest.approx(sums)
    manifest = json.loads((tmp_path / "saved" / f"global_step{step}" / "manifest.json").read_text())
    assert manifest["state"]["counters"]["global_steps"] == step
    assert manifest["state"]["client_state"] == {"steps": step}
    assert (f"global_step{step} was not saved in" in said) == in_background
    assert ("; it is written again" in said) == in_background and "not written" not in said


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_a_save_of_an_earlier_step_is_named_and_leaves_nothing_that_loads(
    tmp_path: Path, stage: int
) -> None:
    config = {"zero_optimization": {"stage": stage}, "checkpoint": {"async_save": True}}
    found, said = run(tmp_path, 2, config, "after step 3", [[0, 1]])
    assert found
    assert "global_step3 was not saved in" in said and "; it is not written again" in said
    assert not list((tmp_path / "saved").glob("[!.]*"))


def test_a_new_process_is_told_of_a_save_as_json() -> None:
    options = SaveOptions(score=(torch.tensor(0.5), "max", 2))
    told = [LastSave().told(()), LastSave().told((Path("saved"), 7, {"epoch": 1}, options))]
    heard = LastSave().hear(json.loads(json.dumps(told)), {"epoch": 1})
    assert heard == ("saved", "7", {"epoch": 1}, SaveOptions(score=(0.5, "max", 2)))


def test_the_last_checkpoint_is_the_one_that_was_loaded_until_there_is_another_one() -> None:
    loaded, new = LastSave(), LastSave()
    loaded.loaded("/data/saved/global_step6")
    for every in ([loaded, new], [new, loaded]):
        assert newest_path([each.told(()) for each in every]) == "/data/saved/global_step6"
    new.made(SimpleNamespace(global_steps=8), ("/data/saved", None))
    for every in ([loaded, new], [new, loaded]):
        assert newest_path([each.told(()) for each in every]) == "/data/saved/global_step8"
