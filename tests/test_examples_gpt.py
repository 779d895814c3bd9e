"""Tests of whole runs of examples/gpt with a tiny model: new users run this example first."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt"
# the examples import the files beside them, which -P and PYTHONSAFEPATH forbid
ENV = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
TWO_RANKS = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2"]
ONE_PROCESS = [sys.executable]
TINY = "--layers 2 --width 32 --heads 2 --context 16 --steps 4 --validate-every 2 --sample 8"


def run(start: list[str], folder: Path, *options: str) -> str:
    """Run the example on its own source as text, in `folder`; its output."""
    text = folder / "text.py"
    text.write_text((EXAMPLE / "train.py").read_text() * 3)
    command = [*start, str(EXAMPLE / "train.py"), *TINY.split(), "--data", str(text), *options]
    done = subprocess.run(
        command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.contract
@pytest.mark.parametrize(
    ("start", "config"),
    [
        (TWO_RANKS, "zero3_bf16.json"),
        pytest.param(ONE_PROCESS, "zero2.json", marks=pytest.mark.slow),
    ],
)
def test_trains_validates_and_samples(start: list[str], config: str, tmp_path: Path) -> None:
    output = run(start, tmp_path, "--config", str(EXAMPLE / config))
    with (tmp_path / "runs" / "gpt" / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["validation_loss"] != "" for row in rows] == [False, True, False, True]
    # 256 bytes, nothing learned yet: ln(256) = 5.55
    assert all(5.0 < float(row["loss"]) < 6.0 for row in rows)
    assert all(float(row["gradient_norm"]) > 0 for row in rows)
    assert "validation loss 5." in output
    assert "\ndef " in output


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    command = [*ONE_PROCESS, str(EXAMPLE / "train.py"), "--data", str(text)]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "short.txt has 9 bytes of text" in done.stderr


# -- killed while it saves, and started again ---------------------------------------------------------------

LARGER = "--layers 2 --width 192 --heads 2 --context 16 --steps 14 --validate-every 3 --sample 0"
SAVING = "--checkpoints saved --save-every 2 --resume auto"


def command(start: list[str], folder: Path, *options: str) -> list[str]:
    text = folder / "text.py"
    text.write_text((EXAMPLE / "train.py").read_text() * 3)
    fixed = ["--config", str(EXAMPLE / "zero3.json"), "--data", str(text), *LARGER.split()]
    return [*start, str(EXAMPLE / "train.py"), *fixed, *options]


def ranks_of(pid: int) -> list[int]:
    """The launcher's children, without the guard that ends what they leave behind."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = sorted(int(one) for task in tasks for one in task.read_text().split())
    return [one for one in children if b"worker.py" in Path(f"/proc/{one}/cmdline").read_bytes()]


def kill_in_a_save(call: list[str], folder: Path, save: int, victims: str) -> None:
    """Start the run, and SIGKILL one rank, or everything, while save number `save` is half done."""
    saved, seen, ranks = folder / "saved", set[str](), list[int]()
    with (folder / "output.txt").open("w") as output:
        run = subprocess.Popen(call, cwd=folder, env=ENV, stdout=output, stderr=output)
    while run.poll() is None:
        if saved.is_dir():
            seen |= {path.name for path in saved.glob(".global_step*.tmp-*")}
        if len(seen) >= save:
            ranks = ranks_of(run.pid)
            assert len(ranks) == 2
            for pid in ranks[-1:] if victims == "one" else [run.pid, *ranks]:
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.0005)
    assert run.wait(60) != 0, (folder / "output.txt").read_text()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/stat").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def curve_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "gpt" / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["tokens_per_second"]
    return rows


def finish(call: list[str], folder: Path) -> str:
    done = subprocess.run(
        call, cwd=folder, env=ENV, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_killed_in_saves_and_resumed_it_equals_the_run_that_never_stopped(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    finish(command(TWO_RANKS, whole), whole)
    call = command(TWO_RANKS, torn, *SAVING.split())
    kill_in_a_save(call, torn, 2, "one")
    kill_in_a_save(call, torn, 3, "all")
    output = finish(call, torn)
    assert "resuming from saved/global_step" in output
    assert curve_of(torn) == curve_of(whole)
    assert (torn / "saved" / "latest").read_text() == "global_step14"
    assert not list((torn / "saved").glob(".*"))
    # any number of ranks: another part of the text now, so other losses from there on
    shutil.rmtree(torn / "saved" / "global_step14")
    finish(command(ONE_PROCESS, torn, *SAVING.split(), "--resume", "global_step8"), torn)
    rows = curve_of(torn)
    assert rows[:8] == curve_of(whole)[:8] and rows[8:] != curve_of(whole)[8:]
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 15)]


# -- asked to stop, and started again on other ranks --------------------------------------------------------

ELASTIC = "--config elastic.json --checkpoints runs/gpt/checkpoints --save-every 1000 --resume auto"


def elastic(folder: Path, num_ranks: int, steps: int) -> list[str]:
    text = folder / "text.py"
    text.write_text((EXAMPLE / "train.py").read_text() * 3)
    (folder / "elastic.json").write_text((EXAMPLE / "elastic.json").read_text())
    start = [*TWO_RANKS[:-1], str(num_ranks), str(EXAMPLE / "train.py")]
    sizes = f"{TINY} --sample 0 --steps {steps} --validate-every 1000 --data {text}"
    return [*start, *sizes.split(), *ELASTIC.split()]


@pytest.mark.slow
def test_an_elastic_run_asked_to_stop_goes_on_with_other_ranks(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    finish(elastic(whole, 2, 30), whole)
    with (torn / "output.txt").open("w") as output:
        run = subprocess.Popen(
            elastic(torn, 2, 30), cwd=torn, env=ENV, stdout=output, stderr=output
        )
    curve = torn / "runs" / "gpt" / "loss.csv"
    while run.poll() is None and not (curve.exists() and curve.read_text().count("\n") > 4):
        time.sleep(0.002)
    run.send_signal(signal.SIGTERM)
    said = (torn / "output.txt").read_text
    assert run.wait(60) == 143, said()
    (checkpoint,) = (torn / "runs" / "gpt" / "checkpoints").glob("global_step*")
    assert f"saved runs/gpt/checkpoints/{checkpoint.name} in" in said()
    assert len(curve_of(torn)) == int(checkpoint.name.removeprefix("global_step"))
    finish(elastic(torn, 3, 30), torn)
    rows, others = curve_of(torn), curve_of(whole)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert float(row["loss"]) == pytest.approx(float(other["loss"]), rel=1e-3)
