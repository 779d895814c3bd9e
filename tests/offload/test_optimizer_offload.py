"""Tests: an optimizer on the host gives the bits of one on the device, however late its copies are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import offload_runs
import pytest
from offload_runs import CPU, GUESS, HALF, OVERLAP, PARAMS, check_equal
from thinned import few_of
from warm_ranks import warm

SLOW = pytest.mark.slow
STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")


def check(world_size: int, case: tuple[Any, ...], offloads: list[dict[str, Any]]) -> None:
    """case: stage, precision, accumulation, optimizer, model."""
    stage, precision, accumulation, *rest = case
    ranks = warm(world_size)
    plain = ranks.run(offload_runs.train, stage, precision, accumulation, None, *rest)
    for offload in offloads:
        found = ranks.run(offload_runs.train, stage, precision, accumulation, offload, *rest)
        for one, other in zip(plain, found, strict=True):
            check_equal(one, other)


def _sharp(cases: Iterable[tuple[Any, ...]], runs: Callable[..., bool]) -> list[Any]:
    """The cases; those of which `runs` is false are slow."""
    return [case if runs(*case) else pytest.param(*case, marks=SLOW) for case in cases]


@pytest.mark.parametrize(
    ("stage", "precision"),
    _sharp(
        product(STAGES, PRECISIONS),
        lambda s, p: (s, p) in ((0, "bf16"), (1, "fp16"), (2, "bf16"), (3, "fp32")),
    ),
)
def test_two_ranks(stage: int, precision: str) -> None:
    is_even = (stage + PRECISIONS.index(precision)) % 2 == 0  # the others are slow tests
    offloads = [CPU, GUESS] if is_even else [HALF, OVERLAP]
    check(2, (stage, precision, 2 if precision == "bf16" else 1), offloads)


@pytest.mark.parametrize(
    ("precision", "accumulation"),
    _sharp(product(PRECISIONS, (1, 2)), lambda p, a: (p == "bf16") == (a == 2)),
)
def test_one_rank(precision: str, accumulation: int) -> None:
    check(1, (2, precision, accumulation), [CPU, HALF, OVERLAP, GUESS])


@pytest.mark.parametrize(
    ("world_size", "precision"),
    _sharp(product((1, 2), PRECISIONS), lambda w, p: (p == "bf16") == (w == 2)),
)
def test_parameters_on_the_host(world_size: int, precision: str) -> None:
    accumulation = 2 if precision == "bf16" else 1
    is_even = (world_size + PRECISIONS.index(precision)) % 2 == 0
    offloads = [PARAMS, PARAMS | GUESS] if is_even else [PARAMS | CPU, PARAMS | HALF]
    check(world_size, (3, precision, accumulation), offloads)


@pytest.mark.parametrize(
    "optimizer",
    ["Lion", "Muon", "RMSprop", *(pytest.param(name, marks=SLOW) for name in ("Lamb", "Adagrad"))],
)
def test_other_optimizers(optimizer: str) -> None:
    if optimizer == "RMSprop":
        check(2, (1, "bf16", 1, optimizer), [CPU])
    else:
        guess = [] if optimizer in ("Lamb", "Muon") else [GUESS]
        check(2, (3, "bf16", 1, optimizer), [CPU, CPU | PARAMS, *guess])


@pytest.mark.parametrize(
    ("feature", "world_size"),
    [
        *(("tied", 2), ("checkpointed_reentrant", 1)),
        *(pytest.param("reused", ranks, marks=SLOW) for ranks in (1, 2)),
        *(pytest.param("frozen", ranks, marks=SLOW) for ranks in (1, 2)),
        pytest.param("tied", 1, marks=SLOW),
        pytest.param("checkpointed_reentrant", 2, marks=SLOW),
    ],
)
def test_gradients_that_arrive_twice_or_never(feature: str, world_size: int) -> None:
    check(world_size, (2, "bf16", 2, "AdamW", feature), [OVERLAP, GUESS])


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 3])
def test_late_copies_and_updates(stage: int, seed: int) -> None:
    ranks = warm(2)
    plain = ranks.run(offload_runs.train, stage, "bf16", 2, None)
    guess = GUESS | PARAMS if stage == 3 else GUESS
    for offload in (CPU, CPU | PARAMS, guess) if stage == 3 else (CPU, OVERLAP, guess):
        found = ranks.run(offload_runs.train_late, seed, stage, "bf16", 2, offload)
        for one, other in zip(plain, found, strict=True):
            check_equal(one, other)


@SLOW
def test_late_copies_and_updates_on_one_rank() -> None:
    ranks = warm(1)
    for precision, accumulation in (("bf16", 1), ("fp32", 2)):
        (plain,) = ranks.run(offload_runs.train, 2, precision, accumulation, None)
        for offload in (CPU, OVERLAP, GUESS):
            (found,) = ranks.run(offload_runs.train_late, 0, 2, precision, accumulation, offload)
            check_equal(plain, found)


MODELS = [  # feature, world_size
    *(("plain", n) for n in (1, 2, 4)),
    *(("tied", 2), ("lora", 2), ("unused", 1), ("divergent", 2)),
]
OFFLOADS = {"cpu": CPU, "half": HALF, "overlap": OVERLAP, "guess": GUESS, "params": PARAMS}
OFFLOADS |= {"half, params": HALF | PARAMS, "guess, params": GUESS | PARAMS}
CHOSEN = few_of(
    [
        (model, stage, precision, name)
        for model, stage, precision, name in product(MODELS, STAGES, PRECISIONS, OFFLOADS)
        if (name not in ("cpu", "overlap") if stage == 3 else "params" not in name)
    ],
    lambda case: (*case[0], *case[1:]),
)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "world_size"), MODELS)
def test_combinations(feature: str, world_size: int) -> None:
    for model, stage, precision, name in CHOSEN:
        if model == (feature, world_size):
            case = (stage, precision, 2 if precision == "bf16" else 1, "AdamW", feature)
            check(world_size, case, [OFFLOADS[name]])
