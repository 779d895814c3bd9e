"""The rehearsal finds faults that tests on a CPU cannot see. See seeded_faults.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeded_faults import FAULTS, ROOT, Fault, report_of


def test_the_code_has_the_line_that_a_fault_changes() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault.name


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_rehearsal_finds(fault: Fault, tmp_path: Path) -> None:
    found, report = report_of(tmp_path, fault)
    assert found, report
