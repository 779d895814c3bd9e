"""Tests: updates that run during backward give the bits of those after it, whatever happens in between."""

from __future__ import annotations

from itertools import product
from typing import Any

import guess_events
import pytest
import torch
from offload_runs import GUESS, HALF, OVERLAP, PARAMS
from thinned import few_of
from warm_ranks import warm

import xds
from xds.engine.steps.forecast import NUM_NORMS, Forecast
from xds.offload.spare import Spare
from xds.utils.errors import ConfigError


def check(world_size: int, stage: int, precision: str, accumulation: int, offload: Any) -> None:
    ranks = warm(world_size)
    case = (stage, precision, accumulation)
    plain = ranks.run(guess_events.run, *case, None)
    found = ranks.run(guess_events.run, *case, offload)
    for one, other in zip(plain, found, strict=True):
        assert repr(one["numbers"]) == repr(other["numbers"])
        for kind in ("values", "computed"):
            for name, value in one[kind].items():
                assert torch.equal(value, other[kind][name]), name
        assert other["used"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_events_between_backward_and_step(precision: str) -> None:
    check(1, 2, precision, 1, GUESS)


@pytest.mark.slow
def test_events_with_parameters_on_the_host() -> None:
    check(2, 3, "bf16", 2, GUESS | PARAMS)


MORE = GUESS["offload_optimizer"]
SECTIONS: dict[str, dict[str, Any]] = {
    "guess": GUESS,
    "half": {"offload_optimizer": HALF["offload_optimizer"] | MORE},
    "overlap": {"offload_optimizer": OVERLAP["offload_optimizer"] | MORE},
    "params": GUESS | PARAMS,
}
EVERY = product((1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2), SECTIONS)
CHOSEN = few_of(  # in fp32 the parameters on the host are the masters
    [case for case in EVERY if case[3] != "params" or (case[0] == 3 and case[1] != "fp32")],
    tuple,
)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision", "world_size", "section"), CHOSEN)
def test_events_in_combinations(stage: int, precision: str, world_size: int, section: str) -> None:
    check(world_size, stage, precision, 2 if precision == "bf16" else 1, SECTIONS[section])


@pytest.mark.parametrize(
    ("norms", "limit", "is_plain"),
    [
        ([], 1.0, False),
        ([0.5], 1.0, True),
        ([0.81], 1.0, False),
        ([9.0], 0.0, True),
        ([float("inf"), 0.1], 0.0, False),
        ([float("nan"), 0.1], 1.0, False),
        ([5.0, *[0.1] * (NUM_NORMS - 1)], 1.0, False),
        ([5.0, *[0.1] * NUM_NORMS], 1.0, True),
    ],
)
def test_forecast(norms: list[float], limit: float, is_plain: bool) -> None:
    forecast = Forecast()
    for norm in norms:
        forecast.observe(norm)
    assert forecast.is_plain(limit) == is_plain


def test_the_spare_memory_has_a_limit() -> None:
    spare = Spare(pin=False, limit_bytes=8192)
    small, large = spare.take([1000, 500], 24), spare.take([4000], 96)
    assert small is not None and large is not None
    assert [memory.shape for memory in small.memory] == [(1000,), (500,)]
    assert spare.take([4000], 96) is None
    assert spare.allocated_bytes == 5620
    spare.give(large)
    spare.give(small)
    assert spare.take([4000], 96) is large
    assert spare.take([1000, 500], 24) is small
    assert Spare(pin=False).take([1 << 60], 0) is None


@pytest.mark.parametrize(
    ("optimizer", "offload", "words"),
    [
        ("Lamb", {"device": "cpu"}, "Lamb uses norms or products of whole tensors"),
        ("Muon", {"device": "cpu"}, "Muon uses norms or products of whole tensors"),
        ("AdamW", {"device": "none"}, "needs updates on the host"),
    ],
)
def test_refused(optimizer: str, offload: dict[str, Any], words: str) -> None:
    zero = {"stage": 2, "offload_optimizer": offload | {"super_offload": True}}
    optimizer_section = {"type": optimizer, "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(ConfigError, match=words):
        xds.Config.load(config | {"optimizer": optimizer_section})
