"""Fails early, with the remedy, when xds is not installed in this environment."""

import os
import sys
from pathlib import Path

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
