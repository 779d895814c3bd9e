"""What the tests of the CPU found when their ranks had the device (tests_on_device.py): one small case each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device_ranks import ranks, stop_ranks


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    stop_ranks()


def viewed() -> bool:
    x = torch.ones(1, device="cuda")
    with torch.inference_mode():
        return x.view(1, 1).is_inference()


def test_a_view_in_inference_mode_is_as_its_base() -> None:
    assert ranks(1).run(viewed) == [False]
