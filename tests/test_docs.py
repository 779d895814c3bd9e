"""The README and the guides: their Python runs, their JSON is valid, and their links lead to files."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from helpers import run_ranks

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


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_blocks_of_the_training_guide_run(world_size):
    run_ranks(_run, world_size, blocks(ROOT / "docs" / "training.md", "python"))


def test_the_first_example_of_the_readme_runs():
    run_ranks(_run, 1, blocks(ROOT / "README.md", "python")[:1])


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_json_blocks_are_valid_and_python_blocks_compile(page):
    for text in blocks(page, "json"):
        assert isinstance(json.loads(text), dict)
    for text in blocks(page, "python"):
        ast.parse(text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, target


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
