"""Tests that the page of combinations is what training each pair of features gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_pairs import FEATURES, cells, config_of, outcome, page, pairs, problems

pytest.importorskip("transformers", reason="pip install -e '.[test]'")
PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
COMMAND = "PYTHONPATH=tests python tests/feature_pairs.py > docs/combinations.md"


def test_settings_are_merged() -> None:
    found = config_of(("ZeRO 3", "NVMe"))["zero_optimization"]
    assert found["stage"] == 3 and found["offload_optimizer"]["device"] == "nvme"
    assert config_of(("ZeRO 1", "offload_param"))["zero_optimization"]["stage"] == 3
    assert FEATURES["ZeRO 1"] == {"zero_optimization": {"stage": 1}}


def test_a_pair_of_features_trains_as_the_page_says() -> None:
    pair = ("tensor", "offload_param")
    assert problems(outcome(pair)) == cells(PAGE.read_text())[pair] == []


def test_a_refused_pair_is_refused_as_the_page_says() -> None:
    pair = ("offload_param", "1-bit Adam")
    assert problems(outcome(pair)) == cells(PAGE.read_text())[pair]
    assert len(problems(outcome(pair))) == 2


def test_the_page_has_these_features() -> None:
    said = cells(PAGE.read_text())
    assert said.keys() == set(pairs()), f"run: {COMMAND}"
    assert page({pair: "\n".join(lines) for pair, lines in said.items()}) == PAGE.read_text()


@pytest.mark.slow
def test_the_page_is_current() -> None:
    """Every 24th pair; the command trains all of them."""
    said = cells(PAGE.read_text())
    for pair in pairs()[::24]:
        assert problems(outcome(pair)) == said[pair], f"{pair}; run: {COMMAND}"
