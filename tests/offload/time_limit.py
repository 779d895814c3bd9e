"""Test helper: fails a test that hangs. Import `limit_time` into a test file; it applies to all tests there."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

SECONDS = 30


@pytest.fixture(autouse=True)
def limit_time() -> Iterator[None]:
    """Interrupt the test after SECONDS, also while it waits for a lock."""

    def fail(*_: object) -> None:
        pytest.fail(f"the test took more than {SECONDS} seconds")

    old = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
