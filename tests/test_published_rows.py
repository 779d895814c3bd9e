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
from as_run import (  # noqa: E402
    ROWS,
    with_hidden_share,
    with_overlapped_sums,
    with_plain_exchanges,
    with_rings,
    with_tokens_once_a_host,
)
from published import (  # noqa: E402
    CLASSES,
    TABLES,
    Published,
    Result,
    Row,
    markdown,
    on_page,
    spearman,
)

from xds.engine.config.config import Config, parse_config  # noqa: E402
from xds.engine.planning.activations import Activations  # noqa: E402
from xds.engine.planning.machine import READY, load_machine  # noqa: E402
from xds.engine.planning.plan import Plan, RankPlan  # noqa: E402
from xds.engine.planning.work import Kernel  # noqa: E402
from xds.ops.comm.fake import Message, Start, Wait  # noqa: E402
from xds.ops.mesh import Mesh  # noqa: E402

PAGE = (ROOT / "docs" / "published-rows.md").read_text(encoding="utf-8")
PLANNED = ("C15-4x8", "C1-stage3", "C28-single-0000")


def cells_of(row: Row) -> list[str]:
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
        assert cells_of(row)[2] == row.half
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
    assert result.predicted == pytest.approx(float(cells_of(row)[7]), rel=0.02)


def test_a_page_keeps_the_numbers_of_rows_that_are_not_predicted() -> None:
    published = Published()
    known = on_page(PAGE, published.rows)
    assert sum(each.predicted is not None for each in known) > 130
    assert PAGE.endswith("\n".join(markdown(known, published)) + "\n")
    assert PAGE.count(TABLES) == 2


def test_orders_are_compared_by_places() -> None:
    assert spearman([1, 2, 3], [10, 20, 25]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    row = Row("a", "C7", "dense", "open", 100.0, "s", "x", "")
    assert Result(row, 110.0).error == pytest.approx(0.1)


PRODUCT = Kernel("matrix", "mm", "bf16", (1, 8, 8, 8), 10)


def plan_of(events: list[object], ranks: tuple[RankPlan, ...] = ()) -> Plan:
    """A plan with one block, whose forward has `events`."""
    seen = Activations(forward={0: events}, backward={0: events})
    return Plan(
        *("", Config(), Mesh(1, 1, 1, 2), 8, 1, ranks, None, ()),
        observed={0: seen},
    )


def test_messages_of_tensor_ranks_travel_beside_the_products_next_to_them() -> None:
    message = Message("all_to_all", ("tensor",), 1, 2, 1)
    small, large = Counter({PRODUCT: 1}), Counter({PRODUCT: 9})
    events = [Start(0, message), Wait(0), large, Start(1, message), Wait(1), small]
    moved = with_overlapped_sums(plan_of(events)).observed[0].forward[0]
    assert moved == [Start(0, message), Start(1, message), large, Wait(0), Wait(1), small]


def test_a_token_that_crosses_once_to_a_host_makes_exchanges_faster() -> None:
    machine = load_machine("h100-ndr")
    quick = with_tokens_once_a_host(machine, 64, 8, 256, 8)
    old, new = machine.links["hosts"]["any"], quick.links["hosts"]["all_to_all"]
    ranks = 56 * (1 - comb(252, 8) / comb(256, 8))
    hosts = 7 * (1 - comb(224, 8) / comb(256, 8))
    assert new.rate.at(64, 1e8) / old.rate.at(64, 1e8) == pytest.approx(ranks / hosts)
    assert with_tokens_once_a_host(machine, 8, 8, 256, 8) is machine


def test_a_ring_gathers_keys_and_sends_their_gradients_around() -> None:
    exchange = Message("all_to_all", ("sequence",), 7, 4, 3)
    attention = Kernel("attention", "sdpa", "bf16", (8, 64, 64, 16, 1), 10)
    kernels = Counter({attention: 1})
    events = [Start(0, exchange), Wait(0), kernels, Start(1, exchange), Wait(1)]
    seen = with_rings(plan_of(events), 100).observed[0]
    (fused,) = (kernel for kernel in seen.forward[0][0] if kernel.name == "fused")  # type: ignore[attr-defined]
    assert fused.size_bytes == 800 + 1000
    gather = exchange._replace(operation="all_gather", size_bytes=3 * 400)
    assert seen.forward[0][1:] == [Start(-1, gather), Wait(-1)]
    sent = [event.message for event in seen.backward[0] if isinstance(event, Start)]
    assert sent == [gather] + 4 * [exchange._replace(operation="send", size_bytes=800)]


def test_plain_exchanges_send_a_token_once_for_each_expert() -> None:
    exchange = Message("all_to_all", ("data",), 100, 8, 7)
    kernels = Counter({PRODUCT: 1})
    plan = plan_of([Start(0, exchange), Wait(0), kernels])
    cost, start, *rest = with_plain_exchanges(plan, 1.5, 64, beside=False).observed[0].forward[0]
    assert cost == Counter({Kernel("other", ROWS, "fp32", (), 64): 1})
    assert start == Start(0, exchange._replace(size_bytes=150))
    assert rest == [Wait(0), kernels]
    beside = with_plain_exchanges(plan, 1.5, 64, beside=True).observed[0].forward[0]
    assert beside == [start, cost, kernels, Wait(0)]
    other = plan_of([kernels])
    assert with_plain_exchanges(other, 1.5, 64, beside=True).observed[0].forward[0] == [kernels]


def test_a_part_of_a_message_inside_of_a_host_is_hidden() -> None:
    machine = with_hidden_share(load_machine("h100-ndr"), 0.2)
    assert {link.overlap for link in machine.links["host"].values()} == {0.2}
    assert {link.overlap for link in machine.links["hosts"].values()} == {1.0}
