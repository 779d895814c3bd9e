"""The README and the guides: their Python runs, their JSON is a config, and their links lead to files.

tests/test_docs_commands.py has the commands. `pytest -n 0 -rP -k not_run tests/test_docs*.py` lists what is not
run, with the reason.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from docs_setups import SETUPS
from helpers import run_new_ranks, run_processes, run_ranks
from pages import LANGUAGES, PAGES, ROOT, blocks, blocks_of, indented_blocks, inline_code, name_of

from xds import Config

GUIDES = [page for page in PAGES if "design" not in page.parts]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# pages whose Python runs in a test of its own here; the others need what tests/docs_setups.py has
OWN_TESTS = {
    "CONTRIBUTING.md",
    "docs/training.md",
    "docs/start.md",
    "docs/from-accelerate.md",
    "docs/from-fabric.md",
    "examples/huggingface/README.md",
}
# blocks that no test runs: page, language, why, and what is checked instead
NOT_RUN = {
    (
        "docs/from-fabric.md",
        "python",
    ): "the block before the move runs where lightning is installed",
    ("CHANGELOG.md", "python"): "a release of the past",
    ("any page", "text"): "what a command prints, or a drawing",
    (
        "any page",
        "diff",
    ): "part of a file: both sides are Python; tests/test_examples.py runs the README's",
    ("examples/launching/kubernetes.yaml", "yaml"): "needs a cluster: its command line is read",
}


def _run(sources: list[str], folder: str = "") -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for source in sources:
        text = source.replace('"out"', repr(folder)) if folder else source
        exec(compile(text, "page", "exec"), names)


# -- Python -------------------------------------------------------------------------------------------------


def test_the_python_of_every_page_is_run_by_a_test():
    pages = {name_of(page) for page in PAGES if blocks(page, "python")}
    assert pages - OWN_TESTS - {"CHANGELOG.md"} == SETUPS.keys()


@pytest.mark.parametrize("page", sorted(SETUPS))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    setup = SETUPS[page]
    sources = [source for source in blocks(ROOT / page, "python")]
    for block, source in enumerate(blocks(ROOT / page, "json")):
        (tmp_path / ("config.json" if not block else f"{block}.json")).write_text(source)
    for old, new in setup.edits.items():
        assert any(old in source for source in sources), old
        sources = [source.replace(old, new) for source in sources]
    monkeypatch.chdir(tmp_path)
    run = run_new_ranks if setup.is_process else run_ranks
    run(_run_in, setup.world_size, [textwrap.dedent(setup.before), *sources], str(tmp_path))


def _run_in(sources: list[str], folder: str) -> None:
    os.chdir(folder)
    _run(sources, os.path.join(folder, "out"))


@pytest.mark.contract
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_blocks_of_the_training_guide_run(world_size):
    run_processes(_run, world_size, blocks(ROOT / "docs" / "training.md", "python"))


def test_the_example_of_a_test_of_ranks_passes():
    names: dict[str, Any] = {"__name__": "page"}
    (source,) = [one for one in blocks(ROOT / "CONTRIBUTING.md", "python") if "def test_" in one]
    exec(compile(source, "CONTRIBUTING.md", "exec"), names)
    (test,) = [each for name, each in names.items() if name.startswith("test_")]
    test()


@pytest.mark.slow
def test_the_arguments_of_the_stock_trainer_are_made(tmp_path):
    pytest.importorskip("transformers")
    _, source = blocks(ROOT / "examples" / "huggingface" / "README.md", "python")
    environ = {**os.environ, "XDS_AS_DEEPSPEED": "1", "ACCELERATE_USE_CPU": "1"}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-c", source]
    subprocess.run(command, check=True, cwd=tmp_path, env=environ, timeout=300)


def _adapt(source: str, folder: str) -> None:
    os.chdir(folder)
    _run([source])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers renames
def test_the_adapters_of_the_example_are_saved_whole(tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    source, _ = blocks(ROOT / "examples" / "huggingface" / "README.md", "python")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run_new_ranks(_adapt, 2, source, str(tmp_path))
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    config |= {"hidden_size": 64, "intermediate_size": 128}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    adapters = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(adapters) == 14 and all(p.any() for p in adapters)  # they begin at zero
    assert (tmp_path / "runs" / "huggingface" / "run.jsonl").is_file()


def _start(sources: list[str], folder: str) -> dict[str, float]:
    """Run blocks of docs/start.md, with `folder` for its "out". The numbers that they end with."""
    names: dict[str, object] = {"__name__": "page"}
    for source in sources:
        here = source.replace('"out"', repr(folder))
        # the processes of the tests are daemons, which start no others
        here = here.replace("num_workers=2", "num_workers=0")
        exec(compile(here, "docs/start.md", "exec"), names)
    return {name: value for name, value in names.items() if isinstance(value, (int, float))}


def test_the_blocks_of_the_start_page_run_alike_on_any_number_of_ranks(tmp_path):
    plain, script, *pieces = blocks(ROOT / "docs" / "start.md", "python")
    (whole,) = run_processes(_start, 1, [plain, script, *pieces], str(tmp_path / "whole"))
    assert whole["accuracy"] > 0.9
    # two ranks stop after the first epoch, one goes on to the end
    for world_size, epochs in [(2, 1), (1, 3)]:
        stopped = script.replace("range(first, 3)", f"range(first, {epochs})")
        found = run_processes(_start, world_size, [stopped, *pieces[:1]], str(tmp_path / "resumed"))
        assert len({one["accuracy"] for one in found}) == 1
        assert found[0]["right"] / found[0]["seen"] == pytest.approx(found[0]["accuracy"])
    assert found[0]["accuracy"] == pytest.approx(whole["accuracy"], abs=2 / 501)


@pytest.mark.parametrize("page", ["from-accelerate.md", "from-fabric.md"])
@pytest.mark.quick("from-fabric.md")
def test_the_loop_after_a_move_runs_on_two_ranks(page, tmp_path):
    _, after = blocks(ROOT / "docs" / page, "python")
    first, second = run_processes(_start, 2, [after], str(tmp_path))
    assert first["accuracy"] == second["accuracy"] > 0.9
    assert (first["seen"], first["epoch"]) == (501, 2)


def test_the_start_page_has_twenty_keys_of_the_config():
    table = (ROOT / "docs" / "start.md").read_text().partition("## Twenty keys")[2]
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", table, re.MULTILINE)
    assert len(rows) == 20
    config: dict[str, object] = {}
    for key, example in rows:
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})  # type: ignore[assignment]
        section[last] = json.loads(example)
    # 2 stages x 2 data x 2 sequence x 2 tensor ranks
    assert Config.load(config).resolve(16).train_batch_size == 32


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_the_loop_before_a_move_runs(library, tmp_path):
    pytest.importorskip(library)
    page = {"accelerate": "from-accelerate.md", "lightning": "from-fabric.md"}[library]
    before, _ = blocks(ROOT / "docs" / page, "python")
    (tmp_path / "before.py").write_text(before.replace("devices=2", "devices=1"))
    environ = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "before.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, timeout=300, check=True, capture_output=True, text=True
    )
    assert float(done.stdout.split()[-1]) > 0.9  # accuracy


# -- other blocks -------------------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_json_is_a_config_and_python_compiles(page):
    for text in blocks(page, "json"):
        resolved_by_any_ranks(json.loads(text))
    for code in inline_code(page, tables=False):  # tables have values of keys
        if code.startswith('{"') and code.endswith("}"):
            resolved_by_any_ranks(json.loads(code))
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "diff"):
        for drop in "-+":
            lines = [line[1:] for line in text.splitlines() if not line.startswith(drop)]
            ast.parse(textwrap.dedent("\n".join(lines)))


def resolved_by_any_ranks(config: dict[str, Any]) -> None:
    """Config.load raises where a key or a value is wrong, `resolve` where numbers of ranks do not divide."""
    if not {"train_batch_size", "train_micro_batch_size_per_gpu", "elasticity"} & config.keys():
        config = {"train_micro_batch_size_per_gpu": 1, **config}
    Config.load(config).resolve(12 if "elasticity" in config else 16)


def test_every_block_says_what_it_is():
    for page in PAGES:
        for block in blocks_of(page):
            assert block.language in LANGUAGES, f"{name_of(page)}: of which language?\n{block.text}"
        assert indented_blocks(page) == [], f"{name_of(page)}: write ```text instead of indentation"


def test_what_is_not_run_has_a_reason():
    for (page, language), reason in NOT_RUN.items():
        print(f"not run: {language} of {page}: {reason}")
    used = {block.language for page in PAGES for block in blocks_of(page)}
    assert used <= {"python", "bash", "json"} | {language for _, language in NOT_RUN}


# -- links --------------------------------------------------------------------------------------------------


def anchors_of(file: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings():
    for page in PAGES:
        for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), (page, target)
            if heading and file.suffix == ".md":
                assert heading in anchors_of(file), (page, target)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
