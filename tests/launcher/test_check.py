"""`xds check`: its output and its exit code."""

import json
import os
import threading

import pytest

from xds.launcher import cli
from xds.launcher.check import main

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "adamw", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "contiguous_gradients": False},
    "wandb": {"enabled": True, "project": "mine"},
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def test_it_prints_the_choices_and_what_has_no_effect(path, capsys):
    assert main([path, "--world-size", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0].endswith("config.json resolved for 8 data-parallel ranks:") and "{" not in out
    for line in (
        "train_batch_size = 64: 4 samples per forward x 2 accumulation steps x 8 ranks = 64 samples per update",
        "zero_optimization.stage = 2: the optimizer state and the gradients are sharded over the "
        "ranks",
        "bf16.enabled = true: parameters and gradients are bf16, the master fp32",
        "optimizer = AdamW(lr=0.0001): the optimizer, unless the script passes one",
        'wandb.project = "mine": project',
    ):
        assert line in lines
    assert any(line.startswith("zero_optimization.contiguous_gradients: ") for line in lines)
    assert any(line.startswith("gradient_clipping is not given") for line in lines)


def test_keys_without_effect_are_told_beside_mistakes(capsys):
    for wrong in ({"train_batch_size": 0}, {"train_micro_batch_size_per_gpu": 5}, {"sequence": 2}):
        assert main([json.dumps(CONFIG | wrong), "--world-size", "8"]) == 2
        out, err = capsys.readouterr()
        problems, idle = err.split("\n\nAccepted without effect:\n")
        assert out == "" and next(iter(wrong)) in problems
        assert idle.startswith("  zero_optimization.contiguous_gradients: ")


def test_what_a_trainer_fills_in_is_no_error_and_stays_auto(capsys):
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "bfloat16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }
    text = json.dumps(config)
    assert main([text, "--world-size", "2", "--auto", "optimizer.params.lr=1e-3"]) == 0
    out = capsys.readouterr().out
    assert "train_batch_size = 16: 8 samples per forward" in out and "AdamW(lr=0.001" in out
    filled = out.partition("--auto KEY=VALUE tries others:\n")[2].partition("\n\n")[0]
    assert [line.split(" = ")[0].strip() for line in filled.splitlines()] == [
        "bf16.enabled",
        "optimizer.params.betas",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ]
    assert main([text, "--json"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["train_batch_size"] == resolved["bf16"]["enabled"] == "auto"
    assert resolved["optimizer"]["params"] == {"lr": "auto", "betas": "auto"}
    assert main([json.dumps(resolved)]) == 0


def test_json_only_reads_back(path, capsys):
    assert main([path, "--world-size", "8", "--json"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["gradient_accumulation_steps"] == 2
    assert main([json.dumps(resolved), "--world-size", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == resolved


def test_complaints_go_to_stderr_all_at_once(capsys):
    text = json.dumps({"train_batch_size": "5", "fp16": {"enabled": 1}, "stage": 2})
    assert main([text, "--world-size", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "config text: 3 problems" in err
    for start in ("fp16.enabled = 1", "stage = 2", 'train_batch_size = "5"'):
        assert f"\n  - {start}: " in err


def test_auto_is_filled_from_the_command_line(capsys):
    text = json.dumps(
        {
            "train_batch_size": 8,
            "optimizer": {"type": "auto", "params": {"lr": "auto", "betas": "auto"}},
        }
    )
    assert main([text]) == 2
    assert 'optimizer.type = "auto"' in capsys.readouterr().err
    filled = ["optimizer.type=Lion", "optimizer.params.lr=1e-3", "optimizer.params.betas=[0.9,0.9]"]
    assert main([text, *(word for each in filled for word in ("--auto", each))]) == 0
    assert "Lion(lr=0.001, betas=[0.9, 0.9])" in capsys.readouterr().out
    assert main([text, "--auto", "lr"]) == 2
    assert "must be KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "elastic"])
@pytest.mark.parametrize("given", ["0", "two", "9" * 5000])
def test_a_world_size_that_is_none(command, given, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "--world-size", given, "{}"])
    told = capsys.readouterr().err
    assert "--world-size: " in told
    assert "whole number from 1" in told or len(given) > 400


PIPELINE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "pipeline": {"stages": 4, "schedule": "interleaved_1f1b"},
}


def test_it_explains_the_cut(capsys):
    assert main([json.dumps(PIPELINE), "--world-size", "16"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    data = "4 data-parallel ranks"
    assert lines[0] == f"config text resolved for 16 ranks: 4 pipeline stages x {data}:"
    samples = f"2 samples per forward x 8 accumulation steps x {data} = 64 samples per update"
    assert f"train_batch_size = 64: {samples}" in lines
    assert (
        "pipeline: 4 stages, each of 2 chunks: the model is cut into 8 parts, in the order of "
        '"interleaved_1f1b"; 4 ranks hold one model; with 8 micro-batches in a step, a rank waits 15.8% of the '
        "time if all stages are equally fast"
    ) in lines
    assert main([json.dumps(PIPELINE)]) == 0
    alone = "config text resolved for 4 ranks: 4 pipeline stages x 1 data-parallel rank:"
    assert capsys.readouterr().out.startswith(alone)
    assert main([json.dumps(PIPELINE), "--world-size", "6"]) == 2
    assert "pipeline.stages (4) x data = 6 ranks" in capsys.readouterr().err


def test_it_shows_the_product_of_the_axes(capsys):
    config = PIPELINE | {"tensor_parallel": {"tp_size": 2}}
    assert main([json.dumps(config), "--world-size", "16"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    product = "4 pipeline stages x 2 data-parallel ranks x 2 tensor ranks"
    assert lines[0] == f"config text resolved for 16 ranks: {product}:"
    assert f"ranks: {product} = 16 ranks" in lines
    both = {"tensor_parallel": {"tp_size": 2}, "sequence_parallel_size": 2}
    assert main([json.dumps(both | {"train_batch_size": 4}), "--world-size", "8"]) == 0
    product = "2 data-parallel ranks x 2 sequence ranks x 2 tensor ranks"
    assert f"resolved for 8 ranks: {product}:" in capsys.readouterr().out


@pytest.mark.parametrize("text", ['{"train_batch_size": 8}', '{"train_batch_size": 8, "gpus": 2}'])
def test_a_pipe_is_read_once(text, tmp_path, capsys):
    """As `xds check <(make-config)` gives it: what is read is gone."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
    writer.start()
    code = main([str(tmp_path / "pipe")])
    writer.join()
    said = capsys.readouterr()
    assert ("pipe resolved for" in said.out) if code == 0 else ("gpus" in said.err), said
    assert "no data" not in said.err and code == (2 if "gpus" in text else 0)
