"""The published runs: the file of rows is whole, and some predictions are those of the page."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from math import comb
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks" / "planner"))
from as_run import with_overlapped_sums, with_tokens_once_a_host  # noqa: E402
from published import CLASSES, Published, Result, Row, spearman  # noqa: E402

from xds.engine.config.config import Config, parse_config  # noqa: E402
from xds.engine.planning.activations import Activations  # noqa: E402
from xds.engine.planning.machine import READY, load_machine  # noqa: E402
from xds.engine.planning.plan import Plan  # noqa: E402
from xds.engine.planning.work import Kernel  # noqa: E402
from xds.ops.comm.fake import Message, Start, Wait  # noqa: E402
from xds.ops.mesh import Mesh  # noqa: E402

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
@pytest.mark.quick("C15-4x8")
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


def test_messages_of_tensor_ranks_travel_beside_the_products_next_to_them() -> None:
    product = Kernel("matrix", "mm", "bf16", (1, 8, 8, 8), 10)
    message = Message("all_to_all", ("tensor",), 1, 2, 1)
    small, large = Counter({product: 1}), Counter({product: 9})
    events = [Start(0, message), Wait(0), large, Start(1, message), Wait(1), small]
    plan = Plan(
        *("", Config(), Mesh(1, 1, 1, 2), 8, 1, (), None, ()),
        observed={0: Activations(forward={0: events}, backward={})},  # type: ignore[arg-type]
    )
    moved = with_overlapped_sums(plan).observed[0].forward[0]
    assert moved == [Start(0, message), Start(1, message), large, Wait(0), Wait(1), small]


def test_a_token_that_crosses_once_to_a_host_makes_exchanges_faster() -> None:
    machine = load_machine("h100-ndr")
    quick = with_tokens_once_a_host(machine, 64, 8, 256, 8)
    old, new = machine.links["hosts"]["any"], quick.links["hosts"]["all_to_all"]
    ranks = 56 * (1 - comb(252, 8) / comb(256, 8))
    hosts = 7 * (1 - comb(224, 8) / comb(256, 8))
    assert new.rate.at(64, 1e8) / old.rate.at(64, 1e8) == pytest.approx(ranks / hosts)
    assert with_tokens_once_a_host(machine, 8, 8, 256, 8) is machine
