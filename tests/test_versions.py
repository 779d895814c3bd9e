"""Versions that are written in several places agree: docs/versions.md, constraints.txt, setup.py and others."""

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUP = (ROOT / "setup.py").read_text()
TABLE = {
    cells[0].strip(): [cell.strip() for cell in cells[1:]]
    for line in (ROOT / "docs" / "versions.md").read_text().splitlines()
    if line.startswith("| ") and len(cells := line.strip("|").split("|")) == 4
}
PINNED = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def written(pattern: str) -> str:
    """The first group of `pattern` in setup.py."""
    found = re.search(pattern, SETUP)
    assert found, pattern
    return found[1]


def test_the_table_has_the_pinned_versions_and_the_supported_ranges():
    assert {name: row[1] for name, row in TABLE.items() if name in PINNED} == PINNED
    newest = int(written(r"range\(10, (\d+)\)")) - 1
    assert TABLE["Python"][0] == f"{written(r'python_requires=.>=([0-9.]+)')} to 3.{newest}"
    for name in ("torch", "transformers"):
        assert TABLE[name][0] == written(rf'"{name}>=([0-9.]+)"') + " or later"
    for text in (TABLE["Python"][0], TABLE["torch"][0].split()[0]):
        assert text in (ROOT / "README.md").read_text()


@pytest.mark.skipif("CI" not in os.environ, reason="only .ci/run installs the pinned versions")
def test_the_tests_run_with_the_versions_of_the_table():
    installed = {name: version(name).partition("+")[0] for name in PINNED}
    assert installed == PINNED
    minor = sys.version_info.minor
    assert int(written(r"python_requires=.>=3.(\d+)")) <= minor < int(written(r"range\(10, (\d+)"))


def test_the_version_of_a_release_is_the_same_everywhere():
    release = written(r'version="([0-9.]+)"')
    assert f"\nversion: {release}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{release}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"Version {release}" in (ROOT / "README.md").read_text()


def test_a_feature_that_needs_a_newer_transformers_names_both_versions(monkeypatch):
    from xds.utils import transformers_version
    from xds.utils.errors import UsageError

    transformers_version.need_transformers("sequence_parallel_size")
    monkeypatch.setattr(transformers_version, "version", lambda name: "4.57.1")
    said = (
        "^sequence_parallel_size: needs transformers 5 or later, and 4.57.1 is installed; run pip"
    )
    with pytest.raises(UsageError, match=said):
        transformers_version.need_transformers("sequence_parallel_size")
