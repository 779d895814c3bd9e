"""Tests of what a plan and DeepSpeed's layer_specs say about each module, and of their refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import xds
from xds.tensor.layer_specs import read_specs
from xds.tensor.plan import _matches, read_plan
from xds.tensor.styles import ParallelStyle, StyleName


def small() -> nn.Module:
    model = nn.Module()
    model.fused, model.out, model.gate = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 2)
    model.tokens = nn.Embedding(10, 8)
    return model


def specs(*entries: dict[str, Any]) -> dict[str, ParallelStyle]:
    config = {"layer_specs": list(entries)}
    return read_specs(config, {"gate": ParallelStyle(StyleName.COLWISE_GATHER)}, small())


@pytest.mark.parametrize(
    ("entry", "name", "way"),
    [
        (
            {"patterns": ["out.weight$"], "partition_type": "row"},
            "out",
            ParallelStyle(StyleName.ROWWISE),
        ),
        ({"patterns": ["fused"]}, "fused", ParallelStyle(StyleName.COLWISE)),
        (
            {"patterns": ["fused"], "shape": [3, -1]},
            "fused",
            ParallelStyle(StyleName.COLWISE, (8, 8, 8)),
        ),
        (
            {"patterns": ["fused"], "shape": [[12, 6, 6], -1], "partition_dim": 0},
            "fused",
            ParallelStyle(StyleName.COLWISE, (12, 6, 6)),
        ),
        (
            {"patterns": ["fu.*"], "gather_output": True},
            "fused",
            ParallelStyle(StyleName.COLWISE_GATHER),
        ),
        ({"patterns": [".*tokens.*"]}, "tokens", ParallelStyle(StyleName.EMBEDDING)),
        ({"patterns": ["gate"], "partition_type": "skip"}, "gate", None),
    ],
)
def test_layer_specs_are_read(entry: dict[str, Any], name: str, way: ParallelStyle | None) -> None:
    found = specs(entry)
    assert found.get(name) == way
    assert name == "gate" or found["gate"] == ParallelStyle(StyleName.COLWISE_GATHER)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"patterns": ["q_proj"]}, "match no weight"),
        ({"patterns": ["fused"], "partition_type": "columns"}, 'one of "column", "row", "skip"'),
        ({"patterns": ["fused"], "shape": [5, -1]}, "fused has 24 columns or rows"),
        ({"patterns": ["("]}, "'(' must be a regular expression"),
        ({"patterns": ["a" * 1001]}, "has 1001 characters; write at most 1000"),
        ({"patterns": ["fused"], "partition_dim": 1}, "leave it out"),
        ({"patterns": ["fused"], "kind": 1}, "unknown key"),
        ({"partition_type": "row"}, "must be an object with patterns"),
    ],
)
def test_layer_specs_that_do_not_fit_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(xds.UsageError, match=r"partition_config.layer_specs\[0\]") as caught:
        specs(entry)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"out": "moe_tp_experts"}, "'out' = 'moe_tp_experts': experts of a mixture"),
        ({"out": "local_colwise"}, "without a sum are not supported"),
        ({"out": "vocabulary"}, "must be one of"),
        ({"out": "embedding_rowwise"}, "only nn.Embedding"),
        ({"tokens": "embedding_colwise"}, "cut by rows only"),
        ({"tokens": "colwise"}, "only linear layers"),
    ],
)
def test_words_that_cannot_be_followed_are_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(xds.UsageError) as caught:
        read_plan(plan, small())
    assert message in str(caught.value)


def test_words_of_older_plans_are_read() -> None:
    found = read_plan(
        {"out": "rowwise_rep", "gate": "colwise_rep", "fused": "sequence_parallel"}, small()
    )
    styles = {
        "out": StyleName.ROWWISE_SPLIT,
        "gate": StyleName.COLWISE_GATHER,
        "fused": StyleName.TOKENS,
    }
    assert found == {name: ParallelStyle(word) for name, word in styles.items()}


NAMES = ["", "a", "b", "aa", "ab", "aba", "abab", "a.b", "a.a.b", ".a", "a.", "a+", "[a]", "a\nb"]


def test_a_star_is_one_or_more_characters_of_a_part() -> None:
    for pattern in ("", "*", "**", "a*", "*a", "*b*", "a*a*b", "*.b", "a.*.*", "a+", "[a]"):
        parts = [re.escape(part).replace(r"\*", "[^.]+") for part in pattern.split(".")]
        for name in NAMES:
            assert _matches(pattern, name) == bool(re.fullmatch(r"\.".join(parts), name)), name
    assert not _matches("*a" * 40 + "*b", "a" * 2000)  # at once
