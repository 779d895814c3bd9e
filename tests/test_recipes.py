"""examples/recipes: its README has the memory that `xds plan` computes, and each recipe trains a tiny model."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from script_runs import run_script
from warm_ranks import warm

from xds.engine.config.config import parse_config
from xds.engine.planning.models import model_source
from xds.engine.planning.plan import make_plan
from xds.launcher import check
from xds.launcher import plan as plan_command
from xds.utils.sizes import size_text

pytest.importorskip("transformers", reason="pip install -e '.[test]'")
pytest.importorskip("peft", reason="pip install -e '.[test]'")

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"
PAGE = (FOLDER / "README.md").read_text()
RECIPES = sorted(path.stem for path in FOLDER.glob("*.json"))
QUICK = ("1b_two_cpu_machines", "7b_lora_24gb")  # the others differ in numbers and stages
SOME_SLOW = [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in RECIPES]
TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def words_of(recipe: str, command: str) -> list[str]:
    """What follows `command` in the README's line for `recipe`."""
    (line,) = [
        line
        for line in PAGE.splitlines()
        if line.startswith("xds ") and f"{command} {recipe}.json" in line
    ]
    return shlex.split(line.partition(f"{command} ")[2])


def row_of(recipe: str) -> str:
    """The recipe's line of the table: all ranks hold the same."""
    options = plan_command._parser().parse_args(words_of(recipe, "xds plan"))
    source = model_source(options.model, options.sequence_length)
    config = parse_config(options.config)
    ranks_per_host = options.ranks_per_host or plan_command.RANKS_PER_HOST
    (rank,) = make_plan(source, config, options.world_size, ranks_per_host).ranks
    host = rank.states["host"]
    device = sum(rank.states.values()) - host
    activations = rank.activations
    assert activations is not None
    sizes = [device, activations, device + activations]
    cells = [*map(size_text, sizes), size_text(host) if host else "-"]
    return " | ".join([f"| [{recipe}]({recipe}.json)", *cells, "computed |"])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft calls it
@pytest.mark.parametrize("recipe", SOME_SLOW)
@pytest.mark.quick("1b_two_cpu_machines")
def test_the_memory_in_the_readme_is_what_plan_computes(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(RECIPES) == 6
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(FOLDER)
    row = row_of(recipe)
    assert row in PAGE, "the table should have\n" + row


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_config_has_no_key_without_effect(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = words_of(recipe, "xds plan")[4]
    assert check.main([str(FOLDER / f"{recipe}.json"), "--world-size", ranks]) == 0
    assert "without effect" not in capsys.readouterr().out


def tiny_model(recipe: str, folder: Path) -> Path:
    """A folder with a model of the recipe's architecture."""
    name = recipe.partition("_")[0]
    config: dict[str, Any] = json.loads((FOLDER / "models" / name / "config.json").read_text())
    assert config.keys() >= TINY.keys()
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config | TINY))
    return model


@pytest.mark.parametrize("recipe", SOME_SLOW)
@pytest.mark.quick("1b_two_cpu_machines")
def test_it_trains_saves_and_resumes(recipe: str, tmp_path: Path) -> None:
    model, text = tiny_model(recipe, tmp_path), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    words = words_of(recipe, "train.py")
    replaced = {"--model": model, "--data": text, "--sequence-length": 16, "--output": "out"}
    for option, value in replaced.items():
        if option in words:
            words[words.index(option) + 1] = str(value)
    words[0] = str(FOLDER / words[0])
    for steps in (1, 2):
        more = ["--steps", str(steps), "--checkpoints", "saved", "--save-every", "1"]
        warm(2).run(run_script, str(FOLDER / "train.py"), str(tmp_path), *words, *more)
        assert (tmp_path / "saved" / "latest").read_text() == f"global_step{steps}"
    if "--output" in words:
        assert [name for name in os.listdir(tmp_path / "out") if name.endswith(".safetensors")]


def test_the_output_of_no_step_is_the_input(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tiny_model("7b_eight_gpus", tmp_path)
    config = AutoConfig.from_pretrained(model)
    whole = AutoModelForCausalLM.from_config(config).bfloat16()
    whole.save_pretrained(model)
    options = ["--model", str(model), "--steps", "0", "--output", "out"]
    words = [str(FOLDER / "7b_eight_gpus.json"), *options]
    warm(2).run(run_script, str(FOLDER / "train.py"), str(tmp_path), *words)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert all(map(torch.equal, whole.state_dict().values(), read.state_dict().values()))
