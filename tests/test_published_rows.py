"""The published runs: the file of rows is whole, and some predictions are those of the page."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks" / "planner"))
from published import CLASSES, Published, Result, Row, spearman  # noqa: E402

from xds.engine.config.config import parse_config  # noqa: E402
from xds.engine.planning.machine import READY, load_machine  # noqa: E402

PAGE = (ROOT / "docs" / "published-rows.md").read_text(encoding="utf-8")
PLANNED = ("C15-4x8", "C1-stage3", "C28-single-0000")


def on_page(row: Row) -> list[str]:
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {row.id} |"))
    return [cell.strip() for cell in line.split("|")]


def test_every_row_is_whole_and_on_the_page() -> None:
    published = Published()
    assert len({row.id for row in published.rows}) == len(published.rows) > 150
    for row in published.rows:
        parity = hashlib.sha256(row.id.encode()).digest()[0] % 2
        assert row.half == ("graded", "open")[parity], row.id
        assert row.source in published.sources
        assert row.published > 0
        assert row.cls in {*CLASSES, "offload", "zeropp"}
        assert on_page(row)[2] == row.half
        if row.cls != "closed form":
            assert row.model in published.models
            parse_config(row.config)
            published.machine(row)


def test_every_number_of_a_ready_machine_has_a_source() -> None:
    for path in READY.glob("*.json"):
        machine = load_machine(path.stem)
        tables = [*machine.matrix.values(), *machine.attention.values(), machine.memory]
        links = [link for by_name in machine.links.values() for link in by_name.values()]
        tables += [table for link in links for table in (link.latency, link.rate)]
        assert all(table.source and table.error for table in tables), path.name
        rates = machine.matrix_table("bf16")
        assert rates.near(8192, 8192, 8192) > 1.5 * rates.near(512, 512, 512), path.name


@pytest.mark.parametrize("name", PLANNED)
def test_the_page_has_what_is_predicted(name: str) -> None:
    published = Published()
    (row,) = (row for row in published.rows if row.id == name)
    result = published.predict(row)
    assert result.predicted == pytest.approx(float(on_page(row)[7]), rel=0.02)


def test_orders_are_compared_by_places() -> None:
    assert spearman([1, 2, 3], [10, 20, 25]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    row = Row("a", "C7", "dense", "open", 100.0, "s", "x", "")
    assert Result(row, 110.0).error == pytest.approx(0.1)
