"""Bytes that pipelines send and hold, exact: as many as without micro-batches, at every ZeRO stage.

f = (n - 1) / n for the n ranks of a buffer; sums over the padded buffers of a rank's stage. A step sends
2 e numel f, and the leaves of each micro-batch once forward and once back over each boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from helpers import run_ranks
from pipeline_cases import COUNT, Case
from pipeline_runs import LENGTH, WIDTH, batches
from thinned import pairwise

import xds

SAMPLES = 2
FLAT = tuple[int, int, int, bool]  # elements, bytes of one, ranks, in the root unit


@dataclass(frozen=True)
class Counted:
    """One rank's bytes of a step by kind, its flat buffers, its bytes held, its micro-batches in flight."""

    sent: dict[str, int]
    flats: list[FLAT]
    held: dict[str, int]
    in_flight: int


def count(case: Case, reduce: str) -> Counted:
    config = case.config()
    config["pipeline"]["reduce"] = reduce
    engine = xds.initialize(case.model(), config)
    seen = []
    for step in range(3):  # the first sends headers as well
        engine.train_batch(iter(batches(step, engine.dp_rank, COUNT, SAMPLES)))
        seen.append(engine.bytes_sent())
    sent = {kind: seen[2][kind] - seen[1][kind] for kind in seen[2]}
    flats = [
        (flat.layout.numel, flat.dtype.itemsize, flat.collectives.world_size, unit.is_root)
        for unit in engine._sharded.units
        for flat in unit.params
    ]
    in_flight = engine._batches._executor.max_in_flight
    found = Counted(sent, flats, engine.memory_plan(), in_flight)
    engine.destroy()
    return found


def check_sent(found: Counted, case: Case, rank: int, reductions: int = 1) -> None:
    shares = [(numel * size * (n - 1) // n, is_root) for numel, size, n, is_root in found.flats]
    # stage 0 gathers the sums of gradients, which are fp32; other stages gather parameters
    wide = 2 if case.stage == 0 and case.precision != "fp32" else 1
    assert found.sent["all_gather"] == wide * sum(share for share, _ in shares)
    expected = sum(share * (1 if is_root else reductions) for share, is_root in shares)
    assert found.sent["reduce_scatter"] == expected
    element = 4 if case.precision == "fp32" else 2
    flow = COUNT * SAMPLES * LENGTH * WIDTH * element
    stage = rank // case.data
    assert found.sent.get("activations", 0) == (flow if stage < case.pipe - 1 else 0)
    assert found.sent.get("gradients", 0) == (flow if stage else 0)
    assert found.sent.get("header", 0) == 0


def check_held(found: Counted, case: Case) -> None:
    """fp32 without masters of their own. A tied buffer is whole at stage 3."""
    whole = sum(numel * size for numel, size, _, _ in found.flats)
    parts = sum(numel * size // n for numel, size, n, _ in found.flats)
    is_shared = [n > case.data for _, _, n, _ in found.flats]
    kept = sum(
        numel * size // (1 if shared else n)
        for (numel, size, n, _), shared in zip(found.flats, is_shared, strict=True)
    )
    assert found.held["param"] == (kept if case.stage == 3 else whole)
    assert found.held["grad"] == (whole if case.stage < 2 else parts)
    steps = 4 * len(found.flats)
    assert found.held["optimizer"] == 2 * (whole if case.stage == 0 else parts) + steps


def check(case: Case, reduce: str = "step") -> None:
    for rank, found in enumerate(run_ranks(count, case.world_size, case, reduce)):
        each = reduce == "micro_batch" and case.stage >= 2
        check_sent(found, case, rank, COUNT if each else 1)
        if case.precision == "fp32":
            check_held(found, case)
        assert found.in_flight == min(COUNT, case.pipe - rank // case.data)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_reduces_and_gathers_once(stage: int) -> None:
    check(Case(2, 2, stage, kind="tied"))


def test_reducing_each_micro_batch_sends_a_multiple() -> None:
    check(Case(2, 2, 2), "micro_batch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "kind", "reduce"),
    pairwise(range(4), ("fp32", "bf16"), ("plain", "tied"), ("step", "micro_batch")),
)
def test_bytes_of_every_stage(stage: int, precision: str, kind: str, reduce: str) -> None:
    case = Case(2, 2, stage, "1f1b", precision, kind)
    check(case, reduce)
    if precision == "fp32":
        check(replace(case, pipe=4, data=2))
