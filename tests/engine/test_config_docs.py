"""docs/config.md is what the tables say, and names every key."""

from pathlib import Path

import pytest

from xds.engine.config.config import Config
from xds.engine.config.docs import MARK, reference

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_current():
    written = DOCS.read_text().partition(MARK)[2]
    assert written == "\n" + reference(), "run: python -m xds.engine.config.docs docs/config.md"


@pytest.mark.parametrize("key", sorted({*Config.model_fields, *Config.others} - Config.results))
def test_every_top_level_key_is_on_the_page(key):
    assert f"`{key}`" in reference()


@pytest.mark.parametrize("word", ["(TODO)", "not implemented"])
def test_no_loose_ends(word):
    assert word not in reference()
