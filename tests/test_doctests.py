"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = [file.parent.name for file in ROOT.glob("*/__init__.py")]
FILES = [
    file.relative_to(ROOT)
    for package in sorted(PACKAGES)
    for file in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_examples_of_a_module_hold(file: Path) -> None:
    module = importlib.import_module(f"xds.{'.'.join(file.with_suffix('').parts)}")
    found = doctest.testmod(module, extraglobs={"torch": torch})
    assert found.attempted > 0 and found.failed == 0
