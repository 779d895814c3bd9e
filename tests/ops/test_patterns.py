"""Tests of the regular expressions that a config may have: what matches, and that none runs on."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from xds.utils import patterns
from xds.utils.patterns import matching

NAMES = [
    "",
    "a",
    "b",
    "aa",
    "ab",
    "ba",
    "aba",
    "abab",
    "a.b",
    "a.a.b",
    ".a",
    "a.",
    "a+",
    "[a]",
    "a\nb",
]


SLOW = ["(a+)+$", "(a|a)*$", "a?" * 40 + "a" * 40, "(a|a)" * 40 + "b", ".*.*.*.*.*.*.*.*b"]


@pytest.mark.parametrize("text", SLOW)
def test_an_expression_that_does_not_end_is_refused(text: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(patterns, "MOST_SECONDS", 1.0)
    with pytest.raises(
        ValueError, match="needs more than 1 s for 2 names; write one with fewer repeats"
    ):
        matching(text, ["a" * 39 + "c", "a" * 200 + "c"])


@pytest.mark.parametrize(
    "text", ["", "b", "a+", r"a\+", "[*+?|]a", "a*b", "(a|b)*", "(?:a.)+$", "(?i)B|A|C"]
)
@pytest.mark.parametrize("anywhere", [False, True])
def test_both_ways_find_the_same(text: str, anywhere: bool) -> None:
    find = re.compile(text, re.IGNORECASE)
    wanted = [bool((find.search if anywhere else find.match)(name)) for name in NAMES]
    assert matching(text, NAMES, anywhere=anywhere, flags=re.IGNORECASE) == wanted


def test_a_plain_expression_starts_no_process(monkeypatch: Any) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert matching(r".*\.o_proj\.weight$", ["h.0.o_proj.weight", "o_proj"]) == [True, False]
    with pytest.raises(TypeError):
        matching(r"(.*\.)*o_proj", ["o_proj"])
