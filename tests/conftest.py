"""Fails early, with the remedy, when xds is not installed. Messages are shown to each test as to the first."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    import xds  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise SystemExit(
        "xds is not installed here: run `pip install -c constraints.txt -e .[test]` first"
    ) from error

if os.environ.get("XDS_REHEARSE"):  # ranks have the device of tests/rehearsal
    sys.path.append(str(Path(__file__).parent / "rehearsal"))
    import tests_on_device

    tests_on_device.use()


@pytest.fixture(autouse=True)
def _messages_as_at_the_start() -> Iterator[None]:
    """What `xds.initialize` and `xds --quiet` set for their messages does not reach the next test."""
    logger, variable = logging.getLogger("xds"), os.environ.get("XDS_LOG_LEVEL")
    yield
    if not logger.handlers:  # else the level is that of `deepspeed.utils.logger`
        logger.setLevel(logging.NOTSET)
    os.environ.pop("XDS_LOG_LEVEL", None)
    if variable is not None:
        os.environ["XDS_LOG_LEVEL"] = variable
