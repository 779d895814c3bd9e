"""Whole runs of examples/ with tiny models: new users run these first."""

from __future__ import annotations

import csv
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_launcher import ForkedLauncher
from helpers import run_processes
from script_runs import run_script
from warm_ranks import warm

from xds.launcher.cli import main
from xds.launcher.reporting.records import read_run

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "gpt"
# the examples import the files beside them, which -P and PYTHONSAFEPATH forbid
ENV = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
TWO_RANKS = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2"]
ONE_PROCESS = [sys.executable]
TINY = "--layers 2 --width 32 --heads 2 --context 16 --steps 5 --validate-every 2 --sample 8"


def text_in(folder: Path) -> Path:
    """The source of an example as a text."""
    text = folder / "text.py"
    text.write_text((EXAMPLE / "train.py").read_text() * 3)
    return text


def finish(command: list[str], folder: Path, **env: str) -> str:
    """The output of a command that must end without an error."""
    if command[:3] == TWO_RANKS[:3]:
        launcher = ForkedLauncher(command[3:], folder, ENV | env)
        out, err = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, out + err
        return out + err
    given: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run(command, cwd=folder, env=ENV | env, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def curve_of(folder: Path, name: str = "gpt") -> list[dict[str, float]]:
    """Step, loss, norm, and where there is one the validation loss."""
    run = read_run(str(folder / "runs" / name))
    rows = zip(run.steps, run.loss, run.norms, strict=True)
    found = {step: {"step": step, "loss": loss, "norm": norm} for step, loss, norm in rows}
    for samples, value in zip(*run.values.get("validation_loss", ((), ())), strict=True):
        found[run.step_at(samples)]["validation_loss"] = value
    return list(found.values())


def losses_of(source: str) -> list[float]:
    """The losses that a script prints."""
    torch.manual_seed(0)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, "script", "exec"), {})
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())]


@pytest.mark.contract
def test_the_difference_in_the_readme_turns_a_plain_loop_into_one_with_the_same_losses() -> None:
    (diff,) = re.findall(
        r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.M
    )
    lines = diff.splitlines(keepends=True)
    plain, sharded = (
        "".join(line[1:] or line for line in lines if line[0] != sign) for sign in "+-"
    )
    folder = EXAMPLES / "first"
    assert plain == (folder / "plain.py").read_text()
    assert sharded == (folder / "train.py").read_text()
    assert [sum(line[0] == sign for line in lines) for sign in "+-"] == [6, 4]
    expected = losses_of(plain)
    assert len(expected) == 6 and expected[-1] < 0.7 * expected[0]
    for world_size in (1, 2):  # two ranks with the same batches
        for losses in run_processes(losses_of, world_size, sharded):
            assert losses == pytest.approx(expected, abs=0.0011)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("start", "config"),
    [
        (TWO_RANKS, "zero3_bf16.json"),
        pytest.param(ONE_PROCESS, "zero2.json", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_trains_validates_and_samples(start: list[str], config: str, tmp_path: Path) -> None:
    given = ["--data", str(text_in(tmp_path)), "--config", str(EXAMPLE / config)]
    output = finish([*start, str(EXAMPLE / "train.py"), *TINY.split(), *given], tmp_path)
    rows = curve_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert ["validation_loss" in row for row in rows] == [False, True, False, True, True]
    # 256 bytes, nothing learned yet: ln(256) = 5.55
    assert all(5.0 < row["loss"] < 6.0 and row["norm"] > 0 for row in rows)
    assert "validation loss 5." in output
    assert "\ndef " in output and "%|" not in output  # no progress bar in a file
    assert "xds: 5 steps in " in output and "xds report runs/gpt\n" in output
    assert main(["report", str(tmp_path / "runs" / "gpt")]) == 0
    page = (tmp_path / "runs" / "gpt" / "report.html").read_text()
    for part in (
        *("Loss", "Learning rate", "Gradient norm", "Tokens per second", "Memory of rank 0"),
        *("validation_loss", "Step 3 in time", "The run has ended.", "train.py", "torch", "AdamW"),
        *(("all_gather", "rank 1: data 1", "xds --nproc-per-node 2") * (start is TWO_RANKS)),
    ):
        assert part in page, part


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    data = runpy.run_path(str(EXAMPLE / "data.py"))
    with pytest.raises(SystemExit, match=r"short.txt has 9 bytes of text"):
        data["load_text"](text, 16)


# -- killed while it saves, and asked to stop ---------------------------------------------------------------

LARGER = "--layers 2 --width 192 --heads 2 --context 16 --steps 6 --validate-every 3 --sample 0"
SAVING = "--checkpoints saved --save-every 2 --resume auto"


def command(folder: Path, *options: str) -> list[str]:
    fixed = ["--config", str(EXAMPLE / "zero3.json"), "--data", str(text_in(folder))]
    return [*TWO_RANKS, str(EXAMPLE / "train.py"), *fixed, *LARGER.split(), *options]


def ranks_of(pid: int) -> list[int]:
    """The launcher's children, without the guard that ends what they leave behind."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = sorted(int(one) for task in tasks for one in task.read_text().split())
    return [one for one in children if b"worker.py" in Path(f"/proc/{one}/cmdline").read_bytes()]


def kill_in_a_save(call: list[str], folder: Path, save: int) -> None:
    """Start the run, and SIGKILL all of it while save number `save` is half done."""
    saved, seen, ranks = folder / "saved", set[str](), list[int]()
    with (folder / "output.txt").open("w") as output:
        run = subprocess.Popen(call, cwd=folder, env=ENV, stdout=output, stderr=output)
    while run.poll() is None:
        if saved.is_dir():
            seen |= {path.name for path in saved.glob(".global_step*.tmp-*")}
        if len(seen) >= save:
            ranks = ranks_of(run.pid)
            assert len(ranks) == 2
            for pid in (run.pid, *ranks):
                with suppress(ProcessLookupError):  # it has ended with its launcher
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.0005)
    assert run.wait(60) != 0, (folder / "output.txt").read_text()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/stat").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_in_a_save_and_resumed_it_equals_the_run_that_never_stopped(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    finish(command(whole), whole)
    call = command(torn, *SAVING.split())
    kill_in_a_save(call, torn, 2)
    assert "resuming from saved/global_step" in finish(call, torn)
    assert curve_of(torn) == curve_of(whole)
    assert (torn / "saved" / "latest").read_text() == "global_step6"
    assert not list((torn / "saved").glob(".*"))


ELASTIC = "--config elastic.json --checkpoints runs/gpt/checkpoints --save-every 1000 --resume auto"


def elastic(folder: Path, num_ranks: int, steps: int) -> list[str]:
    (folder / "elastic.json").write_text((EXAMPLE / "elastic.json").read_text())
    start = [*TWO_RANKS[:-1], str(num_ranks), str(EXAMPLE / "train.py")]
    sizes = f"{TINY} --sample 0 --steps {steps} --validate-every 1000 --data {text_in(folder)}"
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
    curve = torn / "runs" / "gpt" / "run.jsonl"
    while run.poll() is None and not (curve.exists() and curve.read_text().count('"step"') > 8):
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
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-3)


# -- images -------------------------------------------------------------------------------------------------

VISION = EXAMPLES / "vision"


def classify(folder: Path, num_ranks: int, *options: str) -> list[dict[str, str]]:
    """Run the example in `folder`; the rows of its epochs.csv."""
    folder.mkdir(exist_ok=True)
    start = [*TWO_RANKS[:-1], str(num_ranks), str(VISION / "train.py")]
    finish([*start, *options], folder, OMP_NUM_THREADS="1")
    with (folder / "runs" / "vision" / "epochs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.pop("images_per_second")
    return rows


def check_close(one: list[dict[str, str]], two: list[dict[str, str]]) -> None:
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for row, other in zip(one, two, strict=True):
        assert {key: float(value) for key, value in row.items()} == pytest.approx(
            {key: float(value) for key, value in other.items()}, rel=1e-3
        )


@pytest.mark.slow
def test_digits_have_the_same_curve_at_any_number_of_ranks_and_after_a_resume(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sklearn")
    length = ("--epochs", "2")
    stage_3 = ("--config", str(VISION / "zero3.json"))
    whole = classify(tmp_path / "whole", 2, *length)
    assert [row["step"] for row in whole] == ["14", "28"]
    assert float(whole[1]["validation_acc1"]) > float(whole[0]["validation_acc1"]) > 20
    check_close(classify(tmp_path / "one", 1, *length, "--channels-last"), whole)
    torn = tmp_path / "torn"
    assert len(classify(torn, 2, *length, *stage_3, "--steps", "20")) == 1  # in the second epoch
    again = ("--resume", "runs/vision/checkpoints", "--workers", "1")
    assert classify(torn, 2, *length, *again) == whole
    for name in ("best", "checkpoints"):
        assert (torn / "runs" / "vision" / name / "latest").read_text() == "global_step28"


@pytest.mark.slow
def test_dummy_images_train_a_model_with_batch_norm(tmp_path: Path) -> None:
    options = "--dummy --image-size 8 -a small_bn --steps 2 -p 1 --channels-last"
    assert classify(tmp_path, 2, *options.split()) == []
    assert main(["report", str(tmp_path / "runs" / "vision")]) == 0


@pytest.mark.slow
def test_statistics_of_batch_norm_are_those_of_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (row,) = classify(tmp_path, 2, "--epochs", "1", "-a", "small_bn")
    options = [*TWO_RANKS[:-1], "1", str(VISION / "train.py"), "-a", "small_bn", "-e"]
    output = finish([*options, "--resume", "runs/vision/best"], tmp_path, OMP_NUM_THREADS="1")
    assert f" * Acc@1 {float(row['validation_acc1']):.3f}" in output


@pytest.mark.slow
def test_digits_reach_97_percent(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    for arch in ("small", "small_bn"):
        rows = classify(tmp_path / arch, 2, "-a", arch)
        assert float(rows[-1]["validation_acc1"]) >= 97.0


# -- the other examples -------------------------------------------------------------------------------------


def test_3d_trains_saves_and_resumes(tmp_path: Path) -> None:
    tiny = "--layers 4 --width 32 --heads 4 --context 16 --checkpoints saved --save-every 2"
    for steps in (2, 4):
        options = [*tiny.split(), "--data", str(text_in(tmp_path)), "--steps", str(steps)]
        warm(4).run(run_script, str(EXAMPLES / "3d" / "train.py"), str(tmp_path), *options)
        assert (tmp_path / "saved" / "latest").read_text() == f"global_step{steps}"


def test_the_pipeline_resumes_with_another_schedule_and_stage(tmp_path: Path) -> None:
    folder = EXAMPLES / "pipeline"
    tiny = "--layers 4 --width 32 --heads 2 --context 16 --validate-every 2 --save-every 2"
    for config, steps in (("pipeline.json", 4), ("zero_bubble.json", 6)):
        chosen = f"--config {folder / config} --steps {steps} --checkpoints saved"
        options = [*tiny.split(), *chosen.split(), "--data", str(text_in(tmp_path))]
        warm(4).run(run_script, str(folder / "train.py"), str(tmp_path), *options)
        assert (tmp_path / "saved" / "latest").read_text() == f"global_step{steps}"
    rows = curve_of(tmp_path, "pipeline")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert ["validation_loss" in row for row in rows] == [False, True] * 3
    # 256 bytes, little learned yet: ln(256) = 5.55
    assert all(5.0 < row["loss"] < 6.0 and row["norm"] > 0 for row in rows)
    found = read_run(str(tmp_path / "runs" / "pipeline")).timelines[-1]
    assert [each.place[:2] for each in found.ranks] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    labels = [[span.label for span in each.spans if span.label] for each in found.ranks]
    assert sorted(labels[0]) == sorted(f"0{op}{number}" for op in "FB" for number in range(8))
    assert "1I7" in labels[2] or "1B7" in labels[2]
    line = (
        "xds --nproc-per-node 4 examples/pipeline/train.py --config examples/pipeline/pipeline.json"
    )
    assert line in (folder / "README.md").read_text()


def test_a_mixture_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    folder = EXAMPLES / "moe"
    tiny = "--layers 2 --width 20 --experts 4 --checkpoints saved"
    for steps in (2, 4):
        options = [*tiny.split(), "--data", str(text_in(tmp_path)), "--steps", str(steps)]
        warm(2).run(run_script, str(folder / "train.py"), str(tmp_path), *options)
    rows = curve_of(tmp_path, "moe")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    (layer, _) = read_run(str(tmp_path / "runs" / "moe")).experts.layers
    assert sum(layer.counts) == 2 * 8 * 128 * 2  # ranks, samples, tokens, choices
    assert "xds --nproc-per-node 2 examples/moe/train.py" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_a_model_of_transformers_trains_and_samples(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = "--architecture llama --context 16 --steps 3 --sample 4 --data"
    script = str(EXAMPLES / "huggingface" / "train.py")
    output = finish([*TWO_RANKS, script, *options.split(), str(text_in(tmp_path))], tmp_path)
    assert "step     3: loss 5." in output and "\ndef " in output


@pytest.mark.slow
def test_the_trainer_trains_evaluates_saves_resumes_and_generates(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = str(EXAMPLES / "huggingface" / "trainer.py")
    options = f"--context 16 --data {text_in(tmp_path)} --eval_steps 2 --save_steps 2"
    options += (
        f" --gradient_accumulation_steps 2 --output_dir {tmp_path / 'out'} --disable_tqdm true"
    )

    def run(more: str) -> str:
        command = [*TWO_RANKS, "--as-deepspeed", script, *options.split(), *more.split()]
        return finish(command, tmp_path, OMP_NUM_THREADS="1")

    whole = run("--max_steps 4")
    assert "step 2: eval loss 5." in whole and "\ndef " in whole
    resumed = run(f"--max_steps 4 --resume_from_checkpoint {tmp_path / 'out' / 'checkpoint-2'}")
    assert "step 2:" not in resumed
    for told in ("step 4: eval loss", "def "):
        (one,), (two,) = (
            [line for line in output.splitlines() if line.startswith(told)]
            for output in (whole, resumed)
        )
        assert one == two
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_gpt_packs_paragraphs(tmp_path: Path) -> None:
    """The losses of packed rows are those of one paragraph a row, and the script trains on them."""
    from xds.engine.config.sections import DataPacking
    from xds.engine.data.packing import packed_loader

    model, data = (runpy.run_path(str(EXAMPLE / name)) for name in ("model.py", "data.py"))
    text = text_in(tmp_path)
    paragraphs = data["Paragraphs"](text.read_bytes(), 16)
    columns = {"tokens": 0, "targets": -100}
    ranks = {"micro_batch_size": 2, "rank": 0, "world_size": 1, "step_rows": 2}
    batch = next(iter(packed_loader(paragraphs, DataPacking(tokens=16, columns=columns), **ranks)))
    torch.manual_seed(0)
    gpt = model["GPT"](model["Shape"](layers=2, width=16, heads=2, context=16))
    tokens, targets, positions = (batch[name] for name in ("tokens", "targets", "position_ids"))
    found = gpt(tokens, targets, positions, model["within_samples"](positions))
    total, number = 0.0, 0
    for row, wanted, places in zip(tokens, targets, positions, strict=True):
        starts = [*(places == 0).nonzero().view(-1).tolist(), len(row)]
        for start, stop in zip(starts, starts[1:], strict=False):
            if wanted[start] != -100:  # not padding
                loss = gpt(row[None, start:stop], wanted[None, start:stop])
                total, number = total + loss.item() * (stop - start), number + stop - start
    assert number > 20 and found.item() == pytest.approx(total / number, rel=1e-6)
    options = ["--config", str(EXAMPLE / "packed.json"), "--data", str(text), *TINY.split()]
    finish([*ONE_PROCESS, str(EXAMPLE / "train.py"), *options], tmp_path)
    assert len(curve_of(tmp_path)) == 5


@pytest.mark.slow
def test_a_policy_learns_what_is_rewarded_with_the_same_rewards_at_each_stage(
    tmp_path: Path,
) -> None:
    script = str(EXAMPLES / "generation" / "train.py")
    sharded, whole = (
        finish([*TWO_RANKS, script, "--stage", stage, "--steps", "20", "--save", stage], tmp_path)
        for stage in ("3", "0")
    )
    rewards = re.findall(r"step \d+: reward ([\d.]+)", sharded)
    assert rewards == re.findall(r"step \d+: reward ([\d.]+)", whole)
    assert float(rewards[-1]) > float(rewards[0]) + 0.2
    assert (tmp_path / "3" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["spawn.py", "with_submitit.py --cluster local", "ray_train.py"])
def test_a_library_that_starts_the_ranks_itself(words: str, tmp_path: Path) -> None:
    library = {"with_submitit.py": "submitit", "ray_train.py": "ray"}.get(words.split()[0])
    if library:
        pytest.importorskip(library)
    script, *options = words.split()
    command = [sys.executable, str(ROOT / "examples" / "launching" / script), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "2 ranks: loss" in done.stdout or done.stdout.startswith("[(2, "), done.stdout
