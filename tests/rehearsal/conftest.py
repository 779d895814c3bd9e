"""Ranks on the device serve all modules; large sets of them end with their module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_ranks import stop_ranks


@pytest.fixture(scope="module", autouse=True)
def large_sets_end() -> Iterator[None]:
    yield
    stop_ranks(above=2)


@pytest.fixture(scope="package", autouse=True)
def all_end() -> Iterator[None]:
    yield
    stop_ranks()
