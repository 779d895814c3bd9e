"""Experiments of the tuners: how they end, what is written where, and what goes on after one that failed."""

from __future__ import annotations

import argparse
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from searched_models import DATA, SOURCE, machine

import xds
from xds.engine.planning.goodput import goodput_of
from xds.engine.planning.models import FunctionModel, ResizedBatches
from xds.engine.planning.search import Goal, search
from xds.engine.planning.seconds import step_seconds
from xds.launcher.cli import main
from xds.launcher.command_line.options import read
from xds.launcher.tuning import autotuning, confirm
from xds.launcher.tuning.experiments import Outcome, read_metrics, run_experiment

LOCAL = ["--launcher", "local", "--nproc-per-node", "1", "--no-python"]


def script(folder: Path, text: str) -> str:
    path = folder / "train.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_a_rank_that_is_killed_and_one_without_memory_have_their_reasons(tmp_path: Path) -> None:
    killed = run_experiment([*LOCAL, script(tmp_path, "kill -9 $$")], tmp_path / "killed")
    assert killed.kind == "killed" and "killed by SIGKILL" in killed.reason
    text = (
        "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.' >&2; exit 1"
    )
    full = run_experiment([*LOCAL, script(tmp_path, text)], tmp_path / "full")
    assert full.kind == "out of memory" and "2.00 GiB" in full.reason


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    train = script(tmp_path, f"echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 600")

    def interrupt(*_: object) -> None:
        if pid.exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_experiment([*LOCAL, train], tmp_path / "run", most_seconds=120)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    number = int(pid.read_text())
    end = time.monotonic() + 10
    while time.monotonic() < end and Path(f"/proc/{number}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{number}").exists()


# -- DeepSpeed's autotuner -------------------------------------------------------------------------------

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": "all"},
    "autotuning": {
        "enabled": True,
        "overwrite": False,
        "arg_mappings": {
            "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
            "gradient_accumulation_steps ": "--gradient_accumulation_steps",
        },
    },
}


def fake_runs(monkeypatch: pytest.MonkeyPatch, most: int) -> list[list[str]]:
    """Experiments that are fastest at 5 samples and stage 1, and out of memory above `most`."""
    started: list[list[str]] = []

    def run(words: list[str], folder: Path, most_seconds: float | None = None) -> Outcome:
        started.append(list(words))
        config = json.loads((folder / "ds_config.json").read_text())
        size, stage = (
            config["train_micro_batch_size_per_gpu"],
            config["zero_optimization"]["stage"],
        )
        if "model_info_path" in config["autotuning"]:
            info = {"num_params": 1000, "activation_mem_per_gpu": 10_000, "world_size": 2}
            info["memory_per_gpu"] = 100_000
            Path(config["autotuning"]["model_info_path"]).write_text(json.dumps(info))
            return Outcome("failed", "", 1.0, {})
        if size > most:
            return Outcome("out of memory", "out of memory", 1.0, {})
        speed = 100.0 - (size - 5) ** 2 - abs(stage - 1)
        metrics = {"throughput": speed, "latency": 1000 / speed}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        return Outcome("measured", "", 1.0, metrics)

    monkeypatch.setattr(autotuning, "run_experiment", run)
    return started


def test_autotuning_has_deepspeeds_folders_and_the_best_config_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(CONFIG))
    started = fake_runs(monkeypatch, most=6)
    words = ["--autotuning", "run", "--num_gpus", "2", "t.py", "--deepspeed", "ds.json"]
    words += ["--per_device_train_batch_size", "1"]
    best = autotuning.main(read(words), "run")
    results = Path("autotuning_results")
    assert {each.name for each in results.iterdir() if each.is_file()} == {
        *("summary.txt", "ds_config_optimal.json", "cmd_optimal.txt")
    }
    one = results / "z1_gas1_tmbspg1"
    assert {"cmd.txt", "ds_config.json", "exp.json", "metrics.json"} == {
        each.name for each in one.iterdir()
    }
    assert (results / "profile_model_info" / "model_info.json").exists()
    assert Path("autotuning_exps/z1_gas1_tmbspg1.json").exists()
    optimal = json.loads((results / "ds_config_optimal.json").read_text())
    assert optimal["zero_optimization"]["stage"] == 1 and "autotuning" not in optimal
    assert xds.Config.load(optimal, world_size=2).train_micro_batch_size_per_gpu == 5
    assert best is not None and best[:3] == ["--num_gpus", "2", "t.py"]
    assert best[best.index("--per_device_train_batch_size") + 1] == "5"
    assert best[best.index("--gradient_accumulation_steps") + 1] == "1"
    assert "z1_gas1_tmbspg5" in capsys.readouterr().out
    number = len(started)
    autotuning.main(read(words), "tune")  # overwrite is false: results are there
    failed = [words for words in started[number:]]
    assert len(failed) < number / 2


def test_autotuning_without_a_config_or_a_section_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--autotuning", "tune", "t.py"]) == 2
    assert "--autotuning: the script has none of --deepspeed_config" in capsys.readouterr().err
    path = tmp_path / "ds.json"
    path.write_text("{}")
    assert main(["--autotuning", "tune", "t.py", "--deepspeed", str(path)]) == 2
    assert "autotuning.enabled = true" in capsys.readouterr().err


def test_the_scripts_micro_batch_is_first_and_steps_fill_the_largest_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = {**CONFIG["autotuning"], "max_train_batch_size": 24}  # type: ignore[dict-item]
    Path("ds.json").write_text(
        json.dumps({**CONFIG, "zero_optimization": {}, "autotuning": section})
    )
    started = fake_runs(monkeypatch, most=6)
    words = ["--autotuning", "tune", "t.py", "--deepspeed", "ds.json"]
    autotuning.main(read([*words, "--per_device_train_batch_size", "4"]), "tune")
    names = [path.name for path in Path("autotuning_results").iterdir() if path.is_dir()]
    tried = {name for name in names if name.startswith("z0_")}
    assert "z0_gas1_tmbspg4" in tried and "z0_gas1_tmbspg1" not in tried
    assert {"z0_gas2_tmbspg5", "z0_gas2_tmbspg6", "z0_gas3_tmbspg4"} <= tried  # 12 samples a rank
    assert len(started) == len(tried) + 1  # and the profile
    summary = Path("autotuning_results/summary.txt").read_text()
    assert re.search(r"Tuning completed in 0:00:\S+ Total number of experiments: \d+\.", summary)


# -- xds tune --------------------------------------------------------------------------------------------


def test_runs_go_on_after_a_failed_one_and_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = search(SOURCE, DATA, machine(), Goal(2, 2, top=3)).fastest
    started = []

    def run(words: Any, folder: Path, most_seconds: float | None = None) -> Outcome:
        started.append(folder)
        if len(started) == 1:
            return Outcome("out of memory", "out of memory when it asked for 2 GiB", 1.0, {})
        metrics = {"latency": 1000 * (4 - len(started)), "peak_bytes": 10**9}
        return Outcome("measured", "", 1.0, metrics)

    monkeypatch.setattr(confirm, "run_experiment", run)
    options = argparse.Namespace(
        results=str(tmp_path), model="m:f", sequence_length=None, world_size=2, steps=2
    )
    options.trust_remote_code = False
    best = confirm.confirm(options, rows, machine())
    assert best is rows[2] or best is rows[1]
    text = capsys.readouterr().out
    assert "out of memory when it asked for 2 GiB" in text and "machine.json" in text
    assert confirm.confirm(options, rows, machine()) is best and len(started) == 3
    assert "xds tune" in (tmp_path / "machine.json").read_text()
    assert read_metrics(tmp_path / "results.json")


def test_ranks_of_one_host_need_no_links_between_hosts() -> None:
    source = ResizedBatches(FunctionModel("planned_models:llama"))  # its sequences can be cut
    alone = machine().model_copy(update={"links": {"host": machine().links["host"]}})
    fixed = {"pipeline": {"stages": 1}, "tensor_parallel": {"tp_size": 1}}
    fixed |= {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 2}
    found = search(source, {**DATA, **fixed}, alone, Goal(2, 2, top=2, seconds=1))
    assert found.num_points == 2 and found.rows[0].name == "data 2"


def tune(folder: Path, *more: str) -> int:
    (folder / "machine.json").write_text(machine().model_dump_json(exclude_none=True))
    words = ["tune", json.dumps(DATA), "--model", "searched_models:both", "--world-size", "2"]
    words += ["--machine", str(folder / "machine.json"), "--no-run", "--seconds", "1"]
    return main([*words, "--output", str(folder / "tuned.json"), *more])


def test_the_page_is_one_file_without_scripts_and_the_text_has_how_often_to_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "tuned.html"
    failures = ["--gpu-hours-between-failures", "1000", "--save-seconds", "10"]
    assert tune(tmp_path, "--html", str(page), *failures) == 0
    wanted = goodput_of(1000 * 3600 / 2, 10.0, 600.0)
    text = capsys.readouterr().out
    minutes = wanted.interval_seconds / 60
    assert (
        f"A failure every 500.00 h: save every {minutes:.1f} minutes. {wanted.useful:.1%}" in text
    )
    html = page.read_text()
    assert not re.search(r"<script|<link|\bsrc=|https?://|@import|url\(", html)
    tags = re.findall(r"<(table|tr|td|th|svg|figure|pre|h1|h2)\b", html)
    assert tags.count("table") == 2 and tags.count("svg") == 1 and tags.count("h2") == 4
    table = html.rpartition("<table>")[2].partition("</table>")[0]
    head, *rows = table.split("<tr>")[1:]
    assert all(row.count("<td>") == head.count("<th>") for row in rows) and rows


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpu-hours-between-failures", "1", "--save-seconds", "-1"], "save_seconds = -1.0"),
        (["--html", "no/such/folder/page.html"], "--html no/such/folder/page.html: no file can"),
    ],
)
def test_what_cannot_be_written_or_computed_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert tune(tmp_path, *more) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


def test_a_learned_machine_gives_what_was_measured() -> None:
    row = search(SOURCE, DATA, machine(), Goal(2, 2, top=1)).rows[0]
    learned = confirm.learn(machine(), [(2 * row.seconds.total, row)])
    assert step_seconds(row.plan, learned).total == pytest.approx(2 * row.seconds.total, rel=0.1)
