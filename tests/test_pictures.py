"""The pictures of the documentation are what their script draws, and they show what the code does."""

import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_docs
import test_import_order

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"


@pytest.fixture(scope="module")
def script():
    path = list(sys.path)
    yield runpy.run_path(str(FOLDER / "draw.py"))
    sys.path[:] = path


@pytest.mark.slow
def test_each_picture_is_the_one_that_its_script_draws(script):
    drawn = {name: draw().svg() for name, draw in script["PICTURES"].items()}
    assert sorted(drawn) == sorted(path.stem for path in FOLDER.glob("*.svg"))
    for name, text in drawn.items():
        assert (FOLDER / f"{name}.svg").read_text() == text, f"run docs/pictures/draw.py {name}"
        root = ElementTree.fromstring(text)
        assert root[0].tag.endswith("title") and root[0].text
        # the smallest text has 11.5 pixels where a page shows the picture 700 pixels wide
        assert float(root.attrib["width"]) == script["WIDTH"] == 760
        assert "prefers-color-scheme:dark" in text


def test_each_picture_is_on_a_page():
    shown = {link for page in test_docs.PAGES for link in test_docs.LINK.findall(page.read_text())}
    names = {Path(link).name for link in shown}
    assert [path.name for path in FOLDER.glob("*.svg") if path.name not in names] == []


def test_the_floors_of_the_house_are_those_that_imports_keep(script):
    floors = [tuple(name for name, _ in rooms) for rooms in script["FLOORS"]]
    assert floors[::-1] == list(test_import_order.LAYERS)


def test_the_bytes_of_a_stage_are_those_of_its_shards(script):
    """As in section 3 of the ZeRO paper: 2, 4, 10 bytes an element, divided from stage 3, 2, 1 on."""
    for stage, element_bytes in enumerate((16, 6 + 10 / 8, 2 + 14 / 8, 16 / 8)):
        found = sum(script["planned_bytes"](stage).values())
        assert found == pytest.approx(6_738_415_616 * element_bytes, rel=1e-6)
