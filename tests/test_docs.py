"""The README and the guides: their Python runs, their JSON is valid, and their links lead to files."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from helpers import run_processes

from xds import Config
from xds.launcher import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
GUIDES = [page for page in PAGES if "design" not in page.parts]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def _run(sources: list[str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for source in sources:
        exec(compile(source, "page", "exec"), names)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.contract
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_blocks_of_the_training_guide_run(world_size):
    run_processes(_run, world_size, blocks(ROOT / "docs" / "training.md", "python"))


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


def test_the_blocks_of_the_data_page_run_in_their_order(tmp_path, monkeypatch, capsys):
    """But for packing, the first section. Commands run in this process."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "data.md").read_text().partition("## Indexed files")[2]
    names: dict[str, object] = {"__name__": "page"}
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(compile(text, "docs/data.md", "exec"), names)
        else:
            program, *words = text.replace("--num-workers 2", "").split()
            assert (program, cli.main(words)) == ("xds", 0), text
    shown = capsys.readouterr().out
    assert "64 544 1024\n1.0 0.567" in shown and "128 576 1024" in shown
    assert "rows" in shown and "seqlen: " in shown and "vocab_rarity: " in shown
    assert len(names["rates"]) == len(names["sizes"]) > 10  # type: ignore[arg-type]


@pytest.mark.parametrize("page", ["from-accelerate.md", "from-fabric.md"])
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


@pytest.mark.contract
@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_json_blocks_are_valid_and_python_blocks_compile(page):
    for text in blocks(page, "json"):
        assert isinstance(json.loads(text), dict)
    for text in blocks(page, "python"):
        ast.parse(text)


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
